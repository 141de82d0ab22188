"""Saving a model under DDP: rank 0 writes its replica. Read in torch 2.13 and transformers 5.23."""

from __future__ import annotations

from functools import partial

from fsdp_advisor.engines.optimizer_state import saved_state
from fsdp_advisor.engines.transfer import Files, SaveMethod, pretrained_files
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.policies.dtypes import stored_bytes


def save_methods(profile: Profile, plan: Plan) -> tuple[SaveMethod, ...]:
    """The methods of saving under DDP, the usual one first. The Trainer writes the optimizer state to a separate file.

    `save_pretrained` copies all tensors of a file to the host together, `torch.save` one at a time.
    Source: safetensors/torch.py, save_file, _flatten_as_ptr; torch/serialization.py, _save.
    """
    stored = partial(stored_bytes, plan)
    pretrained = pretrained_files(profile, stored)
    optimizer = saved_state(profile, plan, lambda p: p.shape)
    optimizer_files = (Files(name="optimizer.pt", tensor_bytes=optimizer.total),) if optimizer.total else ()
    return (
        SaveMethod(
            way="save_pretrained",
            how="rank 0: model.save_pretrained" + (", torch.save(optimizer.state_dict())" if optimizer.total else ""),
            gpu_bytes=0,
            first_rank_host_bytes=max(pretrained.tensor_bytes, optimizer.largest),
            other_ranks_host_bytes=0,
            ranks_per_node=plan.ranks_per_node,
            files=(pretrained, *optimizer_files),
        ),
        SaveMethod(
            way="full",
            how="rank 0: torch.save of model.state_dict()" + (" and optimizer.state_dict()" if optimizer.total else ""),
            gpu_bytes=0,
            first_rank_host_bytes=max(profile.largest_parameter_elements * plan.param_bytes, optimizer.largest),
            other_ranks_host_bytes=0,
            ranks_per_node=plan.ranks_per_node,
            files=(Files(name="model.pt", tensor_bytes=profile.bytes_of(stored) + optimizer.total),),
        ),
    )
