"""Loading a model under DeepSpeed, with and without zero.Init. Read in DeepSpeed 0.19.8 and transformers 5.23.

Without zero.Init `deepspeed.initialize` moves the whole model to the GPU (stage 3 too) and shards it there.
c = bytes per element of the weights, which are loaded in the compute dtype.
"""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from fsdp_advisor.engines.deepspeed import partitions
from fsdp_advisor.engines.deepspeed.groups import Group, groups
from fsdp_advisor.engines.deepspeed.settings import (
    master_bytes,
    offloads_optimizer,
    offloads_parameters,
    settings_of,
    stage,
)
from fsdp_advisor.engines.quantized_loading import is_quantized_on_load, on_gpu
from fsdp_advisor.engines.transfer import LoadedCheckpoint, LoadMethod
from fsdp_advisor.engines.units import buffers, total
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile, Unit
from fsdp_advisor.policies.dtypes import cast_bytes
from fsdp_advisor.program.storages import NO_STORAGES, Storages, WeightTransfer, round_up


def load_methods(profile: Profile, plan: Plan, *, gpu_memory_bytes: int | None = None) -> tuple[LoadMethod, ...]:
    """The methods of loading under DeepSpeed, the simplest to set up first.

    `gpu_memory_bytes`: the GPU's memory, None if unlimited. Stages 1 and 2 flatten the weights on the host of a small GPU.
    Source: runtime/engine.py, _configure_distributed_model.
    """
    return _stage_3(profile, plan) if stage(plan) == 3 else (_stages_1_and_2(profile, plan, gpu_memory_bytes),)


def _stages_1_and_2(profile: Profile, plan: Plan, gpu_memory_bytes: int | None) -> LoadMethod:
    """The method that loads the whole model and flattens each group into one buffer: on the GPU if both fit there, else in host memory.

    Source: zero/stage_1_and_2.py, __init__.
    """
    c, checkpoint = plan.compute_bytes, LoadedCheckpoint.of(profile, plan)
    in_groups = groups(profile, plan)
    flats = [c * partitions.flat_elements(group.elements, plan.shard_degree) for group in in_groups]
    whole, flat = _whole_model_bytes(profile, plan), max(flats)
    flattens_on_gpu = gpu_memory_bytes is None or whole + flat <= gpu_memory_bytes
    initialized_gpu, initialized_host = _bytes_after_initialize(profile, plan)
    flattened_host = 0 if flattens_on_gpu else profile.bytes_of(partial(cast_bytes, plan)) + flat
    gpu = max(whole + (flat if flattens_on_gpu else 0), initialized_gpu)
    flattening = [
        WeightTransfer(temporaries=_weights(profile, plan, in_groups[number:]), kept=Storages.of(kept))
        for number, kept in enumerate(flats)
    ]
    transfers = (*flattening, *_engine_transfers(profile, plan)) if flattens_on_gpu else ()
    if is_quantized_on_load(profile):
        host = max(initialized_host, flattened_host)
        return on_gpu(profile, plan, whole_bytes=whole, gpu_bytes=gpu, host_bytes=host, transfers=transfers)
    host = max(checkpoint.private_bytes, initialized_host, flattened_host)
    return LoadMethod(
        way="every_rank",
        how="from_pretrained on every rank, then deepspeed.initialize",
        gpu_bytes=gpu,
        first_rank_host_bytes=host,
        other_ranks_host_bytes=host,
        ranks_per_node=plan.ranks_per_node,
        mapped_bytes=checkpoint.mapped_bytes,
        transfers=transfers,
    )


