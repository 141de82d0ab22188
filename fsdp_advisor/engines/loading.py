"""Getting the weights onto the GPUs: what each way of loading takes at its highest, on the GPU and on the host.

Read in transformers 5.23 (modeling_utils, core_model_loading), accelerate 1.15 (utils/fsdp_utils.py), torch 2.13
(distributed/fsdp, distributed/_state_dict_utils.py, distributed/checkpoint) and deepspeed 0.19.8; host bytes and those on the
CPU backend were run over gloo, copies to a GPU were not.

A checkpoint in safetensors is mapped into memory. Weights that keep its dtype stay views of the file: page cache, which the
ranks of a node share and the kernel can drop. Weights that are converted (a bf16 checkpoint trained with fp32 masters) are
memory of each process's own. N = ranks that share one copy; K = bytes per element of the weights as they are loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from fsdp_advisor.engines.deepspeed import partitions as deepspeed
from fsdp_advisor.engines.deepspeed.settings import master_bytes, offloads_optimizer, offloads_parameters, stage
from fsdp_advisor.engines.fsdp_loading import fsdp1_loadings, fsdp2_loadings
from fsdp_advisor.engines.transfer import Loading, Placed, Weights
from fsdp_advisor.engines.units import buffers, total
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile, Unit
from fsdp_advisor.policies.optimizers import optimizer_named
from fsdp_advisor.program.storages import NO_STORAGES, Storages, round_up

WORKERS = 4
"""Threads that read and convert tensors. Source: transformers/core_model_loading.py, GLOBAL_WORKERS."""
BROADCAST_BUCKET_BYTES = 250 * 2**20
"""Source: torch/nn/parallel/distributed.py, broadcast_bucket_size; at most two are on their way at once."""


def loadings(profile: Profile, plan: Plan, *, on_gpu: bool = True) -> tuple[Loading, ...]:
    """Every way that the plan's backend has, the one with the least to set up first.

    `on_gpu` is `flattens_on_gpu`. A checkpoint whose dtype is unknown is taken to be converted.
    """
    match plan.backend:
        case "ddp":
            return tuple(_ddp(profile, plan))
        case "fsdp1":
            return tuple(fsdp1_loadings(profile, plan))
        case "fsdp2":
            return tuple(fsdp2_loadings(profile, plan))
        case _:
            return tuple(_deepspeed(profile, plan, on_gpu))


def advised(
    ways: tuple[Loading, ...], *, gpu_memory_bytes: int | None = None, host_memory_bytes: int | None = None
) -> Loading:
    """The first way that fits the GPU and the node; where the node's memory is unknown, the one that takes least of it.

    Where none fits, the one that comes nearest.
    """
    able = [way for way in ways if gpu_memory_bytes is None or way.gpu_bytes <= gpu_memory_bytes]
    if not able:
        return min(ways, key=lambda way: way.gpu_bytes)
    if host_memory_bytes is not None:
        for way in able:
            if way.host_bytes_per_node <= host_memory_bytes:
                return way
    return min(able, key=lambda way: way.host_bytes_per_node)


# DDP


def _ddp(profile: Profile, plan: Plan) -> Iterator[Loading]:
    """The model, then DDP's buckets beside it (the gradients' second copy), or the buckets it broadcasts from rank 0.

    Source: torch/nn/parallel/distributed.py, _sync_module_states, _ddp_init_helper; reducer.cpp, initialize_buckets.
    """
    weights = Weights.of(profile, plan)
    held, largest, trainable = NO_STORAGES, 0, 0
    for unit, count in profile.counted_units():
        for p in unit.parameters:
            held += Storages.of(p.elements * plan.param_bytes, count)
            largest = max(largest, p.elements * plan.param_bytes)
            trainable += p.elements * plan.param_bytes * count if p.trainable else 0
    sent = min(held.exact, 2 * (BROADCAST_BUCKET_BYTES + largest))
    gpu = held.rounded + buffers(profile).rounded + (max(trainable, sent) if plan.world_size > 1 else 0)
    yield Loading.of(
        plan,
        "every_rank",
        "from_pretrained on every rank, then .to(device)",
        gpu,
        weights.copy,
        mapped_bytes=weights.mapped,
    )
    straight = WORKERS * largest if weights.copy else 0
    yield Loading.of(
        plan,
        "device_map",
        'from_pretrained(device_map={"": local_rank}): each tensor goes straight to the GPU',
        gpu,
        min(straight, weights.copy),
        mapped_bytes=weights.mapped,
    )


# DeepSpeed


def flattens_on_gpu(profile: Profile, plan: Plan, gpu_memory_bytes: int) -> bool:
    """Whether DeepSpeed's stages 1 and 2 flatten the weights on the GPU: where a second copy has room. Nothing else flattens any."""
    if plan.backend != "deepspeed" or stage(plan) == 3:
        return True
    return _whole_bytes(profile, plan) + _flat_bytes(profile, plan) <= gpu_memory_bytes


def _whole_bytes(profile: Profile, plan: Plan) -> int:
    return plan.compute_bytes * profile.parameters + buffers(profile).rounded


