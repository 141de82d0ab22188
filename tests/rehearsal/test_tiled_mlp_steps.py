"""Steps whose feed-forward networks run in shards of the sequence, by the code of Liger, DeepSpeed and axolotl on simulated GPUs,
compared with the prediction.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from framework_jobs import CONFIG, DEEPSPEED
from matrix import in_turn, taken
from rehearsed_jobs import has_axolotl, row_of
from test_compiled import ENGINES, SHAPES
from test_frameworks import rehearsed

pytestmark = pytest.mark.slow

Job = tuple[dict[str, Any], str, str, str, str, bool, int, int, int, int]


def _job(
    model: str, code: str, engine: str, precision: str, checkpointing: str = "none", *, adapts: bool = False, batch: int = 3,
    length: int = 4096, shards: int = 8, accumulation: int = 1,
) -> Job:  # fmt: skip
    """A job whose largest tensors are whole pages of 2 MiB, to which the allocator adds nothing."""
    return (
        {"model_type": model, **SHAPES},
        code,
        engine,
        precision,
        checkpointing,
        adapts,
        batch,
        length,
        shards,
        accumulation,
    )


JOBS: dict[str, Job] = {
    "liger, fsdp2": _job("llama", "liger", "fsdp2", "bf16-mixed"),
    "liger, one GPU, checkpointed, accumulated": _job("qwen3", "liger", "single", "bf16", "full", accumulation=2),
    "axolotl, one GPU": _job("llama", "axolotl", "single", "bf16-mixed"),
}
MORE: dict[str, Job] = {
    f"{model} {code} {engine} {precision} {checkpointing} {adapts}": _job(
        model, code, engine, precision, checkpointing, adapts=adapts
    )
    for model, code, engine, precision, checkpointing, adapts in product(
        ("llama", "qwen3", "gemma", "phi3"), ("liger", "axolotl"), ("single", "fsdp2"), ("bf16", "bf16-mixed"), ("none", "full"),
        (False, True),
    )
    if not (engine == "fsdp2" and (adapts or code == "axolotl"))
}  # fmt: skip
CASES: dict[str, Job] = dict(taken(list(JOBS.items()), list(MORE.items()), days=3))


@pytest.fixture(scope="module")
def peaks(run: Callable[..., dict[str, int]], rehearsal_python: Path) -> dict[str, int]:
    """The peak of each case. An older environment of rehearsals lacks axolotl."""
    takes_axolotl = has_axolotl(rehearsal_python) or "CI" in os.environ
    cases = {name: job for name, job in CASES.items() if job[1] != "axolotl" or takes_axolotl}
    return run("tiled_mlp.py", json.dumps(cases))


@in_turn(1, of=2)
@pytest.mark.parametrize("name", CASES)
def test_a_tiled_mlp_needs_what_is_predicted(name: str, peaks: dict[str, int], tmp_path: Path) -> None:
    if name not in peaks:
        pytest.skip("the environment of rehearsals has no axolotl")
    config, code, engine, precision, checkpointing, adapts, batch, length, shards, accumulation = CASES[name]
    others: dict[str, Any] = {"use_peft": True, "lora_r": 8, "lora_target_modules": "all-linear"} if adapts else {}
    if code == "axolotl":  # the script has the rest of axolotl neither in its kernels nor in its allocator
        others |= {"framework": "axolotl", "lora_kernels": "none", "allocator_conf": "expandable_segments:False"}
    if precision == "bf16-mixed" and (adapts or code == "axolotl"):
        others["dtype"] = "float32"  # as the script makes the base, not as a checkpoint or axolotl
    if (
        engine == "fsdp2"
    ):  # every rank loads the model and moves one unit at a time to its GPU, as on a host with enough memory
        others["host_memory"] = "1TiB"
    row = row_of(
        tmp_path, config, precision=precision, micro_batch_size=batch, seq_len=length, activation_checkpointing=checkpointing,
        tiled_mlp=str(shards), gradient_accumulation_steps=accumulation, **ENGINES[engine], **others,
    )  # fmt: skip
    assert row.peak_allocated_bytes == pytest.approx(peaks[name], rel=1e-3)


SMALL = CONFIG | {"vocab_size": 100, "intermediate_size": 6144}
"""The peak is in a layer."""
BY_DEEPSPEED = """
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
from transformers.models.llama.modeling_llama import LlamaMLP
whole = LlamaMLP.forward
LlamaMLP.forward = lambda self, x: TiledMLP.apply(whole, self, x, 4, list(self.parameters()))
deepspeed.init_distributed()
"""


@in_turn(2, of=4)
@pytest.mark.parametrize("stage", taken([3], [2]))
def test_deepspeeds_engine_waits_for_the_last_shard(stage: int, rehearsal_python: Path, tmp_path: Path) -> None:
    text = (
        DEEPSPEED.replace("deepspeed.init_distributed()", BY_DEEPSPEED).replace("32000", "100").replace("1536", "6144")
    )
    text = (
        text.replace("(2, 512)", "(4, 2048)")
        .replace('per_gpu": 2', 'per_gpu": 4')
        .replace('"stage": 3', f'"stage": {stage}')
    )
    if stage == 2:
        text = text.replace("with deepspeed.zero.Init(config_dict_or_path=settings):\n    ", "")
    (tmp_path / "train.py").write_text(text)
    command = ("torchrun", "--nproc-per-node", "2", "train.py")
    found = rehearsed(rehearsal_python, tmp_path, *command, gpus=2, ranks=(0,))
    steady = max(phase["peak_allocated_bytes"] for phase in found["ranks"][0]["phases"][-3:])
    row = row_of(
        tmp_path, SMALL, gpu="A100-80GB", gpus=2, strategy=f"zero{stage}", backend="deepspeed", framework="deepspeed",
        micro_batch_size=4, seq_len=2048, tiled_mlp="4",
    )  # fmt: skip
    assert row.peak_allocated_bytes == pytest.approx(steady, rel=1e-3)
