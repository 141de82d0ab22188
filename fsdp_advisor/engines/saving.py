"""Saving a checkpoint: which files, how many bytes of tensors in each, and what it takes at its highest on GPU and host.

Read in torch 2.13 (distributed/fsdp/_state_dict_utils.py, distributed/_state_dict_utils.py, distributed/checkpoint),
transformers 5.23 (modeling_utils.save_pretrained) and deepspeed 0.19.8 (runtime/engine.py, runtime/zero); the files were
written and weighed over gloo on the CPU. Bytes are of tensor data: a few hundred bytes of names per tensor come on top.

FSDP saves the masters, so a bf16-mixed checkpoint is in fp32. A state dict that is gathered or sharded by FSDP holds tied weights
once per name; one that shares storage (DDP, DeepSpeed, safetensors) holds them once. N = ranks that share one copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from fsdp_advisor.engines.deepspeed import partitions as deepspeed
from fsdp_advisor.engines.deepspeed.settings import master_bytes, offloads_optimizer, stage
from fsdp_advisor.engines.fsdp1.units import flat_elements
from fsdp_advisor.engines.fsdp2.units import shard_shape
from fsdp_advisor.engines.transfer import Way
from fsdp_advisor.engines.units import per_unit, places
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Parameter, Profile, Unit
from fsdp_advisor.policies.optimizers import optimizer_named
from fsdp_advisor.program.builder import AT_ROOT
from fsdp_advisor.program.storages import round_up

MAX_SHARD_BYTES = 50 * 10**9
"""`save_pretrained(max_shard_size=...)` unless told otherwise. Source: transformers/modeling_utils.py (5.23): "50GB"; 5 GB
before transformers 5."""
DCP_IN_FLIGHT_BYTES = 10_000_000
"""What `dcp.save` copies from the GPU ahead of writing. Source: distributed/checkpoint/filesystem.py, FileSystemWriter,
per_thread_copy_ahead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """`count` files of the same kind. `tensor_bytes` of one, the first rank's, which is the largest."""

    name: str
    count: int
    tensor_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving(Way):
    """One way of saving. `gpu_bytes` come on top of what is kept from step to step."""

    files: tuple[Files, ...]

    @property
    def file_count(self) -> int:
        return sum(f.count for f in self.files)


