"""The first rung: PyTorch's own engines around the whole model, under fake tensors, for rank 0 of any world. No GPU, no memory."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_advisor.memory.held import round_up
from fsdp_advisor.plan import Plan
from fsdp_advisor.tracing.recorder import materialise
from fsdp_advisor.tracing.source import Source
from fsdp_advisor.tracing.storages import StorageWatch
from fsdp_advisor.validation.engines import fake_process_group, mesh_of, optimizer_for, wrap

STEPS = 2
"""The second step is the steady one: the first has no optimizer states before its last phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Bytes of live tensor storages, each rounded up to 512, in a steady-state step."""

    phase_peaks: dict[str, int]
    between_steps: int
    timeline: tuple[tuple[str, str, int], ...] = ()
    """(phase, operator, bytes alive) at each birth and death, where asked for."""

    @property
    def peak_tensor_bytes(self) -> int:
        return max(self.phase_peaks.values())


class _Meter:
    """Adds up what a `StorageWatch` reports."""

    def __init__(self, timeline: bool) -> None:
        self.live = self.high = 0
        self.phase = "build"
        self._timeline: list[tuple[str, str, int]] | None = [] if timeline else None

    def __call__(self, key: int, before: int, after: int, operator: str, args: tuple[Any, ...]) -> None:
        self.live += round_up(after) - round_up(before)
        self.high = max(self.high, self.live)
        if self._timeline is not None:
            self._timeline.append((self.phase, operator, self.live))

    def begin(self, phase: str) -> None:
        self.phase, self.high = phase, self.live

    def forget(self) -> None:
        if self._timeline is not None:
            self._timeline.clear()

    @property
    def timeline(self) -> tuple[tuple[str, str, int], ...]:
        return tuple(self._timeline or ())


def simulate(source: Source, plan: Plan, *, timeline: bool = False) -> Simulated:
    """One steady-state step of the plan, as PyTorch runs it on rank 0.

    Raises MeasurementError for a backend that is not PyTorch's.
    """
    dtype = torch.bfloat16 if plan.precision == "bf16" else torch.float32
    model = source.build(dtype)
    source.configure(model, attention=plan.attention, checkpointing=plan.activation_checkpointing == "full")
    layers = [layer for stack in source.stacks(model) for layer in stack.layers]
    meter = _Meter(timeline)
    watch = StorageWatch(meter)
    with fake_process_group(plan.world_size), _fsdp1_on_fake_storages(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = mesh_of(plan, "cpu") if plan.backend != "ddp" else None
        with FakeTensorMode(allow_non_fake_inputs=True), watch:
            materialise(model, None)
            wrapped = wrap(model, layers, plan, mesh, "cpu")
            optimizer = optimizer_for(wrapped, plan)
            autocast = torch.autocast("cpu", torch.bfloat16, enabled=plan.backend == "ddp" and plan.mixed)
            batch = source.batch(plan.micro_batch_size, plan.seq_len)
            if plan.precision == "bf16":
                batch = {k: v.to(dtype) if v.is_floating_point() else v for k, v in batch.items()}
            gc.collect()
            peaks: dict[str, int] = {}
            for _ in range(STEPS):
                peaks = dict.fromkeys(("forward", "backward", "optimizer"), 0)
                meter.forget()
                for _ in range(plan.gradient_accumulation_steps):
                    meter.begin("forward")
                    with autocast:
                        loss = source.loss(wrapped, batch)
                    peaks["forward"] = max(peaks["forward"], meter.high)
                    meter.begin("backward")
                    loss.backward()
                    peaks["backward"] = max(peaks["backward"], meter.high)
                meter.begin("optimizer")
                optimizer.step()
                peaks["optimizer"] = meter.high
                optimizer.zero_grad()
                del loss
            return Simulated(phase_peaks=peaks, between_steps=meter.live, timeline=meter.timeline)


@contextmanager
def _fsdp1_on_fake_storages() -> Iterator[None]:
    """FSDP1 asks whether a storage has an address; a fake one has a size only."""
    from torch.distributed.fsdp import _flat_param

    original = _flat_param._data_ptr_allocated
    _flat_param._data_ptr_allocated = lambda tensor: tensor.untyped_storage().size() > 0
    try:
        yield
    finally:
        _flat_param._data_ptr_allocated = original
