"""Getting the weights onto the GPUs: what each way of loading takes at its highest, on the GPU and on the host.

Read in transformers 5.23 (modeling_utils, core_model_loading), accelerate 1.15 (utils/fsdp_utils.py), torch 2.13
(distributed/fsdp, distributed/_state_dict_utils.py, distributed/checkpoint) and deepspeed 0.19.8; host bytes and those on the
CPU backend were run over gloo, copies to a GPU were not.

A checkpoint in safetensors is mapped into memory. Weights that keep its dtype stay views of the file: page cache, which the
ranks of a node share and the kernel can drop. Weights that are converted (a bf16 checkpoint trained with fp32 masters) are
memory of each process's own. N = ranks that share one copy; K = bytes per element of the weights as they are loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from fsdp_advisor.memory import deepspeed
from fsdp_advisor.memory.held import NOTHING, Held, round_up
from fsdp_advisor.memory.schedules.fsdp1 import flat_elements
from fsdp_advisor.memory.schedules.fsdp2 import shard_shape
from fsdp_advisor.memory.schedules.units import buffers, per_unit, places
from fsdp_advisor.models.profile import Profile, Unit
from fsdp_advisor.plan import Plan

WORKERS = 4
"""Threads that read and convert tensors. Source: transformers/core_model_loading.py, GLOBAL_WORKERS."""
BROADCAST_BUCKET_BYTES = 250 * 2**20
"""Source: torch/nn/parallel/distributed.py, broadcast_bucket_size; at most two are on their way at once."""
CHECKPOINT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """One way of loading, at its highest. `gpu_bytes` of one rank; host bytes are private memory of a process, by rank.

    `mapped_bytes`: pages of the checkpoint's file, once per node, which the kernel drops when memory is short; None where the
    checkpoint's dtype is unknown. `how` says what to write.
    """

    way: str
    how: str
    gpu_bytes: int
    first_rank_host_bytes: int
    other_ranks_host_bytes: int
    ranks_per_node: int
    mapped_bytes: int | None = None

    @property
    def host_bytes_per_node(self) -> int:
        """Of the node that holds rank 0."""
        return self.first_rank_host_bytes + (self.ranks_per_node - 1) * self.other_ranks_host_bytes


def loaded_element_bytes(plan: Plan) -> int:
    """K: what `from_pretrained(dtype=...)` is told. FSDP and DDP keep the masters; DeepSpeed the compute dtype."""
    return plan.compute_bytes if plan.backend == "deepspeed" else plan.param_bytes


def one_copy_bytes(profile: Profile, plan: Plan) -> int:
    """The whole model once, as it is loaded."""
    return profile.parameters * loaded_element_bytes(plan)


def checkpoint_element_bytes(profile: Profile) -> int | None:
    """Bytes per element of the checkpoint, where the model's configuration says so."""
    dtype = profile.config.get("dtype") or profile.config.get("torch_dtype")
    return CHECKPOINT_BYTES.get(str(dtype).removeprefix("torch."))


def loadings(profile: Profile, plan: Plan, *, gpu_memory_bytes: int | None = None) -> tuple[Loading, ...]:
    """Every way that the plan's backend has, the one with the least to set up first.

    `gpu_memory_bytes` decides where DeepSpeed flattens the weights. A checkpoint whose dtype is unknown is taken to be converted.
    """
    match plan.backend:
        case "ddp":
            return tuple(_ddp(profile, plan))
        case "fsdp1":
            return tuple(_fsdp1(profile, plan))
        case "fsdp2":
            return tuple(_fsdp2(profile, plan))
        case _:
            return tuple(_deepspeed(profile, plan, gpu_memory_bytes))


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


@dataclass(frozen=True, slots=True)
class _Weights:
    """The host's side: a private copy of the whole model, or none where the file's pages serve."""

    copy: int
    mapped: int | None

    @classmethod
    def of(cls, profile: Profile, plan: Plan) -> _Weights:
        kept, stored = loaded_element_bytes(plan), checkpoint_element_bytes(profile)
        mapped = None if stored is None else stored * profile.parameters
        return cls(0 if kept == stored else kept * profile.parameters, mapped)