def _stage_3(profile: Profile, plan: Plan) -> tuple[LoadMethod, ...]:
    """Two methods. With zero.Init, each module is sharded as it is built: rank 0 reads the file and broadcasts the parameters. Without it,
    every rank loads the whole model, as transformers always does with a base that bitsandbytes quantizes.

    Source: zero/partition_parameters.py, Init; transformers/integrations/deepspeed.py, _load_state_dict_into_zero3_model.
    """
    c, checkpoint = plan.compute_bytes, LoadedCheckpoint.of(profile, plan)
    initialized_gpu, initialized_host = _bytes_after_initialize(profile, plan)
    shards = sum(
        round_up(cast_bytes(plan, p) * partitions.shard_elements(p.elements, plan.shard_degree)) * count
        for p, count in profile.counted_parameters()
    )
    shards_on_gpu, shards_on_host = (0, shards) if offloads_parameters(plan) else (shards, 0)
    module = c * max(_largest_module_elements(unit) for unit, _ in profile.counted_units())
    converted_module = max(module if checkpoint.is_converted else 0, 2 * checkpoint.stacking_bytes)
    # the cache of freed weights is emptied before the shards are copied into one buffer (zero/utils.py, defragment)
    engine = (WeightTransfer(kept=partitions.shards(profile, plan)), *_engine_transfers(profile, plan))
    every_rank_host = max(checkpoint.private_bytes, shards_on_host, initialized_host)
    whole = _whole_model_bytes(profile, plan)
    if is_quantized_on_load(profile):
        host = max(shards_on_host, initialized_host)
        return (on_gpu(profile, plan, whole_bytes=whole, gpu_bytes=initialized_gpu, host_bytes=host, transfers=engine),)
    return (
        LoadMethod(
            way="zero_init",
            how="from_pretrained after HfDeepSpeedConfig (zero.Init): modules are sharded as they are built, rank 0 reads the file",
            gpu_bytes=max(shards_on_gpu + module + buffers(profile, plan.compute_bytes).rounded, initialized_gpu),
            first_rank_host_bytes=max(shards_on_host + converted_module, initialized_host),
            other_ranks_host_bytes=max(shards_on_host, initialized_host),
            ranks_per_node=plan.ranks_per_node,
            mapped_bytes=checkpoint.mapped_bytes,
            transfers=engine,
        ),
        LoadMethod(
            way="every_rank",
            how="from_pretrained on every rank without zero.Init, then deepspeed.initialize",
            gpu_bytes=max(whole, initialized_gpu),
            first_rank_host_bytes=every_rank_host,
            other_ranks_host_bytes=every_rank_host,
            ranks_per_node=plan.ranks_per_node,
            mapped_bytes=checkpoint.mapped_bytes,
            transfers=engine,
        ),
    )


def _whole_model_bytes(profile: Profile, plan: Plan) -> int:
    return profile.bytes_of(partial(cast_bytes, plan)) + buffers(profile, plan.compute_bytes).rounded


def _weights(profile: Profile, plan: Plan, left: tuple[Group, ...]) -> Storages:
    """One storage per trainable parameter of the groups, whole."""
    if len(left) < len(groups(profile, plan)):
        return sum(
            (Storages.of(plan.compute_bytes * p.elements) for each in left for p in each.parameters), NO_STORAGES
        )
    return total(
        profile,
        lambda unit: sum(
            (Storages.of(plan.compute_bytes * p.elements) for p in unit.parameters if p.trainable), NO_STORAGES
        ),
    )


def _largest_module_elements(unit: Unit) -> int:
    """Elements of the largest module in `unit`. Counts only a module's own parameters (a Linear's weight and bias)."""
    by_module: defaultdict[str, int] = defaultdict(int)
    for p in unit.parameters:
        by_module[p.name.rpartition(".")[0]] += p.elements
    return max(by_module.values(), default=0)


def _bytes_after_initialize(profile: Profile, plan: Plan) -> tuple[int, int]:
    """GPU and host bytes of a rank when `deepspeed.initialize` returns.

    It allocates all states except the optimizer's moments. Before it allocates the buckets for gradients and communication,
    it also allocates zero gradients for the masters (under stage 3 for one sub-group at a time).
    """
    settings = settings_of(profile, plan)
    states, zeros = partitions.states(profile, plan, settings), _zero_gradient_bytes(profile, plan)
    weights = states.parameters.rounded + states.buffers.rounded
    with_buckets = weights + states.communication.rounded + states.gradients.rounded
    if offloads_optimizer(plan):
        return with_buckets, 2 * zeros
    masters = partitions.optimizer_states(profile, plan, settings).masters.rounded
    return masters + max(weights + zeros, with_buckets), 0


def _engine_transfers(profile: Profile, plan: Plan) -> tuple[WeightTransfer, ...]:
    """The allocations of `deepspeed.initialize` after it has flattened the parameters: the masters, and the zero gradients.

    A master is a clone of a copy in its dtype (stage 3), or a cast of a clone (stages 1, 2). Stage 3 frees a sub-group's copy only after it
    has made the next one, because a variable refers to the copy until then. The zero gradients are freed at
    once. Buckets reuse their memory. Source: zero/stage3.py, _create_fp32_partitions, initialize_optimizer_states;
    zero/stage_1_and_2.py, __init__, initialize_optimizer_states.
    """
    if offloads_optimizer(plan):
        return ()
    c, m = plan.compute_bytes, master_bytes(plan)
    copy_bytes = 0 if m == c else m if stage(plan) == 3 else c
    parts = partitions.flat_partitions(profile, plan, settings_of(profile, plan))
    masters = (
        WeightTransfer(temporaries=Storages.of(copy_bytes * n), kept=Storages.of(m * n), frees_late=number < len(parts))
        for number, n in enumerate(parts, start=1)
    )
    return (*masters, WeightTransfer(temporaries=Storages.of(_zero_gradient_bytes(profile, plan))))


def _zero_gradient_bytes(profile: Profile, plan: Plan) -> int:
    """Bytes of the zero gradients of the masters; under stage 3 those of the largest sub-group."""
    parts = partitions.flat_partitions(profile, plan, settings_of(profile, plan))
    return master_bytes(plan) * (sum(parts) if stage(plan) < 3 else max(parts, default=0))
