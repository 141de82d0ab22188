"""The types of load and save methods, and sums of bytes that several engines need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from fsdp_advisor.job.choices import StateDictType
from fsdp_advisor.model.profile import Parameter, Profile, Unit
from fsdp_advisor.program.storages import WeightTransfer

CHECKPOINT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
MAX_SHARD_BYTES = 50 * 10**9
"""Largest file of `save_pretrained` by default (`max_shard_size`). Source: transformers/modeling_utils.py (5.23): "50GB"; 5 GB before
transformers 5.
"""
CPU_RAM_EFFICIENT_LOADING = "fsdp_cpu_ram_efficient_loading: true (with transformers 5 every rank still loads a copy)"
"""The line that sets accelerate's flag. transformers 5 ignores the flag: `from_pretrained` loads a copy on every rank. In a real
run with two ranks, both had the whole converted model.
Source: transformers/modeling_utils.py, _load_pretrained_model (5.23); huggingface/transformers#43749.
"""


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
    """Host memory of one process that loads a whole checkpoint in safetensors.

    `private_bytes`: a converted copy of the model. 0 if the weights keep the checkpoint's dtype: they are then views of the
    mapped file, whose page cache all ranks of a node share. `mapped_bytes`: the file. None if the checkpoint's dtype is
    unknown; the weights then count as converted.
    """

    private_bytes: int
    mapped_bytes: int | None

    @classmethod
    def of(cls, profile: Profile, element_bytes: int) -> LoadedCheckpoint:
        """Host memory for loading the base model's checkpoint, without adapters, as weights of `element_bytes` per element."""
        stored = checkpoint_element_bytes(profile)
        mapped = None if stored is None else stored * profile.base_parameters
        return cls(0 if stored == element_bytes else element_bytes * profile.base_parameters, mapped)


def checkpoint_element_bytes(profile: Profile) -> int | None:
    """Bytes per element of the published checkpoint. None if the model's configuration does not state its dtype."""
    dtype = profile.config.get("dtype") or profile.config.get("torch_dtype")
    return CHECKPOINT_BYTES.get(str(dtype).removeprefix("torch."))


def units_in_order(profile: Profile) -> list[Unit]:
    """Every real layer in the model's order, then the root. Layers of one kind are the same object."""
    return [*profile.layers(), profile.root]


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