def _loading(
    plan: Plan, way: str, how: str, gpu: int, first: int, others: int | None = None, mapped: int | None = None
) -> Loading:
    return Loading(
        way=way,
        how=how,
        gpu_bytes=gpu,
        first_rank_host_bytes=first,
        other_ranks_host_bytes=first if others is None else others,
        ranks_per_node=plan.ranks_per_node,
        mapped_bytes=mapped,
    )


# DDP


def _ddp(profile: Profile, plan: Plan) -> Iterator[Loading]:
    """The model, then DDP's buckets beside it (the gradients' second copy), or the buckets it broadcasts from rank 0.

    Source: torch/nn/parallel/distributed.py, _sync_module_states, _ddp_init_helper; reducer.cpp, initialize_buckets.
    """
    weights = _Weights.of(profile, plan)
    held, largest, trainable = NOTHING, 0, 0
    for unit, count in profile.counted_units():
        for p in unit.parameters:
            held += Held.of(p.elements * plan.param_bytes, count)
            largest = max(largest, p.elements * plan.param_bytes)
            trainable += p.elements * plan.param_bytes * count if p.trainable else 0
    sent = min(held.exact, 2 * (BROADCAST_BUCKET_BYTES + largest))
    gpu = held.rounded + buffers(profile).rounded + (max(trainable, sent) if plan.world_size > 1 else 0)
    yield _loading(
        plan, "every_rank", "from_pretrained on every rank, then .to(device)", gpu, weights.copy, mapped=weights.mapped
    )
    straight = WORKERS * largest if weights.copy else 0
    yield _loading(
        plan,
        "device_map",
        'from_pretrained(device_map={"": local_rank}): each tensor goes straight to the GPU',
        gpu,
        min(straight, weights.copy),
        mapped=weights.mapped,
    )


# FSDP1


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """A unit being wrapped: whole on its own parameters, whole again (FSDP1's flat parameter), and its shard."""

    whole: int
    flat: int
    shard: int


def _in_wrap_order(profile: Profile, by_place: dict[int, _Wrapped]) -> Iterator[_Wrapped]:
    """Layers as they stand in the model, the root last."""
    for layer in profile.layers():
        yield by_place[id(layer)]
    yield by_place[id(profile.root)]


def _wrap_peak(profile: Profile, by_place: dict[int, _Wrapped]) -> int:
    """The highest point of wrapping unit after unit: shards so far, and one unit whole (and flat) beside its shard."""
    shards = high = 0
    for unit in _in_wrap_order(profile, by_place):
        high = max(high, shards + unit.whole + unit.flat + unit.shard)
        shards += unit.shard
    return high


