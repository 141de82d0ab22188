"""A training step with real tensors: makes the weights on their device, wraps them with the plan's engine, and runs steps until they
are steady.
"""

from __future__ import annotations

import functools
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.autograd.graph import save_on_cpu
from torch.distributed.device_mesh import DeviceMesh

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.tiled_mlp import tiled_mlp_code
from fsdp_advisor.memory.allocator import AllocatorSegment
from fsdp_advisor.program.accounts import PHASES
from fsdp_advisor.recording.experts import with_experts
from fsdp_advisor.recording.fp8 import convert_linears
from fsdp_advisor.recording.host import save_inputs_on_host
from fsdp_advisor.recording.source import Source
from fsdp_advisor.recording.tiled_mlp import tile_mlps
from fsdp_advisor.validation import weights
from fsdp_advisor.validation.case import Zero1, uses_zero_redundancy_optimizer
from fsdp_advisor.validation.choices import Device, Mode
from fsdp_advisor.validation.engines import (
    mesh_of,
    optimizer_for,
    weight_dtype,
    wrap,
    zero_redundancy_optimizer_for,
)
from fsdp_advisor.validation.failures import ModeUnavailable
from fsdp_advisor.validation.gpu_memory import Baseline, allocator_figures, memory_history
from fsdp_advisor.validation.meter import CudaMeter, Meter, Phase, StorageMeter
from fsdp_advisor.validation.on_gpu import COUNTED_STEPS, WARM_UP_STEPS
from fsdp_advisor.validation.steps import TorchTrainer, Trainer, autocast_of, batch_of, layers_of, take_step

WATCHDOG_SECONDS = 0.5
"""How long NCCL's process group may keep the tensors of finished collectives: a thread checks every 0.1 s, and the next collective
after that releases them. In short steps, DDP's first buckets, which the second step replaces, would otherwise still be alive.
Source: ProcessGroupNCCL.hpp, kWatchdogThreadSleepMillis and shelvesToUnstash_ (torch 2.13).
"""

_COUNTED_STEPS_OVER_GLOO = 5


@dataclass(frozen=True, kw_only=True)
class RealRun:
    """A model and a plan to run with real tensors, in mode `stand-in` or `measure`.

    `snapshot`: the file for PyTorch's memory history. `baseline`: the GPU's memory in use before, None on the CPU. `segments`: the
    allocator's segments as predicted, None if they are not to be compared.
    """

    source: Source
    plan: Plan
    mode: Mode
    device: Device
    zero1: Zero1 = "deepspeed"
    snapshot: Path | None = None
    baseline: Baseline | None = None
    segments: Iterable[AllocatorSegment] | None = None

    @property
    def over_gloo(self) -> bool:
        """Whether real collectives run over gloo."""
        return self.mode == "measure" and self.device == "cpu"


def check(plan: Plan, device: str) -> None:
    """Raises ModeUnavailable for a plan that cannot be measured on this device."""
    if plan.uses_accelerate:
        raise ModeUnavailable(
            f"framework {plan.framework} can be simulated, not measured",
            hint="--mode simulate, or --framework torch for the engine without the framework",
        )
    if device == "cpu" and plan.offload != "none":
        raise ModeUnavailable(
            f"offload {plan.offload} cannot be measured on the CPU, where host and device tensors look the same",
            hint="measure it on a machine with a GPU",
        )
    if plan.attention == "flash_attention_2" and device == "cpu":
        raise ModeUnavailable("flash_attention_2 needs a GPU", hint="--attention sdpa or eager")
    if plan.offload != "none" and plan.offload_device == "nvme":
        raise ModeUnavailable("offload to NVMe cannot be measured", hint="--offload-device cpu")


def run_steady_step(run: RealRun) -> dict[str, Any]:
    """This rank's figures of a steady-state step, under the names of the JSON interface. Needs a process group."""
    cuda = run.device == "cuda"
    index = torch.cuda.current_device() if cuda else 0
    meter: Meter = CudaMeter(index) if cuda else StorageMeter()
    with memory_history(run.snapshot):
        mesh = mesh_for(run.plan, run.device, meter)
        with meter:
            trainer = assemble(run, mesh)
            phases = steady_step(trainer, meter, run.plan.gradient_accumulation_steps, _sampling(run))
        figures = _figures(phases, communicates=run.mode == "measure" or run.plan.world_size == 1)
        if isinstance(meter, StorageMeter) and run.over_gloo and meter.gloo_bytes:
            figures["gloo_bytes"] = meter.gloo_bytes
        if run.snapshot is not None:  # recording the stack of each allocation takes time
            figures = {name: value for name, value in figures.items() if not name.startswith("step_seconds")}
        if run.baseline is not None:
            figures |= allocator_figures(index, run.baseline, int(figures["peak_reserved_bytes"]), run.segments)
    return figures


def mesh_for(plan: Plan, device: str, meter: Meter) -> DeviceMesh | None:
    """The plan's mesh, None for engines without one. Make it before `meter` watches, because its rank numbers are host tensors."""
    if plan.backend not in ("fsdp1", "fsdp2"):
        return None
    mesh = mesh_of(plan, device)
    meter.ignore(mesh.mesh)
    return mesh


