"""Published memory figures beside this package's. `PYTHONPATH=. python tests/memory/published_memory.py` prints the table."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml

sys.path.append(str(Path(__file__).parents[1] / "speed"))  # BERT and Lightning's model are recorded there

import published_models
from record import BertSource, lightning

from fsdp_advisor.estimator import estimate_resolved, gpu_of, make_request
from fsdp_advisor.memory.allocator import AllocatorConf
from fsdp_advisor.memory.allocator.caching import CachingAllocator
from fsdp_advisor.memory.allocator.reserve import traced
from fsdp_advisor.memory.libraries import cublas_workspace_bytes, real_attention
from fsdp_advisor.plan import plans
from fsdp_advisor.report import StrategyEstimate
from fsdp_advisor.request import EstimateRequest
from fsdp_advisor.resolve import Resolved, resolve
from fsdp_advisor.tapes import tape_on, variant_of
from fsdp_advisor.tracing import Recorder

DATA: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("published_memory.yaml").read_text())
TOLERANCE = {"reserved": 0.05, "first step": 0.05, "allocated": 0.02}
"""What a prediction is held to beside a run on a GPU."""
BERT = {
    "model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "vocab_size": 30522,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    name: str
    source: str
    request: dict[str, Any]
    figure: str
    gib: float
    missed: str | None = None
    llama: dict[str, Any] | None = None
    bert: dict[str, Any] | None = None
    lightning: dict[str, Any] | None = field(default=None)

    @property
    def predicted_gib(self) -> float:
        request = request_of(self.request)
        model = model_of(self, request)
        if self.figure == "first step":
            return first_step_bytes(model, request) / 2**30
        found = estimate_of(model, request)
        n_bytes = found.peak_reserved_bytes if self.figure == "reserved" else found.peak_allocated_bytes
        assert n_bytes is not None
        return n_bytes / 2**30

    @property
    def error(self) -> float:
        return self.predicted_gib / self.gib - 1


ROWS = tuple(Row(**row) for row in DATA["rows"])


def request_of(options: dict[str, Any]) -> EstimateRequest:
    """Of the models recorded here attention is that of the kernel, and the model itself checkpoints."""
    defaults = {
        "model": "1B", "strategy": "zero3", "backend": "fsdp2", "attention": "flash_attention_2", "micro_batch_size": 1,
        "reserved": True,
    }  # fmt: skip
    return make_request({**defaults, **options})


def model_of(row: Row, request: EstimateRequest) -> Resolved:
    if row.llama is not None:
        return recorded(llama(**row.llama), request)
    if row.bert is not None:
        return recorded(bert(), request)
    if row.lightning is not None:
        return recorded(lightning_model(), request)
    return resolve(request.model)


@cache
def llama(*, size: str, **more: Any) -> Recorder:
    return published_models.recorder(published_models.Llama(**published_models.SIZES[size], **more))


@cache
def bert() -> Recorder:
    return Recorder(BertSource(BERT, name="BERT-large", task="masked-lm"))


@cache
def lightning_model() -> Recorder:
    return Recorder(lightning())


def recorded(recorder: Recorder, request: EstimateRequest) -> Resolved:
    """A recorded model with the tapes that the request needs."""
    profile = recorder.profile
    variant = variant_of(plans(request, seq_len=request.seq_len or 1)[0])
    for wanted in (variant, real_attention(variant)):
        if wanted.key not in profile.tapes:
            profile.tapes[wanted.key] = recorder.tape(wanted)
    return Resolved(
        name=recorder.source.name or "a module",
        source="config",
        profile=profile,
        parameters=profile.parameters,
        trainable_parameters=profile.parameters,
        may_record=False,
    )


def estimate_of(model: Resolved, request: EstimateRequest) -> StrategyEstimate:
    [found] = estimate_resolved(request, model).estimates
    return found


def first_step_bytes(model: Resolved, request: EstimateRequest) -> int:
    """What is reserved at the highest of the first step."""
    assert model.profile is not None
    [plan] = plans(request, seq_len=request.seq_len or 1)
    gpu, _ = gpu_of(request)
    workspace_bytes = cublas_workspace_bytes(gpu.compute_capability)
    steps = traced(model.profile, tape_on(model, plan, gpu), plan, workspace_bytes=workspace_bytes)
    allocator = CachingAllocator(steps.requests, AllocatorConf.parse(request.allocator_conf or ""))
    allocator.run(steps.setup)
    allocator.run(steps.first)
    return allocator.driver.peak


def table() -> str:
    lines = [f"{'stated':>8} {'ours':>8} {'error':>7}  figure      run"]
    for row in ROWS:
        predicted = row.predicted_gib
        mark = " (missed, see its row)" if row.missed else ""
        lines.append(
            f"{row.gib:8.2f} {predicted:8.2f} {predicted / row.gib - 1:+7.1%}  {row.figure:<11} {row.name}{mark}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
