"""Saving a model under DeepSpeed. Read in DeepSpeed 0.19.8 (runtime/engine.py, runtime/zero).

c = bytes per element of the compute dtype; m = bytes per element of the masters. Tied weights share a storage, so they are
saved once.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from fsdp_advisor.engines.deepspeed import partitions
from fsdp_advisor.engines.deepspeed.groups import groups
from fsdp_advisor.engines.deepspeed.settings import master_bytes, offloads_optimizer, settings_of, stage
from fsdp_advisor.engines.transfer import Files, SaveMethod, pretrained_files
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.policies.dtypes import cast_bytes
from fsdp_advisor.policies.optimizers import optimizer_of
from fsdp_advisor.program.storages import round_up


def save_methods(profile: Profile, plan: Plan) -> tuple[SaveMethod, ...]:
    """The only method of saving under DeepSpeed: a checkpoint from which training can resume, or with `save_only_model` the weights."""
    return (_save_weights(profile, plan) if plan.save_only_model else _save_checkpoint(profile, plan),)


def _save_weights(profile: Profile, plan: Plan) -> SaveMethod:
    """Save the weights in the compute dtype. Stage 3 gathers them one module at a time.

    Source: runtime/engine.py, _zero3_consolidated_16bit_state_dict.
    """
    if stage(plan) < 3:
        pretrained = pretrained_files(profile, lambda _: plan.compute_bytes)
        return SaveMethod(
            way="save_pretrained",
            how="rank 0: model.save_pretrained",
            gpu_bytes=0,
            first_rank_host_bytes=pretrained.tensor_bytes,
            other_ranks_host_bytes=0,
            ranks_per_node=plan.ranks_per_node,
            files=(pretrained,),
        )
    weights = profile.bytes_of(partial(cast_bytes, plan))
    return SaveMethod(
        way="gathered_16bit",
        how="stage3_gather_16bit_weights_on_model_save, then engine.save_16bit_model",
        gpu_bytes=round_up(plan.compute_bytes * profile.largest_parameter_elements),
        first_rank_host_bytes=weights,
        other_ranks_host_bytes=0,
        ranks_per_node=plan.ranks_per_node,
        files=(Files(name="pytorch_model.bin", tensor_bytes=weights),),
    )


def _save_checkpoint(profile: Profile, plan: Plan) -> SaveMethod:
    """`engine.save_checkpoint` always writes the optimizer's masters and states, one storage at a time.

    Stages 1, 2: rank 0 also writes the weights. Stage 3: the masters contain the weights; each rank's model file holds only
    shards of frozen parameters and buffers.
    Source: runtime/engine.py, save_checkpoint, _save_zero_checkpoint.
    """
    parts = _saved_partitions(profile, plan)
    states = sum(part.masters + part.states for part in parts)
    prefix = "" if plan.precision in ("fp32", "fp16-mixed") else "bf16_"
    optimizer_files = Files(
        name=prefix + "zero_pp_rank_{r}_mp_rank_00_optim_states.pt", count=plan.shard_degree, tensor_bytes=states
    )
    model_files = _model_files(profile, plan)
    master = 0 if offloads_optimizer(plan) else max((part.masters for part in parts), default=0)
    weights = model_files.tensor_bytes if stage(plan) < 3 else 0
    return SaveMethod(
        way="save_checkpoint",
        how="engine.save_checkpoint",
        gpu_bytes=0,
        first_rank_host_bytes=max(master, weights),
        other_ranks_host_bytes=master,
        ranks_per_node=plan.ranks_per_node,
        files=(model_files, optimizer_files),
    )


class _Part(NamedTuple):
    """Bytes of a flat partition in a checkpoint."""

    masters: int
    states: int


def _saved_partitions(profile: Profile, plan: Plan) -> list[_Part]:
    """The partitions that rank 0 saves. The padding at the end of the last rank's partition is not saved.

    Muon saves its momentum: stages 1 and 2 of the whole matrices that the rank owns parts of, with offload of these parts.
    """
    ranks, c, m, optimizer = plan.shard_degree, plan.compute_bytes, master_bytes(plan), optimizer_of(plan)

    def part(elements: int, momentum: int | None) -> _Part:
        return _Part(m * elements, optimizer.saved_flat_bytes(elements, m) if momentum is None else momentum)

    if stage(plan) == 3:
        sub_groups = partitions.sub_groups(profile, plan, settings_of(profile, plan))
        return [part(each.elements, c * each.elements if each.by_muon else None) for each in sub_groups]
    found = []
    for group in groups(profile, plan):
        owned = min(partitions.owned_elements(group, ranks), group.elements)
        whole = c * partitions.owned_by_rank0(group.parameters, owned)[0]
        momentum = m * owned if offloads_optimizer(plan) else whole
        found.append(part(owned, momentum if group.by_muon else None))
    return found


def _model_files(profile: Profile, plan: Plan) -> Files:
    """Files of the weights: all of them from rank 0, or under stage 3 each rank's shards of frozen parameters."""
    if stage(plan) < 3:
        return Files(name="mp_rank_00_model_states.pt", tensor_bytes=profile.bytes_of(partial(cast_bytes, plan)))
    frozen = sum(
        cast_bytes(plan, p) * partitions.shard_elements(p.elements, plan.shard_degree) * count
        for p, count in profile.counted_parameters()
        if not p.trainable
    )
    return Files(
        name="zero_pp_rank_{r}_mp_rank_00_model_states.pt",
        count=plan.shard_degree,
        tensor_bytes=frozen,
    )