def assemble(run: RealRun, mesh: DeviceMesh | None) -> Trainer:
    """The model with random weights under the plan's engine, ready to take steps. Needs a process group.

    Sharded weights are never whole: FSDP2 shards the model on the meta device and its shards are filled; FSDP1 gets one unit at a
    time. DDP needs whole weights.
    """
    plan, device = run.plan, run.device
    check(plan, device)
    source = with_experts(run.source, plan.experts_implementation, plan.expert_imbalance)
    if plan.backend == "deepspeed" and not uses_zero_redundancy_optimizer(plan, run.zero1):
        from fsdp_advisor.validation.deepspeed_engine import deepspeed_trainer

        return deepspeed_trainer(source, plan, device, run.mode)
    model = source.build(weight_dtype(plan))
    if plan.attention == "flash_attention_2":  # the real package; the recorder replaces its kernels
        source.configure(model, attention="sdpa", checkpointing=plan.checkpointing)
        model.set_attn_implementation(plan.attention)  # type: ignore[operator]  # a method of every PreTrainedModel
    else:
        source.configure(model, attention=plan.attention, checkpointing=plan.checkpointing)
    if plan.fp8 != "none":
        convert_linears(model, source, plan.fp8)
    if plan.tiled_mlp != "none":
        tile_mlps(source.stacks(model), f"{tiled_mlp_code(plan)}:{plan.tiled_mlp}", source.name)
    if plan.compile != "none":
        functorch_config.activation_memory_budget = plan.memory_budget
        for module in layers_of(source.stacks(model)) if plan.compile == "layer" else [model]:
            module.compile()
    if plan.offload_code == "inputs":
        save_inputs_on_host(model, functools.partial(save_on_cpu, pin_memory=device == "cuda"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = _wrapped(model, run, mesh)
        optimizer = (zero_redundancy_optimizer_for if plan.strategy == "zero1" else optimizer_for)(wrapped, plan)
    with torch.device(device):
        batch = batch_of(source, plan, model, real=True)
    return TorchTrainer(source, wrapped, optimizer, batch, autocast_of(plan, device))


def _wrapped(model: nn.Module, run: RealRun, mesh: DeviceMesh | None) -> nn.Module:
    """The model with real weights, under the plan's engine."""
    plan, device, mode = run.plan, run.device, run.mode
    layers = layers_of(run.source.stacks(model))
    materialiser = weights.Materialiser(device)
    if plan.backend in ("ddp", "deepspeed"):
        materialiser.model(model)
        return wrap(model, layers, replace(plan, backend="ddp"), None, device, mode=mode)
    if plan.backend == "fsdp1":
        return wrap(model, layers, plan, mesh, device, mode=mode, materialise=materialiser.module)
    wrapped = wrap(model, layers, plan, mesh, device, mode=mode)
    weights.materialise_shards(wrapped, device, offloaded=plan.offload == "parameters")
    return wrapped


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The number of measured steps, the function that picks one of their peaks, and the pause after the first warm-up step."""

    counted_steps: int
    pick: Callable[[list[int]], int] = max
    pause_seconds: float = 0


def _sampling(run: RealRun) -> Sampling:
    """The sampling of a run. Over gloo it takes the minimum of several steps, because gloo's threads release a collective's tensors
    late; with NCCL it pauses for the watchdog.
    """
    if run.over_gloo:
        return Sampling(counted_steps=_COUNTED_STEPS_OVER_GLOO, pick=min)
    pause = WATCHDOG_SECONDS if run.mode == "measure" else 0
    return Sampling(counted_steps=COUNTED_STEPS[run.mode], pause_seconds=pause)


def steady_step(trainer: Trainer, meter: Meter, accumulation: int, sampling: Sampling) -> dict[str, Phase]:
    """The phases of the steady-state step. Over the measured steps, peaks are picked by `sampling`, and durations are medians."""
    meter.settle()  # only before the first step: the cache that the first steps leave is part of the job's memory
    take_step(trainer, meter, accumulation)
    time.sleep(sampling.pause_seconds)
    for _ in range(WARM_UP_STEPS - 1):
        take_step(trainer, meter, accumulation)
    gc.collect()
    steps = [take_step(trainer, meter, accumulation) for _ in range(sampling.counted_steps)]
    result: dict[str, Phase] = {}
    for phase in PHASES:
        found = [step[phase] for step in steps]
        peaks = {name: sampling.pick([f.peaks[name] for f in found]) for name in found[0].peaks}
        result[phase] = Phase(peaks, statistics.median(f.seconds for f in found))
    return result


def _figures(phases: dict[str, Phase], *, communicates: bool) -> dict[str, Any]:
    """The step's figures under the names of the JSON interface.

    `phases` holds all statistics of CUDA's allocator; `phase_peaks` holds counted tensor bytes. `communicates`: the time includes
    real communication.
    """
    names = list(phases[PHASES[0]].peaks)
    figures: dict[str, Any] = {f"peak_{name}": max(phases[phase].peaks[name] for phase in PHASES) for name in names}
    if names == ["tensor_bytes"]:
        figures["phase_peaks"] = {phase: phases[phase].peaks["tensor_bytes"] for phase in PHASES}
    else:
        figures["phases"] = {phase: phases[phase].peaks for phase in PHASES}
    seconds = sum(phases[phase].seconds for phase in PHASES)
    figures["step_seconds" if communicates else "step_seconds_without_communication"] = round(seconds, 6)
    return figures
