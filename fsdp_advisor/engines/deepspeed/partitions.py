"""The states of DeepSpeed ZeRO-1, 2 and 3: the storages that rank 0 keeps from step to step.

Read in DeepSpeed 0.19.8, under ``deepspeed/runtime/``: stages 1 and 2 in ``zero/stage_1_and_2.py``, stage 3 in
``zero/stage3.py``. The configuration is in `settings`, the buffers of a step in `buffers`, stage 3's gathered parameters in
`coordinator`, host memory in `host`. N = ranks; P = trainable elements; c = bytes per element of the compute dtype; m = bytes
per element of the masters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from fsdp_advisor.engines.deepspeed.groups import Group, groups
from fsdp_advisor.engines.deepspeed.muon_buffers import gather_buffers, kept_gathers
from fsdp_advisor.engines.deepspeed.muon_offload import Updates, flat_batches, sub_group_batches
from fsdp_advisor.engines.deepspeed.muon_updates import Chunk, chunks
from fsdp_advisor.engines.deepspeed.settings import (
    DEFAULTS,
    Settings,
    master_bytes,
    offloads_optimizer,
    offloads_parameters,
    stage,
)
from fsdp_advisor.engines.units import buffers
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Parameter, Profile
from fsdp_advisor.policies.dtypes import cast_bytes, has_8_bit_weights
from fsdp_advisor.policies.optimizers import optimizer_of
from fsdp_advisor.policies.optimizers.deepspeed_muon import muon_storages
from fsdp_advisor.program.storages import NO_STORAGES, States, Storages

FP64_NORM_BYTES = 8
"""Gradient norms are computed on a copy in fp64. Source: zero/utils.py, get_norm_dtype."""


def deepspeed_refusal(profile: Profile, plan: Plan) -> UsageError | None:
    """Why DeepSpeed cannot train a model; None if it can. Weights in 4 bits are sharded and gathered as they are stored.

    Source: bitsandbytes 0.50, nn/modules.py, Linear8bitLt: `state.CB` refers to the whole weight. DeepSpeed 0.19.8,
    runtime/zero/muon/original_muon.py, muon_update: the update of four dimensions has two, and its gradient four.
    """
    in_groups = groups(profile, plan) if optimizer_of(plan).is_deepspeeds else ()
    by_muon = (p for group in in_groups if group.by_muon for p in group.parameters)
    if (filters := next((p for p in by_muon if len(p.shape) == 4), None)) is not None:
        return UsageError(
            f"DeepSpeed's Muon fails on weights with four dimensions, such as {filters.name}", hint="another --optim"
        )
    if stage(plan) < 3 or not has_8_bit_weights(profile):
        return None
    return UsageError(
        "ZeRO-3 does not save memory on weights in 8 bits: each layer keeps a second reference to its whole weight",
        hint="--load-in-4bit, or --strategy zero2",
    )


def flat_elements(trainable: int, ranks: int) -> int:
    """Elements of the flat buffer of stages 1 and 2: `trainable`, rounded up to a multiple of 2 `ranks`. Each rank owns
    1/`ranks` of it.

    Source: zero/stage_1_and_2.py, DeepSpeedZeroOptimizer.__init__ (nccl_start_alignment_factor = 2), of one parameter
    group.
    >>> flat_elements(1322, 2), flat_elements(1322, 3)
    (1324, 1326)
    """
    return -(-trainable // (2 * ranks)) * 2 * ranks


def shard_elements(elements: int, ranks: int) -> int:
    """Elements of a parameter that each rank keeps under stage 3, which pads every parameter separately.

    Source: zero/partition_parameters.py, Init._partition_param.
    >>> shard_elements(29, 2)
    15
    """
    return -(-elements // ranks)


def shard_total(profile: Profile, ranks: int) -> int:
    """The elements that a rank holds of all trained parameters, each padded to a multiple of the ranks."""
    return sum(shard_elements(p.elements, ranks) * n for p, n in profile.counted_parameters() if p.trainable)


class SubGroup(NamedTuple):
    """A part of a group that stage 3 steps separately. `elements`: of a rank's shards."""

    parameters: tuple[Parameter, ...]
    elements: int
    by_muon: bool = False


