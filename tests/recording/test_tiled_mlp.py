"""Feed-forward networks in shards of the sequence: which jobs are refused, why, and what else changes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken

from fsdp_advisor import estimate, recommend
from fsdp_advisor.advice.search_space import search_space
from fsdp_advisor.errors import UsageError
from fsdp_advisor.estimator import lazy_report
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.strategy_estimate import StrategyEstimate

CONFIG: dict[str, Any] = {
    "model_type": "llama", "hidden_size": 256, "intermediate_size": 2048, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 96,
}  # fmt: skip
USUAL: dict[str, Any] = {"gpu": "H100-80GB", "strategy": "ddp", "micro_batch_size": 2, "seq_len": 2000}


def _row(folder: Path, config: dict[str, Any] = CONFIG, **options: Any) -> StrategyEstimate:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    (row,) = estimate(model=str(path), **{**USUAL, **options}).estimates
    return row


@in_turn(0, of=3)
@pytest.mark.slow
def test_a_tiled_mlp_needs_less_memory_and_more_time(tmp_path: Path) -> None:
    """Of 2,000 tokens `auto` makes 8 shards, one per 256. Backward repeats the forward of the networks."""
    plain, tiled = _row(tmp_path), _row(tmp_path, tiled_mlp="auto")
    assert plain.peak_tensor_bytes is not None and tiled.peak_tensor_bytes is not None
    assert tiled.peak_tensor_bytes < 0.6 * plain.peak_tensor_bytes
    assert tiled.peak_tensor_bytes == _row(tmp_path, tiled_mlp="8").peak_tensor_bytes
    assert plain.step is not None and tiled.step is not None
    assert tiled.step.seconds > plain.step.seconds


@in_turn(1, of=2)
@pytest.mark.slow
def test_shards_that_deepspeed_would_wait_for_in_vain_are_refused(tmp_path: Path) -> None:
    """9 tokens in 4 shards are 3 shards of 3."""
    row = _row(tmp_path, strategy="zero2", backend="deepspeed", gpus=2, micro_batch_size=1, seq_len=9, tiled_mlp="4")
    assert any("9 tokens give only 3 shards of a tiled MLP, not 4" in why for why in row.not_modelled)


@pytest.mark.slow
def test_mixtures_of_experts_are_refused(tmp_path: Path) -> None:
    experts = {"model_type": "mixtral", "num_local_experts": 4}
    row = _row(tmp_path, {**CONFIG, **experts}, tiled_mlp="auto")
    assert row.peak_tensor_bytes is None and any(
        "tiled MLP is modelled for dense decoders" in why for why in row.not_modelled
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": 2}, "DDP fails with a tiled MLP"),
        ({"gpus": 2, "strategy": "zero3", "backend": "fsdp1"}, "FSDP1 fails with a tiled MLP"),
        (
            {"gpus": 2, "strategy": "zero3", "backend": "fsdp2", "framework": "axolotl"},
            "axolotl 0.19's tiled MLP fails with FSDP2",
        ),
        ({"framework": "axolotl", "gradient_accumulation_steps": 2}, "not modelled with gradient accumulation"),
        ({"framework": "trainer"}, "the Trainer has no tiled MLP"),
        ({"framework": "llamafactory"}, "LLaMA-Factory has no tiled MLP"),
        ({"framework": "trl"}, "TRL has no tiled MLP"),
        ({"framework": "torchtitan"}, "torchtitan has no tiled MLP"),
        ({"compile": "layer"}, "not modelled with --compile layer"),
        ({"fp8": "rowwise"}, "not modelled with --fp8 rowwise"),
        ({"activation_offload": True}, "not modelled with --activation-offload"),
    ],
)
def test_jobs_that_are_not_modelled_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        plans(make_request({"model": "gpt2", **USUAL, "tiled_mlp": "auto", **options}), seq_len=2000)


SCRIPT = """
import os, sys, torch, torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from fsdp_advisor.recording.source import LayerStack
from fsdp_advisor.recording.tiled_mlp import tile_mlps

