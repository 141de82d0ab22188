"""What each training engine adds to a unit's compute: collectives, copies around them, the CPU's hooks, host traffic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from fsdp_advisor.hardware import Gpu, Link
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import OptimizerName
from fsdp_advisor.model.profile import Profile, Unit
from fsdp_advisor.policies.optimizers import optimizer_named
from fsdp_advisor.policies.optimizers.interface import HostKernel
from fsdp_advisor.timing.achieved import (
    HOOKS_S,
    HOST_ADAM_PER_S,
    HOST_PLAIN_ADAM_PER_S,
    host_bytes_per_s,
)
from fsdp_advisor.timing.collectives import Group, all_gather_s, all_reduce_s

DDP_BUCKET_BYTES = 25 * 2**20
HOST_UPDATES_PER_S: dict[HostKernel, float] = {"one_pass": HOST_ADAM_PER_S, "many_passes": HOST_PLAIN_ADAM_PER_S}
"""Elements per second and node that an optimizer updates on the host."""


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """One unit on its engine, seconds. `gather` and `reduce` are on the link, with what the host adds to them."""

    gather: float
    reduce: float
    copies_forward: float  # on the compute stream
    copies_backward: float
    host_gather: float = 0.0  # the part of `gather` and of `reduce` that is PCIe's
    host_reduce: float = 0.0


@dataclass(frozen=True, slots=True)
class Engine:
    """How a plan's backend goes about a step."""

    gathers_forward: bool
    gathers_backward: bool
    reduces_early: bool  # in every micro-batch, not in the last alone
    overlaps: bool  # reductions run beside backward
    reduce_late: float  # after backward, hidden by nothing: seconds
    prefetch: str  # "pre", "post", "none"
    hooks_s: float  # on the CPU, per unit and direction
    optimizer: float
    host_optimizer: float
    gather_updated: float  # after the optimizer
    host_reduce: float  # gradients to the host after each reduction that `reduce_late` is: seconds over PCIe
    host_late: float  # parameters back from it, once per step


Groups = tuple[Group, Group]
"""The ranks that share one copy of the states, and those that hold the same part of it."""


def groups(plan: Plan, gpu: Gpu, between: Link) -> Groups:
    """A plan's ranks. HSDP's copies lie on different nodes; a rank's own adapter serves it alone."""
    inside = gpu.intra_node
    if plan.strategy == "hsdp":
        replicas = plan.replica_degree
        return _group(plan.shard_degree, 1, inside, between), _group(replicas, replicas, inside, between)
    everyone, alone = _group(plan.world_size, plan.nnodes, inside, between), _group(1, 1, inside, between)
    return (alone, everyone) if plan.strategy == "ddp" else (everyone, alone)


_group = lru_cache(maxsize=256)(Group)


def gather_bytes(plan: Plan) -> int:
    """Per element, of what an all-gather brings."""
    return 2 if plan.mixed else plan.param_bytes


def reduce_bytes(plan: Plan) -> int:
    """Per element, of what a reduction sends: DeepSpeed reduces in the dtype of its bf16 gradients, PyTorch in fp32."""
    return 2 if plan.mixed and plan.backend == "deepspeed" else plan.param_bytes


