"""Wrap a model with PyTorch's own DDP, FSDP1 or FSDP2 as a plan says, on real ranks or as rank 0 of a fake process group.

The collectives of the fake process group allocate like real ones and move nothing, so one process can be rank 0 of any world.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
)
from torch.nn.parallel import DistributedDataParallel

from fsdp_advisor.engines.fsdp1.sharding import torch_sharding_name
from fsdp_advisor.errors import MeasurementError
from fsdp_advisor.job.optimizers import limit_of
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.policies.optimizers import optimizer_of
from fsdp_advisor.policies.optimizers.interface import Constructor, Refusal
from fsdp_advisor.recording.wrapping import modules_by_size
from fsdp_advisor.validation.choices import Mode
from fsdp_advisor.validation.failures import ModeUnavailable

_LEARNING_RATE = 1e-6
_PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}


@contextlib.contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """A process group in which this process is rank 0 of `world_size`. Raises MeasurementError if there is one already."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise MeasurementError("a process group exists already", hint="simulate in a process of its own")
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(plan: Plan, device: str) -> DeviceMesh:
    """The device mesh of a plan: (shard,), or (replicate, shard) for HSDP."""
    if plan.strategy == "hsdp":
        return init_device_mesh(device, (plan.replica_degree, plan.shard_degree), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device, (plan.shard_degree,))


def half(plan: Plan) -> torch.dtype:
    """The dtype in which a mixed-precision plan computes."""
    return torch.float16 if plan.precision.startswith("fp16") else torch.bfloat16


def weight_dtype(plan: Plan) -> torch.dtype:
    """The dtype of the model's weights before an engine wraps them."""
    dtype: torch.dtype = getattr(torch, plan.loaded_dtype)
    return dtype


def wrap(
    model: nn.Module,
    layers: list[nn.Module],
    plan: Plan,
    mesh: DeviceMesh | None,
    device: str,
    *,
    mode: Mode = "simulate",
    materialise: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """Wrap `model` with the plan's engine. The units are those of its wrap policy over `layers`, and the root.

    `mode` decides how DDP and offload treat a fake process group and fake tensors. `materialise` makes the weights of one FSDP1 unit
    at a time.
    """
    match plan.backend:
        case "ddp":
            return _ddp(model, mode) if plan.world_size > 1 else model
        case "fsdp1":
            return _fsdp1(model, layers, plan, mesh, device, materialise)
        case "fsdp2":
            return _fsdp2(model, layers, plan, mesh, mode)
    raise MeasurementError(f"{plan.backend} is not one of PyTorch's engines", hint="fsdp2, fsdp1 or ddp")


class _FixedBuckets:
    """DDP's reducer without the rebuild of its buckets after the first step, which would read the gradients' memory."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _ddp(model: nn.Module, mode: Mode) -> nn.Module:
    """DDP with its defaults."""
    if mode == "measure":
        return DistributedDataParallel(model)
    wrapped = DistributedDataParallel(model, init_sync=False)
    adapt_ddp_to_fake_group(wrapped, fake_tensors=mode == "simulate")
    return wrapped


def adapt_ddp_to_fake_group(wrapped: DistributedDataParallel, *, fake_tensors: bool) -> None:
    """Give DDP a communication hook that returns each bucket unreduced, because the fake group reduces nothing."""

    def reduced(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    reduced.__annotations__ = {}  # DDP compares annotations with classes; here they are strings
    wrapped.register_comm_hook(None, reduced)
    if fake_tensors:
        wrapped.reducer = _FixedBuckets(wrapped.reducer)  # type: ignore[assignment]  # a proxy of a Reducer


def _fsdp2(model: nn.Module, layers: list[nn.Module], plan: Plan, mesh: DeviceMesh | None, mode: Mode) -> nn.Module:
    kwargs: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": plan.post_forward_ranks or plan.reshards,
        "mp_policy": MixedPrecisionPolicy(param_dtype=half(plan), reduce_dtype=torch.float32)
        if plan.mixed
        else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=mode != "simulate")
        if plan.offload == "parameters"
        else OffloadPolicy(),
        # packed weights of an integer dtype stay whole, as in accelerate's fsdp2_prepare_model
        "ignored_params": {p for p in model.parameters() if not p.requires_grad and not p.is_floating_point()},
    }
    for unit in _fsdp2_units(model, layers, plan):
        fully_shard(unit, **kwargs)
    fully_shard(model, **kwargs)
    if plan.forward_prefetch:
        for layer, following in itertools.pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])  # type: ignore[operator]  # an FSDPModule
    return model


def _fsdp2_units(model: nn.Module, layers: list[nn.Module], plan: Plan) -> list[Any]:
    """The modules, or lists of modules, to pass to `fully_shard`, as the plan's policy selects them. FSDP2 itself has no wrap policy."""
    policy = plan.wrap_policy
    match policy.kind:
        case "none":
            return []
        case "layer":
            return list(layers)
        case "class":
            return [layer for layer in layers if type(layer).__name__ in policy.classes]
        case "every":
            by_parent = itertools.groupby(layers, key=_parent_of(model))
            return [
                group[i : i + policy.number]
                for _, of in by_parent
                if (group := list(of))
                for i in range(0, len(group), policy.number)
            ]
        case "size":
            return modules_by_size(model, policy.number)
        case "peft" | "lora":
            raise AssertionError("no option of a request")


def _parent_of(model: nn.Module) -> Callable[[nn.Module], str]:
    names = {module: name.rpartition(".")[0] for name, module in model.named_modules()}
    return names.__getitem__


def _fsdp1(
    model: nn.Module,
    layers: list[nn.Module],
    plan: Plan,
    mesh: DeviceMesh | None,
    device: str,
    materialise: Callable[[nn.Module], None] | None,
) -> nn.Module:
    mixed = MixedPrecision(param_dtype=half(plan), reduce_dtype=torch.float32, buffer_dtype=half(plan))
    return FullyShardedDataParallel(
        model,
        use_orig_params=plan.use_orig_params,
        device_id=torch.device(device),
        device_mesh=mesh if plan.strategy == "hsdp" else None,
        auto_wrap_policy=_fsdp1_policy(layers, plan),
        mixed_precision=mixed if plan.mixed else None,
        param_init_fn=materialise,
        sharding_strategy=ShardingStrategy[torch_sharding_name(plan)],
        backward_prefetch=_PREFETCH[plan.backward_prefetch],
        forward_prefetch=plan.forward_prefetch,
        cpu_offload=CPUOffload(offload_params=plan.offload == "parameters"),
    )


def _fsdp1_policy(layers: list[nn.Module], plan: Plan) -> Any:
    policy = plan.wrap_policy
    match policy.kind:
        case "layer":
            return CustomPolicy(functools.partial(_is_unit, {id(layer) for layer in layers}))
        case "none":
            return None
        case "class":
            classes = {type(layer) for layer in layers if type(layer).__name__ in policy.classes}
            return functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=classes)
        case "size":
            return functools.partial(size_based_auto_wrap_policy, min_num_params=policy.number)
        case "every":
            raise MeasurementError("FSDP1 cannot wrap groups of layers", hint="--backend fsdp2")
        case "peft" | "lora":
            raise AssertionError("no option of a request")


