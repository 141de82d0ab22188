"""Real tensors: the model's weights made where they live, the plan's engine around it, and steps until they are steady."""

from __future__ import annotations

import gc
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.policies.optimizers import optimizer_named
from fsdp_advisor.policies.optimizers.interface import Refusal
from fsdp_advisor.recording.source import Source
from fsdp_advisor.validation import weights
from fsdp_advisor.validation.engines import mesh_of, optimizer_class, optimizer_for, weight_dtype, wrap
from fsdp_advisor.validation.failures import NotHere
from fsdp_advisor.validation.meter import Meter, Phase
from fsdp_advisor.validation.on_gpu import WARM_UP
from fsdp_advisor.validation.records import Rung
from fsdp_advisor.validation.steps import PHASES, TorchTrainer, Trainer, autocast_of, batch_of, layers_of, take_step

WATCHDOG_SECONDS = 0.5
"""How long NCCL's process group may hold the tensors of collectives that have ended; a thread of its own looks every 0.1 s, and the
next collective after that lets go. DDP's first buckets, which the second step replaces, would else stand in short steps.
Source: ProcessGroupNCCL.hpp, kWatchdogThreadSleepMillis and shelvesToUnstash_ (torch 2.13)."""

Zero1 = Literal["deepspeed", "torch"]
"""Who does ZeRO-1: DeepSpeed, or torch.distributed.optim.ZeroRedundancyOptimizer under DDP."""


def check(plan: Plan, device: str) -> None:
    """Raises NotHere for a plan whose figures this device cannot tell."""
    if plan.prepared:
        raise NotHere(
            f"{plan.framework} is simulated, not measured",
            hint="--rung simulate, or --framework torch for the engine by itself",
        )
    if device == "cpu" and plan.offload != "none":
        raise NotHere(
            f"offload {plan.offload} cannot be measured on the CPU: host and device tensors look the same there",
            hint="measure it on a machine with a GPU",
        )
    if plan.attention == "flash_attention_2" and device == "cpu":
        raise NotHere("flash_attention_2 needs a GPU", hint="--attention sdpa or eager")
    if plan.offload != "none" and plan.offload_device == "nvme":
        raise NotHere("offload to nvme is not measured", hint="--offload-device cpu")


def mesh_for(plan: Plan, device: str, meter: Meter) -> DeviceMesh | None:
    """The plan's mesh. Its ranks' numbers are host tensors: it is to be made before `meter` watches."""
    if plan.backend not in ("fsdp1", "fsdp2"):
        return None
    mesh = mesh_of(plan, device)
    meter.ignore(mesh.mesh)
    return mesh


def assemble(
    source: Source, plan: Plan, device: str, mesh: DeviceMesh | None, *, rung: Rung, zero1: Zero1 = "deepspeed"
) -> Trainer:
    """The model with random weights under the plan's engine, ready to take steps; needs a process group.

    Weights are never whole where they are to be sharded: FSDP2 shards the model on the meta device and gets its shards
    filled, FSDP1 gets one unit at a time. DDP has them whole, as it must.
    """
    check(plan, device)
    if plan.backend == "deepspeed" and not (plan.strategy == "zero1" and zero1 == "torch"):
        from fsdp_advisor.validation.deepspeed_engine import deepspeed_trainer

        return deepspeed_trainer(source, plan, device, rung)
    model = source.build(weight_dtype(plan))
    attention = plan.attention
    if attention == "flash_attention_2":  # the package itself, where the recorder uses an outline of its kernels
        source.configure(model, attention="sdpa", checkpointing=plan.activation_checkpointing == "full")
        model.set_attn_implementation(attention)  # type: ignore[operator]  # of every PreTrainedModel
    else:
        source.configure(model, attention=attention, checkpointing=plan.activation_checkpointing == "full")
    layers = layers_of(source.stacks(model)) if plan.wrap == "layer" else []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrapped = _wrapped(model, layers, plan, mesh, device, rung)
        optimizer = _zero1(wrapped, plan) if plan.strategy == "zero1" else optimizer_for(wrapped, plan)
    with torch.device(device):
        batch = batch_of(source, plan, model, real=True)
    return TorchTrainer(source, wrapped, optimizer, batch, autocast_of(plan, device))


def _wrapped(
    model: nn.Module, layers: list[nn.Module], plan: Plan, mesh: DeviceMesh | None, device: str, rung: Rung
) -> nn.Module:
    if plan.backend in ("ddp", "deepspeed"):
        weights.Materialiser(device).whole(model)
        return wrap(model, layers, replace(plan, backend="ddp"), None, device, rung=rung)
    if plan.backend == "fsdp1":
        one = weights.Materialiser(device)
        return wrap(model, layers, plan, mesh, device, rung=rung, materialise=one.module)
    wrapped = wrap(model, layers, plan, mesh, device, rung=rung)
    weights.shards(wrapped, device, offloaded=plan.offload == "parameters")
    return wrapped


def _zero1(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """torch's ZeroRedundancyOptimizer: each parameter's state lives on one rank, whole."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    parameters = [p for p in model.parameters() if p.requires_grad]
    constructor = optimizer_named(plan.optim).measured_zero1
    if isinstance(constructor, Refusal):
        raise NotHere(constructor.reason, hint="an AdamW or SGD can be")
    options: dict[str, Any] = {"lr": 1e-6, **constructor.options}
    return ZeroRedundancyOptimizer(parameters, optimizer_class(constructor), **options)


def steady_step(
    trainer: Trainer,
    meter: Meter,
    accumulation: int,
    *,
    steady: int,
    pick: Callable[[list[int]], int] = max,
    pause_seconds: float = 0,
) -> dict[str, Phase]:
    """The steady-state step's phases: of each figure `pick` over the last steps, of each duration the median.

    Over gloo `pick` is `min`: its threads let go of a collective's tensors some moments late, which only ever adds.
    `pause_seconds` is between the warm-up steps.
    """
    meter.settle()  # but not later, for what the first steps leave in the allocator's cache is part of what a job holds
    take_step(trainer, meter, accumulation)
    time.sleep(pause_seconds)
    for _ in range(WARM_UP - 1):
        take_step(trainer, meter, accumulation)
    gc.collect()
    steps = [take_step(trainer, meter, accumulation) for _ in range(steady)]
    result = {}
    for phase in PHASES:
        found = [step[phase] for step in steps]
        peaks = {name: pick([f.peaks[name] for f in found]) for name in found[0].peaks}
        result[phase] = Phase(peaks, statistics.median(f.seconds for f in found))
    return result


def figures(phases: dict[str, Phase], *, communicates: bool) -> dict[str, object]:
    """The steady step under the contract's names. `step_seconds` only where the ranks really talk to each other.

    Where the allocator was asked, `phases` has all it said; where storages were counted, `phase_peaks` has their bytes.
    """
    names = list(phases[PHASES[0]].peaks)
    result: dict[str, object] = {f"peak_{name}": max(phases[phase].peaks[name] for phase in PHASES) for name in names}
    if names == ["tensor_bytes"]:
        result["phase_peaks"] = {phase: phases[phase].peaks["tensor_bytes"] for phase in PHASES}
    else:
        result["phases"] = {phase: phases[phase].peaks for phase in PHASES}
    seconds = sum(phases[phase].seconds for phase in PHASES)
    result["step_seconds" if communicates else "step_seconds_without_communication"] = round(seconds, 6)
    return result
