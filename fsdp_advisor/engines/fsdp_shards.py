"""Shards of parameters, FSDP's state dicts of them, and the files of torch.distributed.checkpoint (DCP). FSDP1 and FSDP2 share them.

Read in torch 2.13 (distributed/_state_dict_utils.py, distributed/checkpoint). The sizes of the files were compared with real
checkpoints of two ranks over gloo on the CPU. FSDP saves the masters, so a bf16-mixed checkpoint is in fp32.
N = ranks that share one copy of the states.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from fsdp_advisor.engines.transfer import Files
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Parameter, Profile
from fsdp_advisor.policies.dtypes import is_sharded, stored_bytes

DCP_IN_FLIGHT_BYTES = 10_000_000
"""Bytes that `dcp.save` copies from the GPU ahead of writing. Source: distributed/checkpoint/filesystem.py, FileSystemWriter,
per_thread_copy_ahead."""


def shard_shape(shape: tuple[int, ...], shards: int) -> tuple[int, ...]:
    """The shape of rank 0's shard of a parameter, the largest one: ceil(rows / shards) rows. A scalar becomes one element.

    Source: torch.distributed.tensor.placement_types.Shard, `_chunk_with_empty` (torch 2.13); FSDP2 splits on dim 0.
    >>> shard_shape((10, 3), 4)
    (3, 3)
    """
    return (-(-shape[0] // shards), *shape[1:]) if shape else (1,)


def shard_bytes(parameter: Parameter, plan: Plan) -> int:
    """Bytes of rank 0's rows of a parameter: the largest chunk of dim 0, or all of a parameter that FSDP2 does not shard."""
    shape = shard_shape(parameter.shape, plan.shard_degree) if is_sharded(parameter, plan) else parameter.shape
    return prod(shape) * stored_bytes(plan, parameter)


class StateDictBytes(NamedTuple):
    """Bytes of a model's state dict. FSDP gathers or shards each entry separately, so a tied tensor counts once per name.

    `full`: all tensors, unsharded. `sharded`: rank 0's rows of all tensors. `largest`: the largest tensor, unsharded.
    `largest_shard`: the largest of rank 0's shards of a tensor. `largest_gathered`: N shards of that size, as an all-gather returns them.
    """

    full: int
    sharded: int
    largest: int
    largest_gathered: int
    largest_shard: int

    @classmethod
    def of(cls, profile: Profile, plan: Plan) -> StateDictBytes:
        full = sharded = largest = largest_shard = 0
        for p, count in profile.counted_parameters():
            entries = count * (1 + len(p.tied))
            whole, shard = p.elements * stored_bytes(plan, p), shard_bytes(p, plan)
            full += whole * entries
            sharded += shard * entries
            largest, largest_shard = max(largest, whole), max(largest_shard, shard)
        return cls(full, sharded, largest, largest_shard * plan.shard_degree, largest_shard)


def dcp_files(plan: Plan, sharded_bytes: int) -> Files:
    """DCP's files, one per rank. One replica writes each part; DCP balances the parts by size.

    `sharded_bytes`: state dict of one rank.
    Source: distributed/checkpoint/_dedup_save_plans.py, dedup_save_plans; filesystem.py, single_file_per_rank.
    """
    return Files(name="__{r}_0.distcp", count=plan.world_size, tensor_bytes=-(-sharded_bytes // plan.replica_degree))