def _is_unit(units: set[int], module: nn.Module) -> bool:
    return id(module) in units


def optimizer_for(model: nn.Module, plan: Plan, *, training: bool = True) -> torch.optim.Optimizer:
    """The plan's optimizer over the wrapped model's parameters. Raises MeasurementError if it cannot be measured.

    `training`: whether an optimizer with modes is put into training mode. Its train() creates state entries for the current parameters,
    which keep these parameters alive if accelerate shards them afterwards.
    """
    optimizer = optimizer_of(plan)
    if (limit := limit_of(plan.optim, plan.backend, "torch")) is not None:
        raise ModeUnavailable(limit.reason, hint=limit.hint)
    constructor = optimizer.script
    shows = any(p.is_cuda for p in model.parameters()) or (optimizer.simulated and detect_fake_mode() is not None)
    if optimizer.measured_on_cpu is not None and not shows:
        raise ModeUnavailable(optimizer.measured_on_cpu.reason, hint="--mode rehearse, or a GPU")
    if isinstance(constructor, Refusal):
        raise MeasurementError(constructor.reason, hint="try another --optim")
    made: torch.optim.Optimizer = optimizer_class(constructor)(
        _trainable(model), lr=_LEARNING_RATE, **constructor.options
    )
    if training and constructor.has_modes:
        made.train()  # type: ignore[attr-defined]  # of schedulefree's optimizers
    return made


def zero_redundancy_optimizer_for(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """The plan's optimizer under torch's ZeroRedundancyOptimizer, which keeps each parameter's whole state on one rank."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    optimizer = optimizer_of(plan)
    constructor = optimizer.measured_zero1 or optimizer.script
    if isinstance(constructor, Refusal):
        raise ModeUnavailable(constructor.reason, hint="--optim adamw_torch or sgd")
    options: dict[str, Any] = {"lr": _LEARNING_RATE, **constructor.options}
    return ZeroRedundancyOptimizer(_trainable(model), optimizer_class(constructor), **options)


def optimizer_class(constructor: Constructor) -> type[Any]:
    """The class that `constructor` names."""
    found: type[Any] = getattr(importlib.import_module(constructor.module), constructor.name)
    return found


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]
