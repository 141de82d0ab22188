"""Exported files train a tiny model for two steps in two processes over gloo on the CPU.

The files are run unchanged. Consumers that do not support CPU ranks take each process for a GPU rank
(`workers/cpu_as_gpu.py`). A script, one with adapters and a bundle take turns from day to day.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from export_jobs import job, plan
from filelock import FileLock
from matrix import in_turn, taken, with_all_cases
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_advisor.export import Job, export, find
from fsdp_advisor.export.bundle import bundle
from fsdp_advisor.job.adaptation import Adaptation
from fsdp_advisor.job.plan import Plan

pytestmark = pytest.mark.slow

WORKERS = Path(__file__).with_name("workers")
VOCABULARY = 1000
LAYERS = 2


@pytest.fixture(autouse=True)
def one_launch_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The launchers meet at their default port, 29500, and DeepSpeed names its shared memory after that port."""
    with FileLock(tmp_path_factory.getbasetemp().parent / "launch.lock"):
        yield


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of a llama with a separate head and of one whose head is tied to the embedding."""
    found = {}
    for name, tied in (("untied", False), ("tied", True)):
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=64, intermediate_size=176, num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=VOCABULARY, max_position_embeddings=256, tie_word_embeddings=tied,
        )  # fmt: skip
        found[name] = tmp_path_factory.mktemp(name)
        LlamaForCausalLM(config).save_pretrained(found[name])
    return found


def written(folder: Path, target: str, of: Job) -> Path:
    exported = export(target, of)
    path = folder / exported.file_name
    path.write_text(exported.text)
    return path


def launched(folder: Path, script: str, *arguments: str, **more: str) -> str:
    """Run an exported launch script in `folder` and return its output."""
    inherited = {
        k: v for k, v in os.environ.items() if not k.startswith(("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_"))
    }
    environment = inherited | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(WORKERS),
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "home"),
        **more,
    }
    done = subprocess.run(
        ["bash", script, *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def losses_of(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss ([\d.]+|nan|inf)", output, re.MULTILINE)]


def trained(losses: list[float]) -> bool:
    """Whether there are two losses near log(vocabulary), the loss of a random model."""
    return len(losses) == 2 and all(abs(loss - math.log(VOCABULARY)) < 1 for loss in losses)


# Training scripts, started by the exported torchrun script


def script(folder: Path, of: Job, *arguments: str) -> list[float]:
    written(folder, "ddp" if of.plan.backend == "ddp" else "fsdp2", of)
    # run both nodes on this machine
    written(folder, "torchrun", job(replace(of.plan, mesh=replace(of.plan.mesh, nnodes=1))))
    return losses_of(launched(folder, "torchrun.sh", "--device", "cpu", "--seq-len", "32", "--steps", "2", *arguments))


@in_turn(0, of=3)
def test_fsdp2_script_trains_saves_and_resumes(tiny: dict[str, Path], tmp_path: Path) -> None:
    of = job(
        plan("zero3", "fsdp2", gpus=2, precision="fp32", gradient_accumulation_steps=2, activation_checkpointing="full")
    )
    first = script(tmp_path, of, "--model", str(tiny["untied"]), "--output", "checkpoint", "--lr", "1e-3")
    assert first == pytest.approx(reference(tiny["untied"], accumulation=2), abs=2e-4)
    again = script(tmp_path, of, "--model", str(tiny["untied"]), "--resume", "checkpoint", "--lr", "1e-3")
    assert trained(again) and again[0] < first[0]


@with_all_cases
def test_fsdp2_script_with_a_schedule_free_optimizer_trains_saves_and_resumes(
    tiny: dict[str, Path], tmp_path: Path
) -> None:
    pytest.importorskip("schedulefree")
    of = job(plan("zero3", "fsdp2", gpus=2, precision="fp32", optim="schedule_free_adamw"))
    first = script(tmp_path, of, "--model", str(tiny["untied"]), "--output", "checkpoint", "--lr", "1e-3")
    again = script(tmp_path, of, "--model", str(tiny["untied"]), "--resume", "checkpoint", "--lr", "1e-3")
    assert trained(first) and trained(again) and again[0] < first[0]


def reference(model: Path, accumulation: int) -> list[float]:
    """The losses of the same data in one process without sharding: the mean over both ranks."""
    from torch.utils.data import DistributedSampler

    plain = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    indices = [list(DistributedSampler(range(1 << 20), 2, r, drop_last=True))[: 2 * accumulation] for r in (0, 1)]
    losses = []
    for step in range(2):
        total = 0.0
        for each in (i for rank in indices for i in rank[step * accumulation : (step + 1) * accumulation]):
            generator = torch.Generator().manual_seed(each)
            tokens = torch.randint(VOCABULARY, (32,), generator=generator)[None]
            loss = plain(input_ids=tokens, labels=tokens).loss / (2 * accumulation)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@with_all_cases
@pytest.mark.parametrize(
    ("of", "more"),
    taken(
        [(plan("hsdp", "fsdp2", 2, gpus=2, precision="fp16-mixed", offload="parameters"), ["--defer-reduction"])],
        [
            (plan("zero2", "fsdp2", gpus=2, precision="bf16", optim="sgd_momentum", wrap="none"), ["--init", "random"]),
            (
                plan("ddp", "ddp", gpus=2, precision="bf16-mixed", gradient_accumulation_steps=2),
                ["--tokens", "tokens.npy"],
            ),
        ],
    ),
    ids=taken(["hsdp-offload-fp16"], ["zero2-bf16-sgd-random", "ddp-bf16-mixed-own-tokens"]),
)
def test_an_exported_script_trains(of: Plan, more: list[str], tiny: dict[str, Path], tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(2000, dtype=np.uint16) % VOCABULARY)
    assert trained(script(tmp_path, job(of), "--model", str(tiny["tied"]), *more))


LORA = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
NF4 = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_use_double_quant": True,
    "bnb_4bit_quant_storage": "uint8",
}  # fmt: skip


@with_all_cases
@pytest.mark.parametrize(
    "of",
    taken([plan("zero3", "fsdp2", gpus=2, precision="fp32")], [plan("ddp", "ddp", gpus=2, precision="fp32")]),
    ids=taken(["fsdp2"], ["ddp"]),
)
def test_a_script_with_adapters_saves_them_without_the_base_and_resumes(
    of: Plan, tiny: dict[str, Path], tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    base, adapted = tiny["untied"], job(of, adaptation=Adaptation(peft=LORA))
    first = script(tmp_path, adapted, "--model", str(base), "--output", "checkpoint", "--lr", "1e-2")
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "checkpoint").rglob("*") if path.is_file()}
    assert sum(sizes.values()) < (base / "model.safetensors").stat().st_size / 2, sizes
    model = LlamaForCausalLM.from_pretrained(base, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "checkpoint" / "adapter")
    assert all(p.abs().sum() > 0 for name, p in loaded.named_parameters() if "lora_B" in name)  # zeros before training
    again = script(tmp_path, adapted, "--model", str(base), "--resume", "checkpoint", "--lr", "1e-2")
    assert trained(again) and again[0] < first[0]


@in_turn(1, of=3)
@pytest.mark.parametrize(
    ("of", "adaptation", "more"),
    taken(
        [(plan("ddp", "ddp", gpus=2, precision="bf16-mixed"), Adaptation(peft=LORA, quantization=NF4), [])],
        [
            (plan("zero3", "fsdp2", gpus=2, dtype="bfloat16"), Adaptation(peft=LORA), ["--output", "checkpoint"]),
            (plan("zero2", "fsdp2", gpus=2), Adaptation(peft={**LORA, "use_dora": True}), ["--init", "random"]),
            (plan("ddp", "ddp", gpus=2, precision="bf16-mixed"), Adaptation(peft=LORA), []),
        ],
    ),
    ids=taken(["ddp-qlora"], ["fsdp2-lora", "fsdp2-dora-random", "ddp-lora"]),
)
def test_script_trains_what_is_adapted(
    of: Plan, adaptation: Adaptation, more: list[str], tiny: dict[str, Path], tmp_path: Path
) -> None:
    losses = script(tmp_path, job(of, adaptation=adaptation), "--model", str(tiny["untied"]), "--lr", "1e-2", *more)
    assert trained(losses)


# Configurations, started by the exported launch scripts


def worker(folder: Path, name: str, launch: str, of: Job, model: Path, **environment: str) -> dict[str, Any]:
    shutil.copy(WORKERS / name, folder / "train.py")
    script = written(folder, launch, of)
    launched(folder, script.name, str(model), "found.json", **environment)
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    assert found["world"] == 2 and trained(found["losses"]), found
    return found


@with_all_cases
def test_accelerate_shards_as_configured(tiny: dict[str, Path], tmp_path: Path) -> None:
    of = job(plan("zero3", "fsdp2", gpus=2, activation_checkpointing="full"))
    written(tmp_path, "accelerate", of)
    found = worker(tmp_path, "accelerate_train.py", "accelerate-launch", of, tiny["untied"])
    assert found["distributed_type"] == "FSDP"
    assert found["wrapped_layers"] == found["checkpointed_layers"] == LAYERS
    assert found["local"] == pytest.approx(found["whole"] / 2, rel=0.01)


@with_all_cases
def test_accelerate_passes_the_configuration_to_deepspeed(tiny: dict[str, Path], tmp_path: Path) -> None:
    of = job(plan("zero3", "deepspeed", gpus=2))
    written(tmp_path, "accelerate", of)
    found = worker(tmp_path, "accelerate_train.py", "accelerate-launch", of, tiny["tied"])
    assert (found["distributed_type"], found["stage"]) == ("DEEPSPEED", 3)


@with_all_cases
@pytest.mark.parametrize(
    ("of", "optimizer"),
    [
        (plan("zero1", "deepspeed", gpus=2, precision="bf16", optim="sgd_momentum"), "SGD"),
        (plan("zero3", "deepspeed", gpus=2, gradient_accumulation_steps=2), "AdamW"),
    ],
    ids=["zero1-bf16-sgd", "zero3"],
)
def test_deepspeed_trains_as_configured(of: Plan, optimizer: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    written(tmp_path, "deepspeed", job(of))
    found = worker(tmp_path, "deepspeed_train.py", "deepspeed-launch", job(of), tiny["tied"])
    assert (found["stage"], found["steps"]) == (int(of.strategy[-1]), 2)
    assert (found["optimizer"], found["dtype"]) == (optimizer, "torch.bfloat16")


@with_all_cases
@pytest.mark.parametrize(
    ("of", "wrapped", "environment"),
    taken(
        [(plan("zero3", "fsdp2", gpus=2, gradient_accumulation_steps=2), "FSDPLlamaForCausalLM", {})],
        [
            (
                plan("ddp", "ddp", gpus=2, activation_checkpointing="full"),
                "DistributedDataParallel",
                {"ACCELERATE_USE_CPU": "true"},
            )
        ],
    ),
    ids=taken(["fsdp2"], ["ddp"]),
)
def test_trainer_trains_as_configured(
    of: Plan, wrapped: str, environment: dict[str, str], tiny: dict[str, Path], tmp_path: Path
) -> None:
    written(tmp_path, "trainer", job(of))
    found = worker(tmp_path, "trainer_train.py", "torchrun", job(of), tiny["untied"], **environment)
    assert (found["wrapped"], found["steps"]) == (wrapped, 2)
    assert found["wrapped_layers"] == (LAYERS if of.backend == "fsdp2" else 0)


@in_turn(0, of=6)
def test_the_trainer_trains_a_model_of_which_parameters_get_no_gradient(tiny: dict[str, Path], tmp_path: Path) -> None:
    """DDP otherwise fails in the second step. Without checkpointing, the Trainer makes it search by itself."""
    of = plan("ddp", "ddp", gpus=2, activation_checkpointing="full", framework="trainer")
    written(tmp_path, "trainer", job(of, searches_unused=True))
    environment = {"ACCELERATE_USE_CPU": "true", "UNUSED_PARAMETER": "1"}
    found = worker(tmp_path, "trainer_train.py", "torchrun", job(of), tiny["untied"], **environment)
    assert (found["wrapped"], found["steps"]) == ("DistributedDataParallel", 2)


# Bundles, started as their README says


@in_turn(2, of=3)
@pytest.mark.parametrize(
    ("target", "of"),
    taken(
        [("deepspeed", plan("zero3", "deepspeed", gpus=2, activation_checkpointing="full"))],
        [
            ("trainer", plan("zero3", "deepspeed", gpus=2, framework="trainer")),
            ("accelerate", plan("zero2", "deepspeed", gpus=2, framework="accelerate", gradient_accumulation_steps=2)),
        ],
    ),
    ids=taken(["deepspeed"], ["trainer", "accelerate"]),
)
def test_bundle_trains_unchanged(target: str, of: Plan, tiny: dict[str, Path], tmp_path: Path) -> None:
    _train_bundle(target, job(of, hidden_size=64), tiny["untied"], tmp_path)


@with_all_cases
@pytest.mark.parametrize(
    ("target", "of", "adaptation"),
    taken(
        [("trainer", plan("zero3", "fsdp2", gpus=2, framework="trainer", dtype="bfloat16"), Adaptation(peft=LORA))],
        [
            ("accelerate", plan("zero3", "fsdp2", gpus=2, framework="accelerate"), Adaptation(peft=LORA)),
            ("deepspeed", plan("zero2", "deepspeed", gpus=2), Adaptation(peft=LORA)),
            ("trainer", plan("zero3", "fsdp2", gpus=2, framework="trainer"), Adaptation(freeze=("embed_tokens",))),
        ],
    ),
    ids=taken(["trainer-lora"], ["accelerate-lora", "deepspeed-lora", "trainer-frozen"]),
)
def test_bundle_trains_what_is_adapted(
    target: str, of: Plan, adaptation: Adaptation, tiny: dict[str, Path], tmp_path: Path
) -> None:
    _train_bundle(target, job(of, hidden_size=64, adaptation=adaptation), tiny["untied"], tmp_path)


@with_all_cases
def test_a_bundle_for_accelerate_saves_adapters_without_the_base(tiny: dict[str, Path], tmp_path: Path) -> None:
    of = plan("zero3", "fsdp2", gpus=2, framework="accelerate")
    adapted = job(of, hidden_size=64, adaptation=Adaptation(peft=LORA))
    _train_bundle("accelerate", adapted, tiny["untied"], tmp_path, "--output", "checkpoint")
    folders = {path.name: path for path in (tmp_path / "checkpoint").iterdir()}
    assert set(folders) == {"pytorch_model_fsdp_0", "optimizer_0"}
    written = sum(path.stat().st_size for path in (tmp_path / "checkpoint").rglob("*") if path.is_file())
    assert written < (tiny["untied"] / "model.safetensors").stat().st_size / 2


def _train_bundle(target: str, of: Job, model: Path, tmp_path: Path, *more: str) -> None:
    files = bundle(find(target), of).files
    for file in files:
        (tmp_path / file.name).write_text(file.text)
    (start,) = (file.name for file in files if file.executable)
    arguments = ("--model", str(model), "--seq-len", "32", "--steps", "2", *more)
    path = f"{WORKERS}:{WORKERS / 'site'}"
    output = launched(tmp_path, start, *arguments, PYTHONPATH=path)
    losses = losses_of(output) or [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", output)]
    assert trained(losses), output[-2000:]
