"""Saving a model under FSDP2: sharded and full state dicts. Read in torch 2.13 (distributed/_state_dict_utils.py)."""

from __future__ import annotations

from fsdp_advisor.engines.fsdp_state_dict import DCP_IN_FLIGHT_BYTES, StateDictBytes, dcp_files
from fsdp_advisor.engines.transfer import Files, SaveMethod
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.program.storages import round_up


def save_methods(profile: Profile, plan: Plan) -> tuple[SaveMethod, ...]:
    """The methods of saving the weights under FSDP2, the usual one first.

    DCP writes each rank's rows as they are. A full state dict gathers one parameter at a time, padded to N equal shards. With
    `cpu_offload` rank 0 moves it to the host and the other ranks drop it; without, every rank keeps all of them on its GPU.
    Source: distributed/_state_dict_utils.py, _gather_state_dict, _iterate_state_dict; distributed/checkpoint/filesystem.py.
    """
    state_dict = StateDictBytes.of(profile, plan)
    gathered = round_up(state_dict.largest_gathered)
    in_flight = 0 if plan.offload == "parameters" else DCP_IN_FLIGHT_BYTES
    full_file = Files(name="model.pt", tensor_bytes=state_dict.full)
    return (
        SaveMethod(
            way="sharded",
            how="torch.distributed.checkpoint.save of get_model_state_dict",
            gpu_bytes=0,
            first_rank_host_bytes=in_flight + state_dict.largest_shard,
            other_ranks_host_bytes=in_flight + state_dict.largest_shard,
            ranks_per_node=plan.ranks_per_node,
            files=(dcp_files(plan, state_dict.sharded),),
        ),
        SaveMethod(
            way="full",
            how="get_model_state_dict(full_state_dict=True, cpu_offload=True), torch.save on rank 0",
            gpu_bytes=gathered,
            first_rank_host_bytes=state_dict.full,
            other_ranks_host_bytes=0,
            ranks_per_node=plan.ranks_per_node,
            files=(full_file,),
        ),
        SaveMethod(
            way="full_on_gpu",
            how="get_model_state_dict(full_state_dict=True) without cpu_offload, torch.save on rank 0",
            gpu_bytes=state_dict.full + gathered,
            first_rank_host_bytes=state_dict.largest,
            other_ranks_host_bytes=0,
            ranks_per_node=plan.ranks_per_node,
            files=(full_file,),
        ),
    )