def sub_groups(profile: Profile, plan: Plan, settings: Settings = DEFAULTS) -> list[SubGroup]:
    """The sub-groups of all groups. The parameter that fills a sub-group ends it.

    DeepSpeed divides a group only if a rank has more than ``sub_group_size`` elements of it.
    Source: zero/stage3.py, _create_fp16_sub_groups.
    """
    ranks = plan.shard_degree
    return [sub_group for group in groups(profile, plan) for sub_group in _divided(group, ranks, settings)]


def _divided(group: Group, ranks: int, settings: Settings) -> Iterator[SubGroup]:
    total = sum(shard_elements(p.elements, ranks) for p in group.parameters)
    if total <= settings.sub_group_size:
        yield SubGroup(tuple(group.parameters), total, group.by_muon)
        return
    parameters: list[Parameter] = []
    elements = 0
    for parameter in group.parameters:
        parameters.append(parameter)
        elements += shard_elements(parameter.elements, ranks)
        if elements >= settings.sub_group_size:
            yield SubGroup(tuple(parameters), elements, group.by_muon)
            parameters, elements = [], 0
    if parameters:
        yield SubGroup(tuple(parameters), elements, group.by_muon)


def muon_chunks(profile: Profile, plan: Plan, settings: Settings = DEFAULTS) -> tuple[Chunk, ...]:
    """The matrices that Muon updates at a time under stage 3 without offload."""
    if offloads_optimizer(plan):
        return ()
    of_muon = (each.parameters for each in sub_groups(profile, plan, settings) if each.by_muon)
    ranks, bucket = plan.shard_degree, settings.reduce_bucket_size
    return tuple(chunk for parameters in of_muon for chunk in chunks(parameters, ranks, bucket))


def offloaded_updates(profile: Profile, plan: Plan, settings: Settings = DEFAULTS) -> Updates | None:
    """Muon's updates if its optimizer is offloaded. Stages 1 and 2 gather in the masters' dtype, stage 3 in that of the gradients."""
    if not offloads_optimizer(plan) or not optimizer_of(plan).is_deepspeeds:
        return None
    ranks, m, sharded = plan.shard_degree, master_bytes(plan), stage(plan) == 3
    if sharded:
        of_muon = (each.parameters for each in sub_groups(profile, plan, settings) if each.by_muon)
        batches = sub_group_batches(of_muon, ranks)
    else:
        flat = (group for group in groups(profile, plan) if group.by_muon)
        batches = (
            batch for group in flat for batch in flat_batches(group.parameters, owned_elements(group, ranks), ranks, m)
        )
    return Updates(
        batches=tuple(batches),
        ranks=ranks,
        gathered_bytes=plan.compute_bytes if sharded else m,
        host_bytes=m,
        loss_scaled=plan.precision == "fp16-mixed",
        sharded=sharded,
    )


def communication(profile: Profile, plan: Plan, settings: Settings = DEFAULTS) -> Storages:
    """Stage 3's bucket, or the buffer of stages 1 and 2 through which a gradient goes to the host. Muon's buffers are not included."""
    if stage(plan) == 3:
        return Storages.of(plan.compute_bytes * settings.reduce_bucket_size)
    return Storages.of(plan.compute_bytes * largest_parameter(profile) if offloads_optimizer(plan) else 0)


def kept_muon_buffers(profile: Profile, plan: Plan, settings: Settings = DEFAULTS) -> Storages:
    """The buffers of Muon's all-gathers that stay from step to step."""
    ranks, c = plan.shard_degree, plan.compute_bytes
    if (updates := offloaded_updates(profile, plan, settings)) is not None:
        kept, c = updates.kept, updates.gathered_bytes
    elif stage(plan) == 3:
        kept = kept_gathers((chunk.gather for chunk in muon_chunks(profile, plan, settings)), ranks, c)
    else:
        return NO_STORAGES
    return sum((gather_buffers(gather, ranks, c) for gather in kept), NO_STORAGES)