def _fsdp1(profile: Profile, plan: Plan) -> Iterator[Loading]:
    """`FSDP(model)` flattens a unit with `torch.cat` beside its parameters and clones its shard beside both.

    Source: fsdp/_init_utils.py, _init_param_handle_from_module; fsdp/_flat_param.py, flatten_tensors, shard.
    """
    n, k, weights = plan.shard_degree, plan.param_bytes, _Weights.of(profile, plan)
    offload = plan.offload == "parameters"

    def measure(unit: Unit) -> _Wrapped:
        whole = sum(round_up(p.elements * k) for p in unit.parameters)
        flat = flat_elements([p.elements for p in unit.parameters], plan.compute_bytes, n) * k
        return _Wrapped(whole, round_up(flat), round_up(flat // n))

    units = _by_unit(profile, measure)
    gpu = _wrap_peak(profile, units) + buffers(profile).rounded
    shards = sum(unit.shard for unit in _in_wrap_order(profile, units))
    if offload:  # each shard goes to the host as soon as it is made
        gpu = max(u.whole + u.flat + u.shard for u in units.values()) + buffers(profile).rounded
    kept = shards if offload else 0
    yield _loading(
        plan,
        "every_rank",
        "from_pretrained on every rank; FSDP(model, device_id=...) moves one unit at a time",
        gpu,
        max(weights.copy, kept),
        mapped=weights.mapped,
    )
    yield _loading(
        plan,
        "rank0",
        "rank 0 alone loads, the others build on the meta device; FSDP(model, device_id=..., sync_module_states=True, "
        "param_init_fn=lambda m: m.to_empty(device=..., recurse=False))",
        gpu,
        max(weights.copy, kept),
        kept,
        mapped=weights.mapped,
    )
    yield _cpu_ram_efficient(plan, gpu, weights, kept)
    remaining, made, host = weights.copy, 0, 0
    for unit in _in_wrap_order(profile, units):
        host = max(host, remaining + made + unit.flat + unit.shard)
        remaining, made = max(0, remaining - unit.whole), made + unit.shard
    yield _loading(
        plan,
        "every_rank_without_device_id",
        "from_pretrained on every rank; FSDP(model) without device_id shards on the CPU, then .to(device)",
        (0 if offload else shards) + buffers(profile).rounded,
        host,
        mapped=weights.mapped,
    )


def _cpu_ram_efficient(plan: Plan, gpu: int, weights: _Weights, kept: int) -> Loading:
    """accelerate's flag, which transformers 5 does not honour: every rank's from_pretrained loads all the same.

    Source: transformers/modeling_utils.py, _load_pretrained_model (5.23); huggingface/transformers#43749. Run: both ranks of
    two held the whole converted model.
    """
    return _loading(
        plan,
        "cpu_ram_efficient_loading",
        "fsdp_cpu_ram_efficient_loading: true (with transformers 5 every rank still loads a copy)",
        gpu,
        max(weights.copy, kept),
        mapped=weights.mapped,
    )


# FSDP2


def _fsdp2(profile: Profile, plan: Plan) -> Iterator[Loading]:
    """`fully_shard` moves a unit to the GPU and copies its shards out; a full state dict comes one tensor at a time.

    Source: fsdp/_fully_shard/_fsdp_init.py, _move_states_to_device; _fsdp_param.py, _init_sharded_param;
    distributed/_state_dict_utils.py, _broadcast_state_dict; accelerate/utils/fsdp_utils.py, fsdp2_load_full_state_dict.
    """
    n, k, weights = plan.shard_degree, plan.param_bytes, _Weights.of(profile, plan)
    offload = plan.offload == "parameters"

    def shard(shape: tuple[int, ...]) -> int:
        return round_up(prod(shard_shape(shape, n)) * k)

    def measure(unit: Unit) -> _Wrapped:
        whole = sum(round_up(p.elements * k) for p in unit.parameters)
        return _Wrapped(whole, 0, sum(shard(p.shape) for p in unit.parameters))

    units = _by_unit(profile, measure)
    held = buffers(profile).rounded
    shards = sum(unit.shard for unit in _in_wrap_order(profile, units))
    parameters = [p for unit, _ in profile.counted_units() for p in unit.parameters]
    largest = max(round_up(p.elements * k) for p in parameters)
    largest_shard = max(shard(p.shape) for p in parameters)
    kept, on_gpu = (shards, 0) if offload else (0, shards)
    moved = max(u.whole + u.shard for u in units.values()) if offload else _wrap_peak(profile, units)
    yield _loading(
        plan,
        "every_rank",
        "from_pretrained on every rank; fully_shard moves one unit at a time",
        moved + held,
        max(weights.copy, kept),
        mapped=weights.mapped,
    )
    yield _loading(
        plan,
        "sharded",
        "build on the meta device, fully_shard, to_empty; dcp.load with HuggingFaceStorageReader: each rank reads its own rows",
        on_gpu + held,
        kept + (largest_shard if weights.copy and not offload else 0),
        mapped=weights.mapped,
    )
    yield _loading(
        plan,
        "rank0",
        "rank 0 alone loads, all build on the meta device, fully_shard, to_empty; "
        "set_model_state_dict(full_state_dict=True, broadcast_from_rank0=True)",
        on_gpu + largest + held,
        weights.copy + kept + (largest if offload else 0),
        kept + (largest if offload else 0),
        mapped=weights.mapped,
    )
    yield _cpu_ram_efficient(plan, on_gpu + largest + 2 * largest_shard + held, weights, kept)


def _by_unit(profile: Profile, measure: Callable[[Unit], _Wrapped]) -> dict[int, _Wrapped]:
    """By the unit's identity, since that is how `Profile.layers` gives them."""
    measured = per_unit(profile, measure)
    return {id(unit): measured[place] for place, unit, _ in places(profile)}


# DeepSpeed


def _deepspeed(profile: Profile, plan: Plan, gpu_memory_bytes: int | None) -> Iterator[Loading]:
    """Without zero.Init `deepspeed.initialize` moves the whole model to the GPU, ZeRO-3's too, and shards it there.

    Stages 1, 2 then flatten it: on the GPU if a second copy has room, else in host memory. The optimizer's masters follow, with
    a gradient of zeros for each; its moments are made in the first step.
    Source: runtime/engine.py, _configure_distributed_model; zero/stage_1_and_2.py, __init__; zero/partition_parameters.py,
    Init; transformers/integrations/deepspeed.py, _load_state_dict_into_zero3_model.
    """
    c, weights = plan.compute_bytes, _Weights.of(profile, plan)
    whole = c * profile.parameters + buffers(profile).rounded
    ready, host = _deepspeed_ready(profile, plan)
    if deepspeed.stage(plan) < 3:
        flat = c * deepspeed.flat_elements(profile.trainable_parameters, plan.shard_degree)
        on_gpu = gpu_memory_bytes is None or whole + flat <= gpu_memory_bytes
        yield _loading(
            plan,
            "every_rank",
            "from_pretrained on every rank, then deepspeed.initialize",
            max(whole + (flat if on_gpu else 0), ready),
            max(weights.copy, host, 0 if on_gpu else c * profile.parameters + flat),
            mapped=weights.mapped,
        )
        return
    kept = sum(
        round_up(c * deepspeed.shard_elements(p.elements, plan.shard_degree)) * n
        for unit, n in profile.counted_units()
        for p in unit.parameters
    )
    on_gpu_shards, on_host = (0, kept) if deepspeed.offloads_parameters(plan) else (kept, 0)
    module = c * max(_modules(unit) for unit, _ in profile.counted_units())
    yield _loading(
        plan,
        "zero_init",
        "from_pretrained after HfDeepSpeedConfig (zero.Init): modules are sharded as they are built, rank 0 reads the file",
        max(on_gpu_shards + module + buffers(profile).rounded, ready),
        max(on_host + (module if weights.copy else 0), host),
        max(on_host, host),
        mapped=weights.mapped,
    )
    yield _loading(
        plan,
        "every_rank",
        "from_pretrained on every rank without zero.Init, then deepspeed.initialize",
        max(whole, ready),
        max(weights.copy, on_host, host),
        mapped=weights.mapped,
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
    m, ranks = deepspeed.master_bytes(plan), plan.shard_degree
    if deepspeed.stage(plan) < 3:
        zeros = m * deepspeed.flat_elements(profile.trainable_parameters, ranks) // ranks
    else:
        zeros = m * max((n for n, _ in deepspeed.sub_groups(profile, ranks)), default=0)
    gpu = sum(h.rounded for h in (states.parameters, states.buffers, states.communication, states.gradients))
    if deepspeed.offloads_optimizer(plan):
        return gpu, 2 * zeros
    before_buckets = states.parameters.rounded + states.buffers.rounded + states.optimizer.rounded - moments + zeros
    return max(before_buckets, gpu + states.optimizer.rounded - moments), 0


def deepspeed_moments(profile: Profile, plan: Plan) -> int:
    """Bytes on the GPU of the optimizer's own state, which the first step makes. The masters are there from the start.

    Source: zero/stage_1_and_2.py and zero/stage3.py, initialize_optimizer_states (0.19.8).
    """
    if deepspeed.offloads_optimizer(plan):
        return 0
    m, ranks = deepspeed.master_bytes(plan), plan.shard_degree
    if deepspeed.stage(plan) < 3:
        owned = deepspeed.flat_elements(profile.trainable_parameters, ranks) // ranks
        return deepspeed.optimizer_states(plan.optim, owned, m).rounded
    return sum(deepspeed.optimizer_states(plan.optim, n, m).rounded for n, _ in deepspeed.sub_groups(profile, ranks))
