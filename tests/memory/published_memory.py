"""Compares published memory figures with predictions. `PYTHONPATH=. python tests/memory/published_memory.py` prints the table."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "timing"))  # BERT and Lightning's model are recorded there

import published_models
from record import BertSource, lightning

from fsdp_advisor.assumptions import gpu_of
from fsdp_advisor.engines.loading import choose_load_method, load_methods
from fsdp_advisor.engines.registry import step_program
from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.memory.allocator import AllocatorConf, step_operations
from fsdp_advisor.memory.allocator.caching import CachingAllocator
from fsdp_advisor.memory.device import device_overhead
from fsdp_advisor.memory.libraries import WORKSPACES, cublas_workspace_bytes
from fsdp_advisor.model.gpu_tape_key import gpu_tape_key
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.recording import Recorder, TransformersSource
from fsdp_advisor.step_figures import peak_of_step
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.tape_keys import tape_key_of
from fsdp_advisor.tapes import recorded_gpu_tape

DATA: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("published_memory.yaml").read_text())
TOLERANCE = {"reserved": 0.05, "first step": 0.05, "allocated": 0.02}
"""The largest accepted relative error of a prediction, by kind of figure."""
BERT = {
    "model_type": "bert", "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "vocab_size": 30522,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published figure with its request. Further fields describe code that differs from the request; see the head of the table."""

    name: str
    source: str
    request: dict[str, Any]
    figure: str
    gib: float
    missed: str | None = None
    llama: dict[str, Any] | None = None
    bert: dict[str, Any] | None = None
    lightning: dict[str, Any] | None = None
    keeps_outputs: bool = False
    zero_grad_after_forward: bool = False

    @cached_property
    def predicted_gib(self) -> float:
        request = request_of(self.request)
        return self.predicted_bytes(model_of(self, request), request) / 2**30

    def predicted_bytes(self, model: Resolved, request: EstimateRequest) -> int:
        if self.zero_grad_after_forward:
            return with_gradients_through_forward(model, request)
        if self.figure == "first step":
            return reserved_by_the_first_step(model, request)
        found = estimate_of(model, request)
        n_bytes = found.peak_reserved_bytes if self.figure == "reserved" else found.peak_allocated_bytes
        assert n_bytes is not None
        return n_bytes

    @property
    def error(self) -> float:
        return self.predicted_gib / self.gib - 1


ROWS = tuple(Row(**row) for row in DATA["rows"])


def request_of(options: dict[str, Any]) -> EstimateRequest:
    """The request of a row. In models recorded here the attention is the kernel's, and the model itself checkpoints."""
    defaults = {
        "model": "1B", "strategy": "zero3", "backend": "fsdp2", "attention": "flash_attention_2", "micro_batch_size": 1,
    }  # fmt: skip
    return make_request({**defaults, **options})


def model_of(row: Row, request: EstimateRequest) -> Resolved:
    if row.llama is not None:
        return recorded(llama(**row.llama), request)
    if row.bert is not None:
        with published_models.bert_of_2022():
            return recorded(bert(), request)
    if row.lightning is not None:
        return recorded(lightning_model(), request)
    if row.keeps_outputs:
        return recorded(keeping_outputs(request.model), request)
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


class KeepsOutputs(TransformersSource):
    """A loop in which a variable keeps the model's outputs during backward. accelerate has converted them to fp32."""

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        outputs = module(**batch)
        loss: torch.Tensor = outputs.loss
        loss.outputs = outputs.logits.float()  # type: ignore[attr-defined]  # they live as long as the loss
        return loss


@cache
def keeping_outputs(name: str) -> Recorder:
    profile = resolve(name).profile
    assert profile is not None
    return Recorder(KeepsOutputs(profile.config, name=name, task=profile.task))


def recorded(recorder: Recorder, request: EstimateRequest) -> Resolved:
    """A recorded model with the tapes that the request needs, of its micro-batch and length."""
    profile = recorder.profile
    plan = plans(request, seq_len=request.seq_len or 1)[0]
    variant = replace(tape_key_of(plan), at=plan.tape_shape)
    for wanted in (variant, gpu_tape_key(variant)):
        if wanted.name not in profile.tapes:
            profile.tapes[wanted.name] = recorder.tape(wanted)
    return Resolved(
        name=recorder.source.name or "a module",
        source="config",
        profile=profile,
        parameters=profile.parameters,
        trainable_parameters=profile.parameters,
        recording_allowed=False,
    )


def estimate_of(model: Resolved, request: EstimateRequest) -> StrategyEstimate:
    [found] = estimate_resolved(request, model).estimates
    return found


def reserved_by_the_first_step(model: Resolved, request: EstimateRequest) -> int:
    """Bytes reserved at the end of the first step."""
    assert model.profile is not None
    [plan] = plans(request, seq_len=request.seq_len or 1)
    gpu, _ = gpu_of(request)
    free = gpu.memory_bytes - device_overhead(gpu, plan).middle_bytes
    methods = load_methods(model.profile, plan, gpu_memory_bytes=gpu.memory_bytes)
    asked = step_operations(
        step_program(model.profile, recorded_gpu_tape(model, plan, gpu), plan),
        plan.micro_batch_size,
        plan.seq_len,
        workspace_bytes=[cublas_workspace_bytes(gpu.compute_capability)] * WORKSPACES,
        resident_threads=gpu.resident_threads,
        loaded=choose_load_method(methods, gpu_memory_bytes=free).transfers,
    )
    allocator = CachingAllocator(asked.requests, AllocatorConf.parse(request.allocator_conf or ""))
    allocator.run(asked.setup)
    allocator.run(asked.first)
    return allocator.driver.peak


def with_gradients_through_forward(model: Resolved, request: EstimateRequest) -> int:
    """Bytes allocated at the peak if `zero_grad` runs between forward and backward: during forward the old gradients are alive."""
    assert model.profile is not None
    [plan] = plans(request, seq_len=request.seq_len or 1)
    gpu, _ = gpu_of(request)
    tape = recorded_gpu_tape(model, plan, gpu)
    peaks = peak_of_step(model.profile, tape, plan).phase_peaks
    accumulating = peak_of_step(model.profile, tape, replace(plan, gradient_accumulation_steps=2)).phase_peaks
    workspaces = WORKSPACES * cublas_workspace_bytes(gpu.compute_capability)
    return max(accumulating["forward"], peaks["backward"], peaks["optimizer"]) + workspaces


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