def shards(profile: Profile, plan: Plan) -> Storages:
    """Rank 0's shards of the parameters under stage 3, persistent parameters included."""
    if offloads_parameters(plan):
        return NO_STORAGES
    ranks, c = plan.shard_degree, plan.compute_bytes
    frozen = (
        Storages.of(cast_bytes(plan, p) * shard_elements(p.elements, ranks), n)
        for p, n in profile.counted_parameters()
        if not p.trainable
    )
    return sum(frozen, Storages.of(c * shard_total(profile, ranks)))


def persistent(profile: Profile, plan: Plan, settings: Settings) -> Storages:
    """Storages of the small parameters that stage 3 keeps gathered in addition to their shards. They are gathered again after every step.

    Source: zero/parameter_offload.py, mark_persistent_parameters.
    """
    return _gathered(profile, plan, lambda p: p.elements <= settings.param_persistence_threshold)


def not_persistent(profile: Profile, plan: Plan, settings: Settings, *, shards: int | None = None) -> Storages:
    """Storages of the other parameters, if stage 3 gathers them together; `shards`: only so many of each parameter's shards."""
    return _gathered(profile, plan, lambda p: p.elements > settings.param_persistence_threshold, shards)


def _gathered(
    profile: Profile, plan: Plan, is_gathered: Callable[[Parameter], bool], shards: int | None = None
) -> Storages:
    """Storages of gathered parameters, one each, padded to a multiple of the ranks; `shards`: of so many of their shards.

    A single rank uses its shard directly, unless the shard is on the host.
    Source: zero/partition_parameters.py, _allgather_params_coalesced.
    """
    ranks, found = plan.shard_degree, NO_STORAGES
    if ranks == 1 and not offloads_parameters(plan):
        return found
    for p, n in profile.counted_parameters():
        if is_gathered(p):
            found += Storages.of(cast_bytes(plan, p) * (shards or ranks) * shard_elements(p.elements, ranks), n)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStates:
    """The optimizer's part of the states on the GPU. `deepspeed.initialize` creates the masters, the first step the moments.

    `moments` include the gradient norm (fp32; fp64 under stage 3) and stage 3's overflow flag.
    `momentum`: of Muon. The end of the first step's last backward creates it. Stage 3's, which `masters` include, is of the shards.
    Source: zero/stage_1_and_2.py and zero/stage3.py, initialize_optimizer_states, which does not step the optimizer;
    zero/stage3.py, _create_momentum_buffer.
    """

    masters: Storages = NO_STORAGES
    momentum: Storages = NO_STORAGES
    moments_by_partition: tuple[Storages, ...] = ()
    paged: Storages = NO_STORAGES

    @property
    def moments(self) -> Storages:
        return sum(self.moments_by_partition, NO_STORAGES)


def owned_elements(group: Group, ranks: int) -> int:
    """Elements of a group's flat buffer that each rank owns in stages 1 and 2."""
    return flat_elements(group.elements, ranks) // ranks


def owned_by_rank0(parameters: Iterable[Parameter], partition_elements: int) -> tuple[int, int, int]:
    """(elements kept, largest owned piece, number of pieces) of the gradients that rank 0 owns a part of, in stages 1 and 2.

    `parameters`: those of one group. The partition is the first 1/N of them. The gradient that crosses its end is kept whole.
    Source: zero/stage_1_and_2.py, get_partition_info, copy_grads_in_partition.
    """
    start = largest = pieces = 0
    for parameter in parameters:
        if start >= partition_elements:
            break
        largest = max(largest, min(parameter.elements, partition_elements - start))
        start, pieces = start + parameter.elements, pieces + 1
    return start, largest, pieces + (start < partition_elements)


def flat_partitions(profile: Profile, plan: Plan, settings: Settings = DEFAULTS) -> list[int]:
    """Elements of each flat partition that rank 0 steps: 1/N of each group, or of each sub-group of stage 3."""
    if stage(plan) < 3:
        return [owned_elements(group, plan.shard_degree) for group in groups(profile, plan)]
    return [sub_group.elements for sub_group in sub_groups(profile, plan, settings)]


