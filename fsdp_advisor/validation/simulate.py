"""Mode `simulate`: PyTorch's own engines around the whole model on fake tensors, as rank 0 of any world size. Needs no GPU."""

from __future__ import annotations

import gc
import importlib
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from fsdp_advisor.errors import assert_never
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.tiled_mlp import tiled_mlp_code
from fsdp_advisor.model.lora_kernels import kernels_of_model
from fsdp_advisor.policies.optimizers import optimizer_of
from fsdp_advisor.program.accounts import PHASES
from fsdp_advisor.recording.batches import with_batch
from fsdp_advisor.recording.cuda import as_on_cuda
from fsdp_advisor.recording.experts import with_experts
from fsdp_advisor.recording.fake import fake_tensors, materialise, materialise_attributes
from fsdp_advisor.recording.fp8 import convert_linears, on_fake_tensors
from fsdp_advisor.recording.images import with_images
from fsdp_advisor.recording.liger_kernels import with_liger_kernels
from fsdp_advisor.recording.lora_kernels import use_lora_kernels
from fsdp_advisor.recording.losses.source import with_loss
from fsdp_advisor.recording.quantized import set_compute_dtype
from fsdp_advisor.recording.source import Source
from fsdp_advisor.recording.tiled_mlp import tile_mlps
from fsdp_advisor.validation import frameworks
from fsdp_advisor.validation.bitsandbytes_states import states_as_on_gpu
from fsdp_advisor.validation.engines import fake_process_group, mesh_of, optimizer_for, weight_dtype, wrap
from fsdp_advisor.validation.failures import ModeUnavailable
from fsdp_advisor.validation.meter import StorageIds, StorageMeter
from fsdp_advisor.validation.steps import TorchTrainer, autocast_of, batch_of, layers_of, take_step
from fsdp_advisor.validation.torchtitan import TorchtitanTrainer, torchtitan_trainer

STEPS = 2
"""The second step is steady; the first one makes the optimizer states."""
MORE_STEPS = {"schedule_free_radam": 6}
"""The first five steps of RAdam have no square roots."""

