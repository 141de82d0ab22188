"""Flagships of 2026 at full size: PyTorch's own step under fake tensors against the catalog's prediction: `flagships.py`.

Every layer is built and wrapped. One sequence of 2,048 tokens trains on rank 0 of 64 in bf16-mixed, under FSDP2 and, if the model then fits
on the largest GPU (B300), under DDP; multimodal models then train on an image, too. The simulated peak of each phase is kept in
flagships.csv, which a test compares with today's prediction. A model takes one to three minutes. Without names, models that have no line
yet are simulated; `flagships.py NAME...` simulates these again.

flagships.jsonl has rehearsals of the same jobs on B300, of flagships_campaign.jsonl, as CONTRIBUTING.md says.
"""

from __future__ import annotations

import argparse
import csv
import gc
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from fsdp_advisor.job.images import Images
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model import catalog
from fsdp_advisor.parallelism.mesh import Mesh

RESULTS = Path(__file__).with_name("flagships.csv")
MODELS = (
    "Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-27B", "Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3-235B-A22B",
    "Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-VL-30B-A3B-Instruct", "google/gemma-4-26B-A4B", "google/gemma-4-31B",
    "meta-llama/Llama-4-Scout-17B-16E", "mistralai/Mistral-Small-3.1-24B-Instruct-2503", "mistralai/Ministral-3-14B-Base-2512",
    "deepseek-ai/DeepSeek-V3.2", "deepseek-ai/DeepSeek-V4-Flash", "moonshotai/Kimi-K2-Instruct", "zai-org/GLM-4.5-Air", "zai-org/GLM-5",
    "MiniMaxAI/MiniMax-M2", "openai/gpt-oss-120b", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "ibm-granite/granite-4.0-h-small",
    "allenai/Olmo-3-1125-32B", "HuggingFaceTB/SmolLM3-3B", "ByteDance-Seed/Seed-OSS-36B-Base",
)  # fmt: skip
FIT_UNDER_DDP = (
    "HuggingFaceTB/SmolLM3-3B", "allenai/Olmo-3-1025-7B", "ibm-granite/granite-4.0-h-tiny", "Qwen/Qwen3-8B", "LiquidAI/LFM2-8B-A1B",
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
)  # fmt: skip
"""Language models whose DDP step fits on a GPU of 288 GB."""
FIT_WITH_IMAGE = ("Qwen/Qwen3.5-9B", "Qwen/Qwen3-VL-8B-Instruct")
"""Multimodal models whose DDP step fits. A step on text alone fails, because the tower gets no gradient: each sample has an image."""
CASES = [("fsdp2", model) for model in MODELS] + [("ddp", model) for model in FIT_UNDER_DDP + FIT_WITH_IMAGE]
_FSDP2 = Plan(
    strategy="zero3", backend="fsdp2", mesh=Mesh(dp_shard=64), precision="bf16-mixed", micro_batch_size=1, seq_len=2048
)
_DDP = replace(_FSDP2, strategy="ddp", backend="ddp", mesh=Mesh(dp_replicate=64))


@dataclass(frozen=True, kw_only=True)
class Line:
    """The simulated peaks of one model, in bytes; `attention` is what its code supports."""

    model: str
    backend: str
    attention: str
    forward: int
    backward: int
    optimizer: int

    @property
    def phase_peaks(self) -> dict[str, int]:
        return {"forward": self.forward, "backward": self.backward, "optimizer": self.optimizer}


def read() -> list[Line]:
    """The kept peaks."""
    phases = ("forward", "backward", "optimizer")
    with RESULTS.open(newline="") as file:
        return [Line(**{k: int(v) if k in phases else v for k, v in row.items()}) for row in csv.DictReader(file)]


def plan_of(model: str, backend: str) -> Plan:
    """The job of a case."""
    images = Images(1, 768, 1024, 0) if backend == "ddp" and model in FIT_WITH_IMAGE else None
    return replace(_DDP if backend == "ddp" else _FSDP2, images=images)


def predicted(model: str, backend: str) -> tuple[str, dict[str, int]]:
    """The attention and the peak of each phase, from the catalog's tapes; with an image from a recording, cached or made now."""
    from fsdp_advisor.model.resolve import resolve
    from fsdp_advisor.step_figures import peak_of_step
    from fsdp_advisor.tapes import cpu_tape

    plan = plan_of(model, backend)
    found = resolve(model, allow_recording=plan.images is not None)
    assert found.profile is not None
    key, tape = cpu_tape(found, plan)
    return key.attention, peak_of_step(found.profile, tape, plan).phase_peaks


def simulated(model: str, backend: str, attention: str) -> Line:
    """The peaks of PyTorch's own step."""
    from fsdp_advisor.recording.transformers_models import TransformersSource
    from fsdp_advisor.validation.simulate import simulate

    entry = catalog.find(model)
    assert entry is not None
    source = TransformersSource(catalog.profile(entry).config, name=model, task=entry.task)
    peaks = simulate(source, replace(plan_of(model, backend), attention=attention)).phase_peaks
    return Line(model=model, backend=backend, attention=attention, **peaks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models; all without a line if there are none")
    names = parser.parse_args().names
    lines = {(line.backend, line.model): line for line in (read() if RESULTS.exists() else [])}
    for case in CASES:
        backend, model = case
        if model not in names if names else case in lines:
            continue
        begin = time.process_time()
        try:
            attention, expected = predicted(model, backend)
            lines[case] = simulated(model, backend, attention)
        except Exception as error:  # continue with the others
            print(model, backend, type(error).__name__, str(error)[:300], flush=True)
            continue
        off = {phase: n - lines[case].phase_peaks[phase] for phase, n in expected.items()}
        print(model, backend, off, f"{time.process_time() - begin:.0f} s", flush=True)
        with RESULTS.open("w", newline="") as file:
            rows = csv.DictWriter(file, [field.name for field in fields(Line)], lineterminator="\n")
            rows.writeheader()
            rows.writerows(asdict(lines[case]) for case in CASES if case in lines)
        gc.collect()


if __name__ == "__main__":
    main()
