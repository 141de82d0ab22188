"""Saving under FSDP1: full, sharded and local state dicts of model and optimizer.

Read in torch 2.13 (distributed/fsdp/_state_dict_utils.py, _optim_utils.py). `FSDP.optim_state_dict` gathers one state of one unit
at a time: the whole flat state, and a copy of this rank's shard of it. Without `use_orig_params` it gathers all states of a unit
together, and a sharded state dict copies this rank's rows of them. It moves the results to the host (`OptimStateDictConfig`,
offload_to_cpu=True). Under LOCAL_STATE_DICT each rank saves `optimizer.state_dict()`, its own shards.
"""

from __future__ import annotations

from functools import cache

from fsdp_advisor.engines.fsdp1.units import flat_bytes, stepped_in, unit_elements
from fsdp_advisor.engines.fsdp_shards import DCP_IN_FLIGHT_BYTES, StateDictBytes, dcp_files, shard_bytes, shard_shape
from fsdp_advisor.engines.optimizer_state import SCALAR_BYTES, saved_state
from fsdp_advisor.engines.transfer import Files, SaveMethod
from fsdp_advisor.engines.wrapping import wrapping_for
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.fsdp_units import AT_ROOT
from fsdp_advisor.model.profile import Profile, Unit
from fsdp_advisor.policies.optimizers import optimizer_of


def save_methods(profile: Profile, plan: Plan) -> tuple[SaveMethod, ...]:
    """The methods of saving under FSDP1, the usual one first.

    Full and sharded state dicts gather one unit at a time in the masters' dtype; the root stays gathered while the layers are
    gathered. FULL with `offload_to_cpu` moves each gathered unit to the host and clones its tensors there. SHARDED leaves the
    root on the GPU and clones each rank's rows. LOCAL saves the flat shard itself. PEFT selects the adapters from the whole model's
    state dict, so only the files are smaller (peft 0.21, utils/save_and_load.py, `get_peft_model_state_dict`).
    Source: fsdp/_state_dict_utils.py, _common_unshard_pre_state_dict_hook, _full_post_state_dict_hook,
    _sharded_post_state_dict_hook, _local_post_state_dict_hook.
    """
    return (
        _full(profile, plan, rank0_only=True),
        _full(profile, plan, rank0_only=False),
        _sharded(profile, plan),
        _local(profile, plan),
    )


def _full(profile: Profile, plan: Plan, *, rank0_only: bool) -> SaveMethod:
    largest_unit = max(_root_and_layer_bytes(profile, plan))
    weights = StateDictBytes.of(profile, plan).full
    full = StateDictBytes.of(profile.saved, plan).full + saved_state(profile, plan, lambda p: (p.elements,)).total
    host = max(weights + largest_unit, full)  # each gathered unit of weights is copied once more
    if rank0_only:
        way, how = "full", "FULL_STATE_DICT with offload_to_cpu and rank0_only"
        files = Files(name="pytorch_model_fsdp.bin", tensor_bytes=full)
    else:
        way, how = "full_on_every_rank", "FULL_STATE_DICT without rank0_only: every rank gathers and writes everything"
        files = Files(name="model_rank{r}.bin", count=plan.world_size, tensor_bytes=full)
    return SaveMethod(
        way=way,
        state_dict_type="full",
        how=how,
        gpu_bytes=max(largest_unit, _gathered_state_bytes(profile, plan, sharded=False)),
        first_rank_host_bytes=host,
        other_ranks_host_bytes=0 if rank0_only else host,
        ranks_per_node=plan.ranks_per_node,
        files=(files,),
    )


def _sharded(profile: Profile, plan: Plan) -> SaveMethod:
    state_dict, (root, layer) = StateDictBytes.of(profile, plan), _root_and_layer_bytes(profile, plan)
    saved = StateDictBytes.of(profile.saved, plan)
    root_rows = sum(shard_bytes(p, plan) * (1 + len(p.tied)) for p in profile.root.parameters)
    state = saved_state(profile, plan, lambda p: shard_shape(p.shape, plan.shard_degree))
    optimizer = state.total - state.scalars
    in_flight = DCP_IN_FLIGHT_BYTES + saved.largest_shard
    weights = max(root + state_dict.sharded, root + layer + state_dict.sharded - root_rows)
    return SaveMethod(
        way="sharded",
        state_dict_type="sharded",
        how="SHARDED_STATE_DICT, written by torch.distributed.checkpoint",
        gpu_bytes=max(weights, state_dict.sharded + _gathered_state_bytes(profile, plan, sharded=True)),
        first_rank_host_bytes=in_flight + optimizer,
        other_ranks_host_bytes=in_flight + optimizer,
        ranks_per_node=plan.ranks_per_node,
        files=(dcp_files(plan, saved.sharded + optimizer),),
    )