def optimizer_states(profile: Profile, plan: Plan, settings: Settings = DEFAULTS) -> OptimizerStates:
    """The optimizer's states on the GPU; nothing if they are offloaded."""
    if offloads_optimizer(plan):
        return OptimizerStates()
    m, optimizer = master_bytes(plan), optimizer_of(plan)
    partitions = flat_partitions(profile, plan, settings)
    if stage(plan) < 3:
        by_muon = [group.by_muon for group in groups(profile, plan)]
        norm, masters, momentum = Storages.of(4), NO_STORAGES, _momentum(profile, plan)
    else:
        by_muon = [each.by_muon for each in sub_groups(profile, plan, settings)]
        norm, momentum = Storages.of(FP64_NORM_BYTES) + Storages.of(1), NO_STORAGES
        of_muon = (n for n, is_muons in zip(partitions, by_muon, strict=True) if is_muons)
        masters = sum((Storages.of(plan.compute_bytes * n) for n in of_muon), NO_STORAGES)
    first, *rest = (
        NO_STORAGES if is_muons else optimizer.flat_state_storages(n, m)
        for n, is_muons in zip(partitions, by_muon, strict=True)
    )
    return OptimizerStates(
        masters=sum((Storages.of(m * n) for n in partitions), masters),
        momentum=momentum,
        moments_by_partition=(norm + optimizer.shared_state + first, *rest),
        paged=sum((optimizer.flat_paged_state_storages(n) for n in partitions), NO_STORAGES),
    )


def _momentum(profile: Profile, plan: Plan) -> Storages:
    """Muon's momentum, of the whole matrices that rank 0 owns a part of, and its copy."""
    kept = (
        owned_by_rank0(group.parameters, owned_elements(group, plan.shard_degree))[0]
        for group in groups(profile, plan)
        if group.by_muon
    )
    return sum((muon_storages(elements, plan.compute_bytes) for elements in kept), NO_STORAGES)


def states(profile: Profile, plan: Plan, settings: Settings = DEFAULTS) -> States:
    """The states that rank 0 keeps on the GPU from step to step.

    Stages 1, 2: the whole model in one flat buffer per group, masters and moments of 1/N of it, no gradients.
    Stage 3: 1/N of every parameter in one flat buffer, 1/N of the gradients in the model's dtype, masters and moments per
    sub-group. It also keeps the reduce bucket and the last buffers of Muon's all-gathers, which are never freed. Frozen parameters are
    sharded separately.

    Source: zero/stage_1_and_2.py, __init__; zero/stage3.py, _create_fp16_partitions_with_defragmentation,
    _create_fp32_partitions, _setup_for_real_optimizer.
    """
    ranks, c = plan.shard_degree, plan.compute_bytes
    offloaded, optimizer = offloads_optimizer(plan), optimizer_states(profile, plan, settings)
    of_model = buffers(profile, c)
    sent = communication(profile, plan, settings) + kept_muon_buffers(profile, plan, settings)
    if stage(plan) < 3:
        flat = (Storages.of(c * flat_elements(group.elements, ranks)) for group in groups(profile, plan))
        whole = (
            Storages.of(cast_bytes(plan, p) * p.elements, n) for p, n in profile.counted_parameters() if not p.trainable
        )
        return States(
            parameters=sum(whole, sum(flat, NO_STORAGES)),
            optimizer=optimizer.masters + optimizer.momentum + optimizer.moments,
            communication=sent,
            buffers=of_model,
            paged=optimizer.paged,
        )
    return States(
        parameters=shards(profile, plan) + persistent(profile, plan, settings),
        gradients=NO_STORAGES if offloaded else Storages.of(c * shard_total(profile, ranks)),
        optimizer=optimizer.masters + optimizer.moments,
        communication=sent,
        buffers=of_model,
        paged=optimizer.paged,
    )


def largest_parameter(profile: Profile) -> int:
    """The elements of the largest trained parameter, whole."""
    return max(p.elements for p, _ in profile.counted_parameters() if p.trainable)