def textbook_files(parameters: int, ranks: int, element_bytes: int = 4) -> dict[str, tuple[int, int]]:
    """(files, bytes of each) of a bare parameter count: gathered on rank 0, sharded, and whole from every rank.

    Notes on FSDP call the last LOCAL. PyTorch's LOCAL_STATE_DICT writes each rank's flat shard instead, as many bytes as
    SHARDED; every rank writes everything where it saves a full state dict without `rank0_only`.

    >>> textbook_files(7_000_000_000, 4)
    {'full': (1, 28000000000), 'sharded': (4, 7000000000), 'full_on_every_rank': (4, 28000000000)}
    """
    whole = parameters * element_bytes
    return {"full": (1, whole), "sharded": (ranks, -(-whole // ranks)), "full_on_every_rank": (ranks, whole)}


def savings(profile: Profile, plan: Plan, *, optimizer: bool = False) -> tuple[Saving, ...]:
    """Every way that the plan's backend has, the usual one first, with or without the optimizer's state."""
    match plan.backend:
        case "ddp":
            return tuple(_ddp(profile, plan, optimizer))
        case "fsdp1":
            return tuple(_fsdp1(profile, plan, optimizer))
        case "fsdp2":
            return tuple(_fsdp2(profile, plan, optimizer))
        case _:
            return tuple(_deepspeed(profile, plan, optimizer))


def _file(name: str, tensor_bytes: int, count: int = 1) -> tuple[Files, ...]:
    return (Files(name=name, count=count, tensor_bytes=tensor_bytes),)


def _distributed(plan: Plan, shard_bytes: int) -> tuple[Files, ...]:
    """DCP: a file per rank. What replicas hold alike is written once, shared out among them by size.

    Source: distributed/checkpoint/_dedup_save_plans.py, dedup_save_plans; filesystem.py, single_file_per_rank.
    """
    return _file("__{r}_0.distcp", -(-shard_bytes // plan.replica_degree), plan.world_size)


# Sums over parameters


@dataclass(frozen=True, slots=True)
class _Sums:
    """Bytes over all parameters: `once` per tensor, `named` once per name; whole and rank 0's rows of each.

    `states`: the optimizer's of trainable ones. `largest` and `largest_shard`: one parameter's.
    """

    once: int
    named: int
    shard_named: int
    states: int
    shard_states: int
    largest: int
    largest_padded: int
    largest_shard: int


def _sums(profile: Profile, plan: Plan) -> _Sums:
    n, k, optimizer = plan.shard_degree, plan.param_bytes, optimizer_named(plan.optim)
    once = named = shard_named = states = shard_states = largest = padded = largest_shard = 0
    for unit, count in profile.counted_units():
        for p in unit.parameters:
            names, local = 1 + len(p.tied), shard_shape(p.shape, n)
            whole, shard = p.elements * k, prod(local) * k
            once += whole * count
            named += whole * names * count
            shard_named += shard * names * count
            largest, padded, largest_shard = max(largest, whole), max(padded, shard * n), max(largest_shard, shard)
            if p.trainable:
                states += optimizer.saved_bytes(p, p.shape, k) * count
                shard_states += optimizer.state_storages(p, local, k).exact * count
    return _Sums(once, named, shard_named, states, shard_states, largest, padded, largest_shard)


def pretrained_files(
    profile: Profile, element_bytes: int, *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> tuple[int, ...]:
    """Bytes of tensors in each file of `save_pretrained`: filled in the model's order, a tensor never split.

    Source: huggingface_hub, split_state_dict_into_shards_factory.
    """
    if profile.parameters * element_bytes <= max_shard_bytes:
        return (profile.parameters * element_bytes,)
    files, alone, filled = [], [], 0
    for p in profile.in_order():
        n_bytes = p.elements * element_bytes
        if n_bytes > max_shard_bytes:
            alone.append(n_bytes)
            continue
        if filled + n_bytes > max_shard_bytes:
            files.append(filled)
            filled = 0
        filled += n_bytes
    return (*alone, *files, filled) if filled else (*alone, *files)


def _pretrained(profile: Profile, element_bytes: int) -> tuple[Files, ...]:
    sizes = pretrained_files(profile, element_bytes)
    if len(sizes) == 1:
        return _file("model.safetensors", sizes[0])
    return (Files(name="model-0000i-of-0000n.safetensors", count=len(sizes), tensor_bytes=max(sizes)),)


# DDP


def _ddp(profile: Profile, plan: Plan, optimizer: bool) -> Iterator[Saving]:
    """`save_pretrained` brings a file's tensors to the host together, `torch.save` one at a time.

    Source: safetensors/torch.py, save_file, _flatten_as_ptr; torch/serialization.py, _save.
    """
    sums = _sums(profile, plan)
    states = _file("optimizer.pt", sums.states) if optimizer else ()
    written = _pretrained(profile, plan.param_bytes)
    yield Saving.of(
        plan,
        "save_pretrained",
        "rank 0: model.save_pretrained",
        0,
        written[0].tensor_bytes,
        0,
        files=(*written, *states),
    )
    yield Saving.of(
        plan,
        "full",
        "rank 0: torch.save(model.state_dict())",
        0,
        sums.largest,
        0,
        files=(*_file("model.pt", sums.once), *states),
    )


# FSDP1


def _fsdp1(profile: Profile, plan: Plan, optimizer: bool) -> Iterator[Saving]:
    """Full and sharded state dicts gather a unit at a time in the masters' dtype; the root stays whole while its layers are.

    FULL with `offload_to_cpu` moves each gathered unit to the host before its tensors are cloned there. SHARDED leaves the root
    on the GPU and clones each rank's rows. LOCAL is the flat shard itself. Optimizer states are gathered unit by unit.
    Source: fsdp/_state_dict_utils.py, _common_unshard_pre_state_dict_hook, _full_post_state_dict_hook,
    _sharded_post_state_dict_hook, _local_post_state_dict_hook; _optim_utils.py, _allgather_orig_param_states.
    """
    sums, n, k = _sums(profile, plan), plan.shard_degree, plan.param_bytes

    def flat(unit: Unit) -> int:
        return flat_elements([p.elements for p in unit.parameters], plan.compute_bytes, n) * k

    whole = per_unit(profile, flat)
    root = whole[AT_ROOT]
    layer = max((n_bytes for place, n_bytes in whole.items() if place != AT_ROOT), default=0)
    unit = max(root, layer)
    flat_states = _flat_states(profile, plan) if optimizer else 0
    gathered = (1 + n) * unit // n if optimizer else 0
    states = _file("optimizer.bin", sums.states) if optimizer else ()
    yield Saving.of(
        plan,
        "full",
        "FULL_STATE_DICT with offload_to_cpu and rank0_only",
        max(unit, gathered),
        max(sums.named + unit, sums.states if optimizer else 0),
        0,
        files=(*_file("pytorch_model_fsdp.bin", sums.named), *states),
    )
    yield Saving.of(
        plan,
        "full_on_every_rank",
        "FULL_STATE_DICT without rank0_only: every rank gathers and writes everything",
        max(unit, gathered),
        max(sums.named + unit, sums.states if optimizer else 0),
        files=_file("model_rank{r}.bin", sums.named, plan.world_size)
        + (_file("optimizer_rank{r}.bin", sums.states, plan.world_size) if optimizer else ()),
    )
    root_rows = sum(prod(shard_shape(p.shape, n)) * k * (1 + len(p.tied)) for p in profile.root.parameters)
    shard_states = sums.shard_states if optimizer else 0
    yield Saving.of(
        plan,
        "sharded",
        "SHARDED_STATE_DICT, written by torch.distributed.checkpoint",
        max(root + sums.shard_named, root + layer + sums.shard_named - root_rows, gathered + shard_states),
        DCP_IN_FLIGHT_BYTES + sums.largest_shard,
        files=_distributed(plan, sums.shard_named + shard_states),
    )
    total = sum(whole[place] // n * count for place, _, count in places(profile))
    yield Saving.of(
        plan,
        "local",
        "LOCAL_STATE_DICT: each rank's flat shard, which only the same number of ranks can load",
        0,
        unit // n,
        files=_file("model_rank{r}.bin", total + flat_states, plan.world_size),
    )


def _flat_states(profile: Profile, plan: Plan) -> int:
    """The optimizer's states of rank 0's flat shards: those of its parameters' pieces, together as many elements."""
    kept, optimizer = 0, optimizer_named(plan.optim)
    for unit, count in profile.counted_units():
        flat = Parameter(name="_flat_param", shape=(-(-unit.trainable_elements // plan.shard_degree),))
        kept += optimizer.saved_bytes(flat, flat.shape, plan.param_bytes) * count
    return kept


# FSDP2


def _fsdp2(profile: Profile, plan: Plan, optimizer: bool) -> Iterator[Saving]:
    """DCP writes each rank's rows as they are. A full state dict gathers one parameter at a time, padded to the ranks.

    With `cpu_offload` rank 0 moves it to the host and the others drop it; without, every rank keeps them all on the GPU.
    Source: distributed/_state_dict_utils.py, _gather_state_dict, _iterate_state_dict; distributed/checkpoint/filesystem.py.
    """
    sums = _sums(profile, plan)
    offload = plan.offload == "parameters"
    shard_states = sums.shard_states if optimizer else 0
    yield Saving.of(
        plan,
        "sharded",
        "torch.distributed.checkpoint.save of get_model_state_dict",
        0,
        sums.largest_shard if offload else DCP_IN_FLIGHT_BYTES + sums.largest_shard,
        files=_distributed(plan, sums.shard_named + shard_states),
    )
    states = _file("optimizer.pt", sums.states) if optimizer else ()
    files = (*_file("model.pt", sums.named), *states)
    yield Saving.of(
        plan,
        "full",
        "get_model_state_dict(full_state_dict=True, cpu_offload=True), torch.save on rank 0",
        round_up(sums.largest_padded),
        max(sums.named, sums.states if optimizer else 0),
        0,
        files=files,
    )
    yield Saving.of(
        plan,
        "full_on_gpu",
        "get_model_state_dict(full_state_dict=True) without cpu_offload, torch.save on rank 0",
        max(sums.named, sums.states if optimizer else 0) + round_up(sums.largest_padded),
        sums.largest,
        0,
        files=files,
    )


# DeepSpeed


def _deepspeed(profile: Profile, plan: Plan, optimizer: bool) -> Iterator[Saving]:
    """`save_checkpoint` always writes the optimizer's masters and states; the weights alone need `save_16bit_model`.

    Stages 1, 2: rank 0 writes the weights. Stage 3: they are in the masters, and each rank's model file holds frozen shards and
    buffers only. Files are written one storage at a time. `stage3_gather_16bit_weights_on_model_save` gathers a module at a time.
    Source: runtime/engine.py, save_checkpoint, _save_zero_checkpoint, _zero3_consolidated_16bit_state_dict.
    """
    n, c, m = plan.shard_degree, plan.compute_bytes, master_bytes(plan)
    weights, sharded = c * profile.parameters, stage(plan) == 3
    prefix = "" if plan.precision in ("fp32", "fp16-mixed") else "bf16_"
    if sharded:
        parts = [elements for elements, _ in deepspeed.sub_groups(profile, n)]
    else:
        owned = deepspeed.flat_elements(profile.trainable_parameters, n) // n
        parts = [min(owned, profile.trainable_parameters)]  # the padding at the last rank's end is not written
    stepping = optimizer_named(plan.optim)
    states = sum(m * part + stepping.saved_flat_bytes(part, m) for part in parts)
    optimizer_file = _file(prefix + "zero_pp_rank_{r}_mp_rank_00_optim_states.pt", states, n)
    frozen = [
        (p.elements, count) for unit, count in profile.counted_units() for p in unit.parameters if not p.trainable
    ]
    if sharded:
        fragments = sum(c * deepspeed.shard_elements(elements, n) * count for elements, count in frozen)
        model_file = _file("zero_pp_rank_{r}_mp_rank_00_model_states.pt", fragments, n)
    else:
        model_file = _file("mp_rank_00_model_states.pt", weights)
    one_storage = m * max(parts, default=0)
    offloaded = offloads_optimizer(plan)
    checkpoint = Saving.of(
        plan,
        "save_checkpoint",
        "engine.save_checkpoint",
        0,
        max(0 if offloaded else one_storage, 0 if sharded else weights),
        0 if offloaded else one_storage,
        files=(*model_file, *optimizer_file),
    )
    if not sharded:
        written = _pretrained(profile, c)
        only = Saving.of(
            plan, "save_pretrained", "rank 0: model.save_pretrained", 0, written[0].tensor_bytes, 0, files=written
        )
    else:
        largest = c * max(p.elements for unit, _ in profile.counted_units() for p in unit.parameters)
        only = Saving.of(
            plan,
            "gathered_16bit",
            "stage3_gather_16bit_weights_on_model_save, then engine.save_16bit_model",
            round_up(largest),
            weights,
            0,
            files=_file("pytorch_model.bin", weights),
        )
    yield from (checkpoint, only) if optimizer else (only, checkpoint)