def _local(profile: Profile, plan: Plan) -> SaveMethod:
    n = plan.shard_degree
    largest_shard = max(_root_and_layer_bytes(profile, plan)) // n
    shards = sum(_flat_bytes(unit, plan) // n for unit in _units(profile, plan))
    return SaveMethod(
        way="local",
        state_dict_type="local",
        how="LOCAL_STATE_DICT: each rank's flat shard, which only the same number of ranks can load",
        gpu_bytes=0,
        first_rank_host_bytes=largest_shard,
        other_ranks_host_bytes=largest_shard,
        ranks_per_node=plan.ranks_per_node,
        files=(
            Files(name="model_rank{r}.bin", count=plan.world_size, tensor_bytes=shards + _own_state(profile, plan)),
        ),
    )


def _own_state(profile: Profile, plan: Plan) -> int:
    """Bytes of the optimizer state of one rank's flat shards. It includes the step counts of all parameters that are stepped."""
    if not plan.use_orig_params:
        states = [_flat_state(unit, plan, plan.shard_degree) for unit in _units(profile, plan)]
        return sum(sum(state) + optimizer_of(plan).host_state_bytes for state in states if state)
    state = saved_state(profile, plan, lambda p: (p.elements,))
    return -(-(state.total - state.scalars) // plan.shard_degree) + state.scalars


def _gathered_state_bytes(profile: Profile, plan: Plan, *, sharded: bool) -> int:
    """GPU bytes of gathering the state of the largest unit. With original parameters: one whole state, and a copy of this rank's shard
    (`_allgather_orig_param_states`). With flat parameters: all states, and this rank's rows of them if the state dict is sharded
    (`_unflatten_optim_state`).
    """
    if (
        plan.save_only_model
        or plan.shard_degree == 1
        or not saved_state(profile, plan, lambda p: (p.elements,)).largest
    ):
        return 0
    if not plan.use_orig_params:
        states = (_flat_state(unit, plan, 1) for unit in _units(profile, plan))
        largest = max(sum(n for n in state if n > SCALAR_BYTES) for state in states)
        return largest + largest // plan.shard_degree if sharded else largest
    largest_unit = max(_root_and_layer_bytes(profile, plan))
    return largest_unit + largest_unit // plan.shard_degree


def _flat_state(unit: Unit, plan: Plan, shards: int) -> list[int]:
    """Bytes of each state of one of `shards` shards of a unit's flat parameter; none if it is not trained or only weights are saved."""
    optimizer = optimizer_of(plan)
    if plan.save_only_model or not unit.trainable_elements:
        return []
    ((parameter, elements),) = stepped_in(unit, plan, unit_elements(unit, plan) // shards)
    return list(optimizer.all_state_storages(parameter, (elements,), flat_bytes(unit, plan)).each())


def _root_and_layer_bytes(profile: Profile, plan: Plan) -> tuple[int, int]:
    """Bytes of the root's flat parameter and of the largest other unit's, gathered."""
    *others, root = (_flat_bytes(unit, plan) for unit in _units(profile, plan))
    return root, max(others, default=0)


def _units(profile: Profile, plan: Plan) -> list[Unit]:
    """Every real unit, the root last; the root has no parameters if other units have all of them."""
    wrapping = wrapping_for(profile, plan)
    units = wrapping.in_order(profile)
    return units if AT_ROOT in wrapping.parts else [*units, Unit(profile.root.kind, ())]


@cache
def _flat_bytes(unit: Unit, plan: Plan) -> int:
    """Bytes of a unit's flat parameter, gathered in the masters' dtype."""
    return unit_elements(unit, plan) * flat_bytes(unit, plan)
