"""Saving under FSDP2: sharded and full state dicts of model and optimizer. Read in torch 2.13 (distributed/_state_dict_utils.py)."""

from __future__ import annotations

from fsdp_advisor.engines.fsdp_shards import DCP_IN_FLIGHT_BYTES, StateDictBytes, dcp_files, shard_shape
from fsdp_advisor.engines.optimizer_state import saved_state
from fsdp_advisor.engines.transfer import Files, SaveMethod
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.program.storages import round_up


def save_methods(profile: Profile, plan: Plan) -> tuple[SaveMethod, ...]:
    """The methods of saving under FSDP2, the usual one first.

    DCP writes each rank's rows as they are; other ranks than the first write the step counts. A full state dict gathers
    one tensor at a time, padded to N equal shards. With `cpu_offload` rank 0 moves it to the host and the other ranks
    drop it; without, every rank keeps all of them on its GPU.
    The states of a resumed optimizer are gathered in the same way (distributed/checkpoint/state_dict.py, _get_optim_state_dict).
    A file has only the adapters of a model with adapters, but accelerate gathers the whole model (accelerate 1.15, accelerator.py,
    `get_state_dict`; in two processes over gloo rank 0 had all of it, the other rank none).
    Source: distributed/_state_dict_utils.py, _gather_state_dict, _iterate_state_dict; distributed/checkpoint/filesystem.py.
    """
    state_dict = StateDictBytes.of(profile.saved, plan)
    by_accelerate = StateDictBytes.of(profile, plan) if plan.uses_accelerate else state_dict
    gathered = round_up(state_dict.largest_gathered)
    in_flight = 0 if plan.offload == "parameters" else DCP_IN_FLIGHT_BYTES
    whole = saved_state(profile, plan, lambda p: p.shape)
    own = saved_state(profile, plan, lambda p: shard_shape(p.shape, plan.shard_degree))
    get = "get_model_state_dict" if plan.save_only_model else "get_state_dict"
    full = state_dict.full + whole.total
    full_file = Files(name="model.pt", tensor_bytes=full)
    return (
        SaveMethod(
            way="sharded",
            state_dict_type="sharded",
            how=f"torch.distributed.checkpoint.save of {get}",
            gpu_bytes=0,
            first_rank_host_bytes=in_flight + state_dict.largest_shard,
            other_ranks_host_bytes=in_flight + state_dict.largest_shard,
            ranks_per_node=plan.ranks_per_node,
            files=(dcp_files(plan, state_dict.sharded + own.total - own.scalars),),
        ),
        SaveMethod(
            way="full",
            state_dict_type="full",
            how=f"{get}(full_state_dict=True, cpu_offload=True), torch.save on rank 0",
            gpu_bytes=round_up(by_accelerate.largest_gathered),
            first_rank_host_bytes=max(by_accelerate.full, full),
            other_ranks_host_bytes=0,
            ranks_per_node=plan.ranks_per_node,
            files=(full_file,),
        ),
        SaveMethod(
            way="full_on_gpu",
            state_dict_type="full",
            how=f"{get}(full_state_dict=True) without cpu_offload, torch.save on rank 0",
            gpu_bytes=full + gathered,
            first_rank_host_bytes=state_dict.largest,
            other_ranks_host_bytes=0,
            ranks_per_node=plan.ranks_per_node,
            files=(full_file,),
        ),
    )