def unit_costs(unit: Unit, plan: Plan, gpu: Gpu, ranks: Groups, memory_bytes_per_s: float) -> UnitCosts:
    """A unit's collectives and copies. Raises nothing; a world of one communicates nothing."""
    shards, replicas = ranks
    elements, trainable = unit.elements, unit.trainable_elements
    gathered, reduced = elements * gather_bytes(plan), trainable * reduce_bytes(plan)
    if plan.strategy == "ddp":
        messages = -(-reduced // DDP_BUCKET_BYTES)
        copies = 4 * trainable * plan.param_bytes / memory_bytes_per_s if plan.world_size > 1 else 0.0
        return UnitCosts(0.0, all_reduce_s(reduced, replicas, messages=messages), 0.0, copies)
    if plan.strategy in ("zero1", "zero2") and plan.backend == "deepspeed":
        return UnitCosts(0.0, 0.0, 0.0, 4 * trainable * reduce_bytes(plan) / memory_bytes_per_s)
    n = shards.ranks
    gather, reduce = all_gather_s(gathered, shards), all_gather_s(reduced, shards)
    reduce += all_reduce_s(reduced / n, replicas)
    copies_in = elements / n * (plan.param_bytes + gather_bytes(plan)) / memory_bytes_per_s if plan.mixed else 0.0
    # FSDP2 splits what it gathered, DeepSpeed concatenates every parameter's parts; FSDP1 takes views
    copies_out = 2 * gathered / memory_bytes_per_s if plan.backend != "fsdp1" and n > 1 else 0.0
    bringing = copies_in + copies_out
    giving = (trainable * gather_bytes(plan) + 2 * reduced) / memory_bytes_per_s if n > 1 else 0.0
    host_gather = host_reduce = 0.0
    if plan.offload == "parameters":
        host = host_bytes_per_s(gpu)
        kept = gather_bytes(plan) if plan.backend == "deepspeed" else plan.param_bytes
        host_gather = elements / n * kept / host
        host_reduce = trainable / n * reduce_bytes(plan) / host
    elif plan.offload == "optimizer":  # gradients go to the host as they are reduced
        host_reduce = trainable / n * reduce_bytes(plan) / host_bytes_per_s(gpu)
    return UnitCosts(
        gather=gather + host_gather,
        reduce=reduce + host_reduce,
        copies_forward=bringing,
        copies_backward=bringing + giving if plan.strategy in ("zero3", "hsdp") else giving,
        host_gather=host_gather,
        host_reduce=host_reduce,
    )


def engine_of(profile: Profile, plan: Plan, gpu: Gpu, ranks: Groups, memory_bytes_per_s: float) -> Engine:
    """The engine of a plan, with what happens once per step."""
    shards, _ = ranks
    deepspeed = plan.backend == "deepspeed"
    bulk = deepspeed and plan.strategy in ("zero1", "zero2")
    trainable = profile.trainable_parameters
    own = trainable / shards.ranks
    late = gather_updated = host_reduce = host_late = 0.0
    if bulk:
        # a bucket is all-reduced and each rank keeps its part (use_multi_rank_bucket_allreduce), beside nothing (overlap_comm off)
        buckets = -(-trainable // 500_000_000)
        late = all_reduce_s(trainable * reduce_bytes(plan), shards, messages=buckets)
        gather_updated = all_gather_s(trainable * gather_bytes(plan), shards)
        if plan.offload == "optimizer":
            host_reduce = own * reduce_bytes(plan) / host_bytes_per_s(gpu)
    if plan.offload == "optimizer":
        host_late = own * gather_bytes(plan) / host_bytes_per_s(gpu)
    masters = deepspeed and plan.mixed
    update_bytes = _update_bytes_per_element(profile, plan.optim, plan.param_bytes)
    step_bytes = own * (update_bytes + (16 if masters else 0))  # 16: norm, cast in, cast out
    optimizer, host_optimizer = step_bytes / memory_bytes_per_s, 0.0
    if plan.offload != "none":
        stepping = optimizer_named(plan.optim)
        kernel = stepping.deepspeed_host_kernel if deepspeed else stepping.host_kernel
        optimizer, host_optimizer = 0.0, own * plan.ranks_per_node / HOST_UPDATES_PER_S[kernel]
    sharded = not (plan.strategy == "ddp" or bulk)
    return Engine(
        gathers_forward=sharded,
        gathers_backward=plan.strategy in ("zero3", "hsdp"),
        reduces_early=plan.strategy not in ("ddp", "zero1"),
        overlaps=not bulk,
        reduce_late=late,
        prefetch="pre" if plan.backend != "fsdp1" else plan.backward_prefetch,
        hooks_s=HOOKS_S[plan.backend] if sharded else 0.0,
        optimizer=optimizer,
        host_optimizer=host_optimizer,
        gather_updated=gather_updated,
        host_reduce=host_reduce,
        host_late=host_late,
    )


@lru_cache(maxsize=1024)
def _update_bytes_per_element(profile: Profile, optim: OptimizerName, element_bytes: int) -> float:
    """Bytes of memory traffic of the update, the mean over all trainable elements.

    NotImplementedError for an optimizer whose update needs matrix products or collectives, which have no time model.
    """
    optimizer, n_bytes = optimizer_named(optim), 0
    for unit, count in profile.counted_units():
        for parameter in unit.parameters:
            if parameter.trainable:
                if optimizer.step_flops(parameter) or optimizer.step_collectives(parameter):
                    raise NotImplementedError(f"no time model for the FLOPs and collectives of {optim}")
                n_bytes += optimizer.step_bytes(parameter, element_bytes) * count
    return n_bytes / max(1, profile.trainable_parameters)
