"""Saving a model under DDP: rank 0 writes its replica. Read in torch 2.13 and transformers 5.23."""

from __future__ import annotations

from fsdp_advisor.engines.transfer import Files, SaveMethod, pretrained_files
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile


def save_methods(profile: Profile, plan: Plan) -> tuple[SaveMethod, ...]:
    """The methods of saving the weights under DDP, the usual one first.

    `save_pretrained` copies all tensors of a file to the host together, `torch.save` one at a time.
    Source: safetensors/torch.py, save_file, _flatten_as_ptr; torch/serialization.py, _save.
    """
    pretrained = pretrained_files(profile, plan.param_bytes)
    return (
        SaveMethod(
            way="save_pretrained",
            how="rank 0: model.save_pretrained",
            gpu_bytes=0,
            first_rank_host_bytes=pretrained.tensor_bytes,
            other_ranks_host_bytes=0,
            ranks_per_node=plan.ranks_per_node,
            files=(pretrained,),
        ),
        SaveMethod(
            way="full",
            how="rank 0: torch.save(model.state_dict())",
            gpu_bytes=0,
            first_rank_host_bytes=profile.largest_parameter_elements * plan.param_bytes,
            other_ranks_host_bytes=0,
            ranks_per_node=plan.ranks_per_node,
            files=(Files(name="model.pt", tensor_bytes=profile.parameters * plan.param_bytes),),
        ),
    )
