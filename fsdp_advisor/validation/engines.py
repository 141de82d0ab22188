"""A model wrapped by PyTorch's own DDP, FSDP1 or FSDP2 as a plan says, on rank 0 of a process group of any size.

The fake process group's collectives allocate what real ones do and move nothing, so one process stands for a world. The same
code wraps on real ranks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
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
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.nn.parallel import DistributedDataParallel

from fsdp_advisor.errors import MeasurementError
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.policies.optimizers import optimizer_named
from fsdp_advisor.policies.optimizers.interface import Constructor, Refusal
from fsdp_advisor.validation.failures import NotHere
from fsdp_advisor.validation.records import Rung

_PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}


@contextlib.contextmanager
def fake_process_group(world_size: int) -> Iterator[None]:
    """Rank 0 of `world_size` ranks that exist in name only."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise MeasurementError("a process group is already there", hint="simulate in a process of its own")
    dist.init_process_group("fake", rank=0, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def mesh_of(plan: Plan, device: str) -> DeviceMesh:
    """One dimension to shard over; two, replicas outermost, for HSDP."""
    if plan.strategy == "hsdp":
        return init_device_mesh(device, (plan.replica_degree, plan.shard_degree), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh(device, (plan.shard_degree,))


def half(plan: Plan) -> torch.dtype:
    """The dtype in which a mixed plan computes."""
    return torch.float16 if plan.precision.startswith("fp16") else torch.bfloat16


def weight_dtype(plan: Plan) -> torch.dtype:
    """The dtype in which PyTorch's engines are handed the model."""
    return torch.bfloat16 if plan.precision == "bf16" else torch.float32


def wrap(
    model: nn.Module,
    layers: list[nn.Module],
    plan: Plan,
    mesh: DeviceMesh | None,
    device: str,
    *,
    rung: Rung = "simulate",
    materialise: Callable[[nn.Module], None] | None = None,
) -> nn.Module:
    """`model` under the plan's engine; each of `layers` and the root are units.

    `rung` tells DDP how real its group and its tensors are; `materialise` makes FSDP1's modules real one unit at a time.
    """
    match plan.backend:
        case "ddp":
            return _ddp(model, rung) if plan.world_size > 1 else model
        case "fsdp1":
            return _fsdp1(model, layers, plan, mesh, device, materialise)
        case "fsdp2":
            return _fsdp2(model, layers, plan, mesh, rung)
    raise MeasurementError(f"{plan.backend} is not one of PyTorch's engines", hint="fsdp2, fsdp1 or ddp")


class _FixedBuckets:
    """DDP's reducer, which would look into gradients' memory to rebuild its buckets after the first step."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


def _ddp(model: nn.Module, rung: Rung) -> nn.Module:
    """DDP with its defaults; the fake group needs a communication hook that returns the bucket as it is."""
    if rung == "measure":
        return DistributedDataParallel(model)
    wrapped = DistributedDataParallel(model, init_sync=False)
    on_fake_group(wrapped, fake_tensors=rung == "simulate")
    return wrapped


def on_fake_group(wrapped: DistributedDataParallel, *, fake_tensors: bool) -> None:
    """Let DDP run where its collectives reduce nothing."""

    def reduced(state: object, bucket: Any) -> torch.futures.Future[torch.Tensor]:
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    reduced.__annotations__ = {}  # DDP compares them with classes, and here they are strings
    wrapped.register_comm_hook(None, reduced)
    if fake_tensors:
        wrapped.reducer = _FixedBuckets(wrapped.reducer)  # type: ignore[assignment]  # it stands in for one


def _fsdp2(model: nn.Module, layers: list[nn.Module], plan: Plan, mesh: DeviceMesh | None, rung: Rung) -> nn.Module:
    kwargs: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": plan.strategy in ("zero3", "hsdp"),
        "mp_policy": MixedPrecisionPolicy(param_dtype=half(plan), reduce_dtype=torch.float32)
        if plan.mixed
        else MixedPrecisionPolicy(),
        "offload_policy": CPUOffloadPolicy(pin_memory=rung != "simulate")
        if plan.offload == "parameters"
        else OffloadPolicy(),
    }
    for layer in layers:
        fully_shard(layer, **kwargs)
    fully_shard(model, **kwargs)
    return model


def _fsdp1(
    model: nn.Module,
    layers: list[nn.Module],
    plan: Plan,
    mesh: DeviceMesh | None,
    device: str,
    materialise: Callable[[nn.Module], None] | None,
) -> nn.Module:
    units = {id(layer) for layer in layers}
    reshard = plan.strategy in ("zero3", "hsdp")
    if plan.strategy == "hsdp":
        sharding = ShardingStrategy.HYBRID_SHARD
    else:
        sharding = ShardingStrategy.FULL_SHARD if reshard else ShardingStrategy.SHARD_GRAD_OP
    mixed = MixedPrecision(param_dtype=half(plan), reduce_dtype=torch.float32, buffer_dtype=half(plan))
    return FullyShardedDataParallel(
        model,
        use_orig_params=True,
        device_id=torch.device(device),
        device_mesh=mesh if plan.strategy == "hsdp" else None,
        auto_wrap_policy=CustomPolicy(functools.partial(_is_unit, units)),
        mixed_precision=mixed if plan.mixed else None,
        param_init_fn=materialise,
        sharding_strategy=sharding,
        backward_prefetch=_PREFETCH[plan.backward_prefetch],
        cpu_offload=CPUOffload(offload_params=plan.offload == "parameters"),
    )


def _is_unit(units: set[int], module: nn.Module) -> bool:
    return id(module) in units


def optimizer_for(model: nn.Module, plan: Plan) -> torch.optim.Optimizer:
    """The plan's optimizer over the wrapped model's parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = optimizer_named(plan.optim)
    if plan.backend == "fsdp2" and optimizer.fsdp2_step_failure:
        raise NotHere(optimizer.fsdp2_step_failure, hint="--backend fsdp1, or another --optim")
    constructor = optimizer.measured
    if isinstance(constructor, Refusal):
        raise MeasurementError(constructor.reason, hint="try another --optim")
    made: torch.optim.Optimizer = optimizer_class(constructor)(parameters, lr=1e-6, **constructor.options)
    return made


def optimizer_class(constructor: Constructor) -> type[Any]:
    """The class that `constructor` names."""
    found: type[Any] = getattr(importlib.import_module(constructor.module), constructor.name)
    return found