dist.init_process_group("gloo")
shapes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, vocab_size=50)
model = LlamaForCausalLM(LlamaConfig(**shapes))
tile_mlps([LayerStack("model.layers", tuple(model.model.layers))], "liger:4", "llama")
if sys.argv[1] == "ddp":
    trained = torch.nn.parallel.DistributedDataParallel(model)
else:
    trained = FullyShardedDataParallel(model, ModuleWrapPolicy({LlamaDecoderLayer}), use_orig_params=True, device_id=torch.device("cpu"))
tokens = torch.zeros(2, 16, dtype=torch.long)
try:
    trained(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
except RuntimeError as error:
    sys.stdout.write(f"FOUND {str(error).splitlines()[0]}\\n")  # in one piece, as two ranks write at once
    sys.stdout.flush()
os._exit(0)
"""


@in_turn(1, of=2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "error"), taken([("ddp", "Expected to mark a variable ready only once")], [("fsdp1", "size mismatch")])
)
def test_engines_that_are_refused_fail(engine: str, error: str, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        tmp_path / "script.py",
        engine,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert f"FOUND {error}" in done.stdout, done.stderr[-3000:]


def test_all_strategies_leave_out_the_rows_that_cannot_tile_and_say_why() -> None:
    job: dict[str, Any] = {"model": "openai-community/gpt2", "gpu": "H100-80GB", "gpus": 2, "tiled_mlp": "4"}
    report = lazy_report(make_request(job), resolve(job["model"]))
    rows = {(plan.strategy, plan.backend) for plan in report.estimates.plans}
    sharded = {(strategy, backend) for strategy in ("zero2", "zero3") for backend in ("fsdp2", "deepspeed")}
    assert rows == {("zero1", "deepspeed"), *sharded}
    assert any(note.startswith("DDP is left out: DDP fails with a tiled MLP") for note in report.notes)
    axolotl = lazy_report(make_request({**job, "framework": "axolotl"}), resolve(job["model"]))
    assert {plan.backend for plan in axolotl.estimates.plans} == {"deepspeed"}


def test_search_leaves_out_the_engines_that_cannot_tile() -> None:
    request = make_request({"model": "openai-community/gpt2", "gpus": 2, "tiled_mlp": "4"}, RecommendRequest)
    assert {choice.backend for choice in search_space(request, gpus=2, nnodes=1)} == {"fsdp2", "deepspeed"}


@in_turn(1, of=3)
@pytest.mark.slow
def test_recommendation_tiles_and_names_no_strategy_or_target_that_cannot(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    job: dict[str, Any] = {"model": str(path), "gpu": "24GiB", "gpus": 2, "seq_len": 2000, "micro_batch_size": 1}
    advice = recommend(**job, tiled_mlp="auto", activation_checkpointing="none", offload="none")
    found = advice.recommendation
    assert found.winner is not None
    assert found.winner.plan.tiled_mlp == "auto" and found.winner.plan.backend in ("fsdp2", "deepspeed")
    by_size = found.rules[0]
    assert by_size.says == "DDP" and by_size.would_run is False
    assert by_size.because.startswith("DDP fails with a tiled MLP")
    assert "--tiled-mlp auto" in str(advice)
    assert "Other targets: torchrun" not in str(advice)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["deepspeed", "axolotl"])
def test_recommendation_exports_a_tiled_plan_for_its_own_framework_alone(framework: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    text = str(
        recommend(
            model=str(path), gpu="24GiB", gpus=2, seq_len=2000, micro_batch_size=1, tiled_mlp="auto", framework=framework,
            activation_checkpointing="none", offload="none",
        )
    )  # fmt: skip
    assert ("fsdp-advisor export axolotl" in text) == (framework == "axolotl")
    assert ("No export target supports this plan: fsdp2 and ddp write" in text) == (framework == "deepspeed")


@in_turn(1, of=4)
def test_search_refuses_accumulation_that_is_not_modelled() -> None:
    job: dict[str, Any] = {
        "model": "openai-community/gpt2",
        "gpu": "H100-80GB",
        "framework": "axolotl",
        "tiled_mlp": "4",
    }
    with pytest.raises(UsageError, match="not modelled with gradient accumulation"):
        recommend(**job, backend="ddp", micro_batch_size=1, global_batch_size=4)