def _flat_bytes(profile: Profile, plan: Plan) -> int:
    return plan.compute_bytes * deepspeed.flat_elements(profile.trainable_parameters, plan.shard_degree)


def _deepspeed(profile: Profile, plan: Plan, on_gpu: bool) -> Iterator[Loading]:
    """Without zero.Init `deepspeed.initialize` moves the whole model to the GPU, ZeRO-3's too, and shards it there.

    Stages 1, 2 then flatten it: on the GPU if a second copy has room, else in host memory. The optimizer's masters follow, with
    a gradient of zeros for each; its moments are made in the first step. What was moved and freed stays cached, as a log of
    stage 3 shows (deepspeedai/DeepSpeed#4528: 13.01 GB cached, 0.31 in use).
    Source: runtime/engine.py, _configure_distributed_model; zero/stage_1_and_2.py, __init__; zero/partition_parameters.py,
    Init; transformers/integrations/deepspeed.py, _load_state_dict_into_zero3_model.
    """
    c, weights = plan.compute_bytes, Weights.of(profile, plan)
    whole = _whole_bytes(profile, plan)
    passing = total(
        profile, lambda u: sum((Storages.of(c * p.elements) for p in u.parameters if p.trainable), NO_STORAGES)
    )
    ready, host = _deepspeed_ready(profile, plan)
    if stage(plan) < 3:
        flat = _flat_bytes(profile, plan)
        yield Loading.of(
            plan,
            "every_rank",
            "from_pretrained on every rank, then deepspeed.initialize",
            max(whole + (flat if on_gpu else 0), ready),
            max(weights.copy, host, 0 if on_gpu else c * profile.parameters + flat),
            mapped_bytes=weights.mapped,
            placed=((Placed(passing=passing, kept=Storages.of(flat)),),) if on_gpu else (),
        )
        return
    kept = sum(
        round_up(c * deepspeed.shard_elements(p.elements, plan.shard_degree)) * n
        for unit, n in profile.counted_units()
        for p in unit.parameters
    )
    on_gpu_shards, on_host = (0, kept) if offloads_parameters(plan) else (kept, 0)
    module = c * max(_modules(unit) for unit, _ in profile.counted_units())
    yield Loading.of(
        plan,
        "zero_init",
        "from_pretrained after HfDeepSpeedConfig (zero.Init): modules are sharded as they are built, rank 0 reads the file",
        max(on_gpu_shards + module + buffers(profile).rounded, ready),
        max(on_host + (module if weights.copy else 0), host),
        max(on_host, host),
        mapped_bytes=weights.mapped,
    )
    yield Loading.of(
        plan,
        "every_rank",
        "from_pretrained on every rank without zero.Init, then deepspeed.initialize",
        max(whole, ready),
        max(weights.copy, on_host, host),
        mapped_bytes=weights.mapped,
        placed=((Placed(passing=passing),),),
    )


def _modules(unit: Unit) -> int:
    """Elements of the module in `unit` that has most of its own (a Linear's weight and bias)."""
    by_module: dict[str, int] = {}
    for p in unit.parameters:
        module = p.name.rpartition(".")[0]
        by_module[module] = by_module.get(module, 0) + p.elements
    return max(by_module.values(), default=0)


@lru_cache(maxsize=512)
def _deepspeed_ready(profile: Profile, plan: Plan) -> tuple[int, int]:
    """GPU and host bytes of a rank when `deepspeed.initialize` ends: all but the optimizer's moments, and zeros once."""
    states, moments = deepspeed.states(profile, plan), deepspeed_moments(profile, plan)
    m, ranks = master_bytes(plan), plan.shard_degree
    if stage(plan) < 3:
        zeros = m * deepspeed.flat_elements(profile.trainable_parameters, ranks) // ranks
    else:
        zeros = m * max((n for n, _ in deepspeed.sub_groups(profile, ranks)), default=0)
    gpu = sum(h.rounded for h in (states.parameters, states.buffers, states.communication, states.gradients))
    if offloads_optimizer(plan):
        return gpu, 2 * zeros
    before_buckets = states.parameters.rounded + states.buffers.rounded + states.optimizer.rounded - moments + zeros
    return max(before_buckets, gpu + states.optimizer.rounded - moments), 0


def deepspeed_moments(profile: Profile, plan: Plan) -> int:
    """Bytes on the GPU of the optimizer's own state, which the first step makes. The masters are there from the start.

    Source: zero/stage_1_and_2.py and zero/stage3.py, initialize_optimizer_states (0.19.8).
    """
    if offloads_optimizer(plan):
        return 0
    m, ranks, optimizer = master_bytes(plan), plan.shard_degree, optimizer_named(plan.optim)
    if stage(plan) < 3:
        owned = deepspeed.flat_elements(profile.trainable_parameters, ranks) // ranks
        return optimizer.flat_state_storages(owned, m).rounded
    return sum(optimizer.flat_state_storages(n, m).rounded for n, _ in deepspeed.sub_groups(profile, ranks))