SimulatedTrainer = TorchTrainer | frameworks.AccelerateTrainer | frameworks.TransformersTrainer | TorchtitanTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Bytes of live tensor storages in a steady-state step, each rounded up to 512.

    `at_peak` splits the bytes at the step's peak: `parameters`, `gradients` (`param.grad` after backward), `optimizer`, `kept` (alive
    before the step: buffers, the batch, DDP's buckets) and `step` (all others).
    """

    phase_peaks: dict[str, int]
    at_peak: dict[str, int] = field(default_factory=dict)
    timeline: tuple[tuple[str, str, int], ...] = ()
    """(phase, operator, live bytes) at each allocation and free; empty unless requested."""

    @property
    def peak_tensor_bytes(self) -> int:
        return max(self.phase_peaks.values())


READ_ON_THE_HOST = frozenset({"adafactor"})
"""Optimizers whose step reads values of weights on the host. Source: torch 2.13, optim/_adafactor.py, `_single_tensor_adafactor`."""


def check(plan: Plan) -> None:
    """Raises ModeUnavailable for a plan that cannot be simulated on a CPU."""
    if plan.offload != "none":
        raise ModeUnavailable(
            f"offload {plan.offload} cannot be simulated: without a GPU, host and device tensors look the same",
            hint="--mode stand-in or measure on a machine with a GPU",
        )
    if plan.activation_offload:
        raise ModeUnavailable(
            "activation offload cannot be simulated: without a GPU, host and device tensors look the same",
            hint="--mode rehearse, or stand-in on a machine with a GPU",
        )
    if plan.backend == "deepspeed":
        raise ModeUnavailable(
            "deepspeed cannot be simulated, only PyTorch's own engines can",
            hint="--mode measure runs DeepSpeed itself; --backend fsdp2, fsdp1 or ddp can be simulated",
        )
    if plan.optim in READ_ON_THE_HOST:
        raise ModeUnavailable(
            f"{plan.optim} cannot be simulated: it reads each weight's norm on the host, and fake tensors have no values",
            hint="--mode rehearse, or measure on a machine with a GPU",
        )
    optimizer = optimizer_of(plan)
    if (refused := optimizer.measured_on_cpu) is not None and not optimizer.simulated:
        raise ModeUnavailable(refused.reason, hint="--mode rehearse, or a GPU")
    if plan.task != "sft":
        raise ModeUnavailable(
            f"task {plan.task} cannot be simulated", hint="--task sft, or --mode rehearse on a script"
        )
    if plan.uses_accelerate:
        frameworks.check(plan)


def simulate(source: Source, plan: Plan, *, timeline: bool = False) -> Simulated:
    """One steady-state step of the plan, as PyTorch runs it on rank 0. Raises ModeUnavailable for plans that `check` refuses."""
    check(plan)
    source = with_experts(source, plan.experts_implementation, plan.expert_imbalance)
    source = with_images(source, plan.images)
    source = with_batch(source, plan.batch_layout, plan.padding_fraction)
    source = with_loss(source, plan.loss_code, plan.unscored_labels, router_loss=plan.adds_router_loss)
    model = source.build(weight_dtype(plan))
    if plan.precision == "fp16-mixed":
        set_compute_dtype(model, torch.float16)
    checkpointing = "none" if frameworks.plugin_checkpoints(model, plan) else plan.checkpointing
    source.configure(model, attention=plan.attention, checkpointing=checkpointing)
    if plan.fp8 != "none":
        convert_linears(model, source, plan.fp8)
    if plan.tiled_mlp != "none":
        tile_mlps(source.stacks(model), f"{tiled_mlp_code(plan)}:{plan.tiled_mlp}", source.name)
    if kernels_of_adapters := kernels_of_model(plan, source.config(), dict(model.named_parameters())):
        use_lora_kernels(model, kernels_of_adapters, source.name)
    meter = StorageMeter(timeline=timeline)
    with fake_process_group(plan.world_size), _fsdp1_on_fake_storages(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mesh = mesh_of(plan, "cpu") if plan.backend != "ddp" else None
        ranks = mesh.mesh if mesh is not None else None
        if ranks is not None:
            meter.ignore(ranks)  # rank numbers, always on the host; slices of a mesh are views of them
        launched = frameworks.as_launched(plan, mesh) if plan.uses_accelerate else nullcontext()
        flash = plan.attention == "flash_attention_2"  # its kernels exist only on GPUs
        smaller = _post_forward_mesh(plan, mesh, meter)  # before fake tensors, which have no values
        kernels = with_liger_kernels(model, source.name) if flash and plan.use_liger_kernel else nullcontext()
        states = states_as_on_gpu(meter) if optimizer_of(plan).simulated else nullcontext()
        with (
            launched as parallel,
            states,
            smaller,
            fake_tensors(values=source.needs_values, expert_imbalance=source.expert_imbalance),
            _attributes_on_host(model),
            meter,
            as_on_cuda() if flash else nullcontext(),
            kernels,
            on_fake_tensors(plan.fp8),
        ):
            materialise(model, None)
            trainer = _trainer(source, model, plan, mesh, parallel)
            return _steady_step(trainer, meter, plan)


def _steady_step(trainer: SimulatedTrainer, meter: StorageMeter, plan: Plan) -> Simulated:
    """Take steps until they are steady; the figures of the last one."""
    gradients: list[StorageIds] = []

    def remember_gradients() -> None:
        gradients.append(meter.storage_ids(p.grad for p in trainer.model.parameters() if p.grad is not None))
        if isinstance(trainer.model, DistributedDataParallel) and plan.checkpointing != "reentrant":
            unused = any(p.requires_grad and p.grad is None for p in trainer.model.parameters())
            trainer.model.find_unused_parameters |= unused  # a real run fails in the second step without it

    gc.collect()
    for _ in range(MORE_STEPS.get(plan.optim, STEPS)):
        meter.begin_step()
        phases = take_step(trainer, meter, plan.gradient_accumulation_steps, remember_gradients)
    states = (t for state in trainer.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))
    accounts = {
        "parameters": meter.storage_ids(trainer.model.parameters()),
        "gradients": gradients[-1],
        "optimizer": meter.storage_ids(states),
    }
    return Simulated(
        phase_peaks={phase: phases[phase].peaks["tensor_bytes"] for phase in PHASES},
        at_peak=meter.at_peak(accounts),
        timeline=tuple(meter.timeline),
    )


def _trainer(source: Source, model: nn.Module, plan: Plan, mesh: DeviceMesh | None, parallel: Any) -> SimulatedTrainer:
    """The model under the plan's engine and framework, ready to take steps."""
    batch = batch_of(source, plan, model, real=False)
    match plan.framework:
        case "accelerate":
            return frameworks.accelerate_trainer(source, model, plan, batch, parallel)
        case "trainer" | "trl" | "axolotl" | "llamafactory":
            return frameworks.transformers_trainer(source, model, plan, batch, parallel)
        case "torchtitan":
            return torchtitan_trainer(source, model, plan, mesh, batch)
        case "torch" | "deepspeed":
            layers = layers_of(source.stacks(model))
            wrapped = wrap(model, layers, plan, mesh, "cpu")
            return TorchTrainer(source, wrapped, optimizer_for(wrapped, plan), batch, autocast_of(plan, "cpu"))
        case _:
            assert_never(plan.framework)


def _post_forward_mesh(plan: Plan, mesh: DeviceMesh | None, meter: StorageMeter) -> AbstractContextManager[object]:
    """Context in which `fully_shard` uses one mesh of the ranks that keep the parameters after forward for all units.

    Source: torch.distributed.fsdp._fully_shard._fsdp_init (torch 2.13), _get_post_forward_mesh_info.
    """
    if plan.post_forward_ranks is None or mesh is None:
        return nullcontext()
    ranks = mesh.mesh.view(-1, plan.post_forward_ranks)
    smaller = DeviceMesh("cpu", ranks)
    meter.ignore(smaller.mesh)
    common: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common")
    info = common.HSDPMeshInfo(smaller, shard_mesh_dim=1, replicate_mesh_dim=0)
    fully: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fully_shard")
    return mock.patch.object(fully, "_get_post_forward_mesh_info", lambda *_: info)


@contextmanager
def _attributes_on_host(model: nn.Module) -> Iterator[None]:
    """Make the tensors that are plain attributes of modules before the meter counts. When a model moves to a GPU, they stay on the host.

    Source: torch.nn.Module._apply, which moves parameters and buffers.
    """
    materialise_attributes(model)
    yield


@contextmanager
def _fsdp1_on_fake_storages() -> Iterator[None]:
    """Context in which FSDP1 recognizes allocated storages by their size, and identical ones by their identity, because fake storages
    have no address.
    """
    flat_param: Any = importlib.import_module("torch.distributed.fsdp._flat_param")
    with (
        mock.patch.object(flat_param, "_data_ptr_allocated", lambda tensor: tensor.untyped_storage().size() > 0),
        mock.patch.object(torch.Tensor, "data_ptr", lambda tensor: tensor.untyped_storage()._cdata),
    ):
        yield
