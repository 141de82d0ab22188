"""The first rung: PyTorch's own engines around the whole model, under fake tensors, for rank 0 of any world. No GPU, no memory."""

from __future__ import annotations

import gc
import importlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.recording.cuda import as_on_cuda
from fsdp_advisor.recording.source import Source
from fsdp_advisor.recording.step import fake_tensors, materialise
from fsdp_advisor.validation import frameworks
from fsdp_advisor.validation.engines import fake_process_group, mesh_of, optimizer_for, weight_dtype, wrap
from fsdp_advisor.validation.failures import NotHere
from fsdp_advisor.validation.meter import Ids, StorageMeter
from fsdp_advisor.validation.steps import PHASES, TorchTrainer, autocast_of, batch_of, layers_of, take_step

STEPS = 2
"""The second step is the steady one: the first has no optimizer states before its last phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Bytes of live tensor storages, each rounded up to 512, in a steady-state step.

    `at_peak` divides the highest moment's live set: `parameters`, `gradients` (what `param.grad` holds when backward is done)
    and `optimizer` by their owners, `kept` for whatever else stood before the step (buffers, the batch, DDP's buckets),
    `step` for the rest.
    """

    phase_peaks: dict[str, int]
    between_steps: int
    at_peak: dict[str, int] = field(default_factory=dict)
    timeline: tuple[tuple[str, str, int], ...] = ()
    """(phase, operator, bytes alive) at each birth and death, where asked for."""

    @property
    def peak_tensor_bytes(self) -> int:
        return max(self.phase_peaks.values())


def check(plan: Plan) -> None:
    """Raises NotHere for a plan that a CPU cannot tell the truth about."""
    if plan.offload != "none":
        raise NotHere(
            f"offload {plan.offload} cannot be simulated: without a GPU, host and device tensors look the same",
            hint="--rung stand-in or measure on a machine with a GPU",
        )
    if plan.backend == "deepspeed":
        raise NotHere(
            "deepspeed is not one of PyTorch's engines, which are what is simulated",
            hint="--rung measure runs DeepSpeed itself; --backend fsdp2, fsdp1 or ddp can be simulated",
        )
    if plan.prepared:
        frameworks.check(plan)


def simulate(source: Source, plan: Plan, *, timeline: bool = False) -> Simulated:
    """One steady-state step of the plan, as PyTorch runs it on rank 0.

    Raises MeasurementError for a backend that is not PyTorch's, and for offload.
    """
    check(plan)
    model = source.build(weight_dtype(plan))
    checkpointing = plan.activation_checkpointing == "full"
    source.configure(model, attention=plan.attention, checkpointing=checkpointing and _by_the_model(plan))
    meter = StorageMeter(timeline=timeline)
    with fake_process_group(plan.world_size), _fsdp1_on_fake_storages(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = mesh_of(plan, "cpu") if plan.backend != "ddp" else None
        if (ranks := mesh.mesh if mesh is not None else None) is not None:
            meter.ignore(ranks)  # the ranks' numbers, always on the host; slices of a mesh are views of them
        launched = frameworks.as_launched(plan, mesh) if plan.prepared else nullcontext()
        on_gpu = (
            as_on_cuda() if plan.attention == "flash_attention_2" else nullcontext()
        )  # whose kernel is a GPU's alone
        with launched as parallel, fake_tensors(), meter, on_gpu:
            materialise(model, None)
            trainer = _trainer(source, model, plan, mesh, parallel)
            gradients: list[Ids] = []
            gc.collect()
            for _ in range(STEPS):
                meter.begin_step()
                gradients.clear()
                phases = take_step(
                    trainer,
                    meter,
                    plan.gradient_accumulation_steps,
                    lambda: gradients.append(
                        meter.numbers_of(p.grad for p in trainer.model.parameters() if p.grad is not None)
                    ),
                )
            accounts = {
                "parameters": meter.numbers_of(trainer.model.parameters()),
                "gradients": gradients[0],
                "optimizer": meter.numbers_of(
                    t
                    for state in trainer.optimizer.state.values()
                    for t in state.values()
                    if isinstance(t, torch.Tensor)
                ),
            }
            return Simulated(
                phase_peaks={phase: phases[phase].peaks["tensor_bytes"] for phase in PHASES},
                between_steps=meter.live,
                at_peak=meter.at_peak(accounts),
                timeline=tuple(meter.timeline),
            )


def _by_the_model(plan: Plan) -> bool:
    """FSDP plugins of accelerate wrap layers for checkpointing themselves."""
    return not plan.prepared or plan.backend == "ddp"


def _trainer(
    source: Source, model: nn.Module, plan: Plan, mesh: DeviceMesh | None, parallel: Any
) -> TorchTrainer | frameworks.AccelerateTrainer | frameworks.TransformersTrainer:
    """The plan's framework around the model, ready to take steps."""
    batch = batch_of(source, plan, model, real=False)
    match plan.framework:
        case "accelerate":
            return frameworks.accelerate_trainer(source, model, plan, batch, parallel)
        case "trainer":
            return frameworks.transformers_trainer(source, model, plan, batch, parallel)
    layers = layers_of(source.stacks(model)) if plan.wrap == "layer" else []
    wrapped = wrap(model, layers, plan, mesh, "cpu")
    return TorchTrainer(source, wrapped, optimizer_for(wrapped, plan), batch, autocast_of(plan, "cpu"))


@contextmanager
def _fsdp1_on_fake_storages() -> Iterator[None]:
    """FSDP1 asks whether a storage has an address; a fake one has a size only."""
    flat_param: Any = importlib.import_module("torch.distributed.fsdp._flat_param")
    original = flat_param._data_ptr_allocated
    flat_param._data_ptr_allocated = lambda tensor: tensor.untyped_storage().size() > 0
    try:
        yield
    finally:
        flat_param._data_ptr_allocated = original
