"""Rehearses the kept random jobs with adapters, other optimizers and DeepSpeed: `PYTHONPATH=.:tests:tests/rehearsal
REHEARSAL_PYTHON=... python tests/rehearsal/drawn_adapters.py`.

drawn_adapters.jsonl has for each job the allocated peaks of its phases that were rehearsed on an A100, and `difference`, the predicted
less the rehearsed bytes of phases where they differ. Model, method, optimizer, engine, precision, checkpointing, accumulation and sizes
were drawn independently. The known differences of these small jobs:

- FlashAttention saves two tensors of 512 bytes each per layer, its random state, which a recording does not have.
- bitsandbytes makes no tables of codes (2 x 1024 bytes) if no tensor has 4096 elements.
- LayerNorm in bf16 keeps its mean and deviation in fp32 on a GPU, and a recording in bf16: 4 bytes per token and norm.
- DeepSpeed and Adafactor keep up to three scalars of 512 bytes.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fsdp_advisor.hardware.lookup import find_gpu
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.rehearsal.inside.launchers import free_port, variables_of
from fsdp_advisor.validation.predict import Prediction, predict

JOBS = Path(__file__).with_name("drawn_adapters.jsonl")
GPU = "A100-80GB"


def read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in JOBS.read_text(encoding="utf-8").splitlines()]


def name_of(job: dict[str, Any]) -> str:
    return " ".join((job["model"], *job["options"].values()))


def predicted(job: dict[str, Any], folder: Path) -> Prediction:
    """The prediction of a job. DeepSpeed has real ranks, other engines a fake process group."""
    config = folder / "config.json"
    config.write_text(json.dumps(job["config"]))
    request = make_request({**job["options"], "model": str(config), "gpu": GPU})
    mode = "measure" if job["options"].get("backend") == "deepspeed" else "stand-in"
    return predict(request, mode=mode, device="cuda", gpu=find_gpu(GPU), gpu_keeps_up=True)


def allocated(phases: dict[str, dict[str, int]]) -> dict[str, int]:
    return {phase: figures["allocated_bytes"] for phase, figures in phases.items()}


def differences(expected: dict[str, int], found: dict[str, int]) -> dict[str, int]:
    """`expected` less `found` bytes of the phases in which they differ."""
    return {phase: expected[phase] - found[phase] for phase in found if expected[phase] != found[phase]}


def _rehearsed(job: dict[str, Any], prediction: Prediction, folder: Path) -> dict[str, int]:
    from warm_process import Warm

    values = {
        "name": job["model"],
        "config": prediction.config,
        "task": prediction.task,
        "plan": asdict(prediction.plan),
    }
    (folder / "job.json").write_text(json.dumps(values))
    ranks: list[dict[str, str]] = [{}]
    gpus = 1
    if prediction.plan.backend == "deepspeed":  # the variable is read when a process starts
        os.environ["REHEARSAL_RANKS"] = "0"
        gpus = prediction.plan.world_size
        ranks = [{**variables_of(0, gpus, gpus, free_port())}]
    warm = Warm(Path(os.environ["REHEARSAL_PYTHON"]), GPU)
    os.environ.pop("REHEARSAL_RANKS", None)
    printed = warm.run("drawn_case.py", [str(folder / "job.json")], folder, ranks, gpus)
    warm.process.communicate()
    return allocated(json.loads(printed.partition("FOUND ")[2].splitlines()[0]))


def rehearse_all() -> Iterator[dict[str, Any]]:
    """Each job with figures that are rehearsed now."""
    for job in read():
        with tempfile.TemporaryDirectory() as folder:
            prediction = predicted(job, Path(folder))
            found = _rehearsed(job, prediction, Path(folder))
        yield {**job, "rehearsed": found, "difference": differences(allocated(prediction.predicted["phases"]), found)}


def main() -> None:
    lines = []
    for job in rehearse_all():
        lines.append(json.dumps(job))
        print(name_of(job), job["difference"], flush=True)
    JOBS.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
