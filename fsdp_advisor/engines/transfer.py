"""The types of load and save methods, and sums of bytes that several engines need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdp_advisor.job.choices import StateDictType
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.experts import are_copied
from fsdp_advisor.model.profile import Parameter, Profile
from fsdp_advisor.policies.dtypes import ITEM_BYTES
from fsdp_advisor.program.storages import WeightTransfer

MAX_SHARD_BYTES = 50 * 10**9
"""Largest file of `save_pretrained` by default (`max_shard_size`). Source: transformers/modeling_utils.py (5.23): "50GB"; 5 GB before
transformers 5.
"""
CPU_RAM_EFFICIENT_LOADING = "fsdp_cpu_ram_efficient_loading: true (with transformers 5 every rank still loads a copy)"
"""The line that sets accelerate's flag. transformers 5 ignores the flag: `from_pretrained` loads a copy on every rank. In a real
run with two ranks, both had the whole converted model.
Source: transformers/modeling_utils.py, _load_pretrained_model (5.23); huggingface/transformers#43749.
"""

MOST_KEPT_BYTES = 32 * 2**20
"""The largest freed block that glibc's malloc keeps for the process. Source: malloc.c, DEFAULT_MMAP_THRESHOLD_MAX."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferMethod:
    """One method of loading or saving, and its peaks in bytes.

    `way` is the method's name, `how` the code or setting that selects it. `gpu_bytes` are tensors on one rank's GPU. Host bytes
    are private memory of one process: rank 0, or any other rank.
    """

    way: str
    how: str
    gpu_bytes: int
    first_rank_host_bytes: int
    other_ranks_host_bytes: int
    ranks_per_node: int

    @property
    def host_bytes_per_node(self) -> int:
        """Host memory of the node that runs rank 0."""
        return self.first_rank_host_bytes + (self.ranks_per_node - 1) * self.other_ranks_host_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadMethod(TransferMethod):
    """One method of loading.

    `mapped_bytes`: pages of the checkpoint's file, counted once per node; the kernel drops them when memory is short. None if
    the checkpoint's dtype is unknown. `transfers`: the allocations on rank 0's GPU, in order. Empty if loading frees nothing
    there, or if they are not modelled (DDP's broadcast, the modules of zero.Init). `is_of_script`: whether exported scripts load so.
    """

    mapped_bytes: int | None
    is_of_script: bool = False
    transfers: tuple[WeightTransfer, ...] = field(default=(), compare=False, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """`count` files of one kind. `tensor_bytes`: tensor data in the largest file, which is rank 0's.

    Not counted: metadata, a few hundred bytes per tensor.
    """

    name: str
    count: int = 1
    tensor_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveMethod(TransferMethod):
    """One method of saving. `gpu_bytes` come in addition to the states that a rank keeps between steps. `state_dict_type`: FSDP's; None for
    other engines.
    """

    files: tuple[Files, ...]
    state_dict_type: StateDictType | None = None


class LoadedCheckpoint(NamedTuple):
    """Host memory of one process that loads a whole checkpoint in safetensors and adds its adapters.

    `kept_bytes`: private memory after loading (`private_bytes`). `private_bytes`: its peak while experts are stacked. `mapped_bytes`: the
    file, whose page cache all ranks of a node share. None if the checkpoint's dtype is unknown; the weights then count as converted.
    `is_converted`: whether the weights are loaded in another dtype. `stacking_bytes`: the largest weight of stacked experts.
    """

    kept_bytes: int
    private_bytes: int
    mapped_bytes: int | None
    is_converted: bool
    stacking_bytes: int

    @classmethod
    def of(cls, profile: Profile, plan: Plan) -> LoadedCheckpoint:
        """Host memory for loading the base model's checkpoint in the plan's dtype.

        The experts' gate and up projections are stacked each, then concatenated, so their weight of one layer is there twice. Experts that
        are converted too are read ahead, and malloc keeps the freed memory of each one of at most `MOST_KEPT_BYTES`.
        Source: transformers/core_model_loading.py (5.23), Concatenate, spawn_materialize; glibc, malloc.c, DEFAULT_MMAP_THRESHOLD_MAX.
        """
        stored = profile.checkpoint_dtype
        kept = sum(private_bytes(profile, plan, p) * count for p, count in profile.counted_parameters())
        copied = [(p, count) for p, count in profile.counted_parameters() if are_copied(profile, p)]
        element = ITEM_BYTES[plan.loaded_dtype]
        stacking = max((element * p.elements for p, _ in copied), default=0)
        read_ahead = sum(
            element * p.elements * count for p, count in copied if element * p.elements // p.shape[0] <= MOST_KEPT_BYTES
        )
        is_converted = stored != plan.loaded_dtype
        return cls(
            kept_bytes=kept,
            private_bytes=kept + max(stacking, read_ahead if is_converted else 0),
            mapped_bytes=None if stored is None else ITEM_BYTES[stored] * profile.base_parameters,
            is_converted=is_converted,
            stacking_bytes=stacking,
        )


def private_bytes(profile: Profile, plan: Plan, parameter: Parameter) -> int:
    """Bytes of a parameter that a process keeps in private memory after loading.

    A weight that keeps the checkpoint's dtype is a view of the mapped file. Adapters, packed weights, weights in another dtype and copied
    experts are its own.
    """
    dtype = parameter.dtype or plan.loaded_dtype
    is_new = parameter.role in ("adapter", "quantized") or are_copied(profile, parameter)
    return ITEM_BYTES[dtype] * parameter.elements if is_new or dtype != profile.checkpoint_dtype else 0


def peak_bytes(transfers: Iterable[WeightTransfer]) -> int:
    """Peak bytes on rank 0's GPU when the transfers run one after the other."""
    transfers = [*transfers]
    alive = peak = sum(transfer.temporaries.rounded for transfer in transfers if transfer.is_loaded)
    for transfer in transfers:
        alive += transfer.kept.rounded + (0 if transfer.is_loaded else transfer.temporaries.rounded)
        peak = max(peak, alive)
        alive -= transfer.temporaries.rounded
    return peak


def pretrained_files(profile: Profile, bytes_of: Callable[[Parameter], int]) -> Files:
    """Files of `save_pretrained`, which fills them in the model's order and never splits a tensor. PEFT writes one file.

    `bytes_of`: bytes per element of a parameter. Source: huggingface_hub, split_state_dict_into_shards_factory;
    peft/peft_model.py, save_pretrained.
    """
    whole = profile.bytes_of(bytes_of)
    if profile.adapter_parameters:
        return Files(name="adapter_model.safetensors", tensor_bytes=whole)
    if whole <= MAX_SHARD_BYTES:
        return Files(name="model.safetensors", tensor_bytes=whole)
    alone, full, filled = [], [], 0
    for p in profile.in_order():
        n_bytes = p.elements * bytes_of(p)
        if n_bytes > MAX_SHARD_BYTES:
            alone.append(n_bytes)
            continue
        if filled + n_bytes > MAX_SHARD_BYTES:
            full.append(filled)
            filled = 0
        filled += n_bytes
    sizes = [*alone, *full, *([filled] if filled else [])]
    return Files(name="model-0000i-of-0000n.safetensors", count=len(sizes), tensor_bytes=max(sizes))
