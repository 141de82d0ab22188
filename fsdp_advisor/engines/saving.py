"""Saving: every method of a plan's backend, and the choice of one.

A checkpoint has the weights and the optimizer states, which a resumed run needs, unless the plan saves only the weights
(`save_only_model`, as transformers' TrainingArguments call it).
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_advisor.engines.ddp import saving as ddp
from fsdp_advisor.engines.deepspeed import saving as deepspeed
from fsdp_advisor.engines.fsdp1 import saving as fsdp1
from fsdp_advisor.engines.fsdp2 import saving as fsdp2
from fsdp_advisor.engines.transfer import SaveMethod
from fsdp_advisor.errors import assert_never
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile


def save_methods(profile: Profile, plan: Plan) -> tuple[SaveMethod, ...]:
    """Every save method of the plan's backend, the usual one first; if the plan has a type of FSDP's state dicts, only its methods."""
    match plan.backend:
        case "ddp":
            return ddp.save_methods(profile.saved, plan)
        case "fsdp1":
            return _of_type(plan, fsdp1.save_methods(profile, plan))
        case "fsdp2":
            return _of_type(plan, fsdp2.save_methods(profile, plan))
        case "deepspeed":
            return deepspeed.save_methods(profile.saved, plan)
        case _:
            return assert_never(plan.backend)


def _of_type(plan: Plan, methods: tuple[SaveMethod, ...]) -> tuple[SaveMethod, ...]:
    if plan.state_dict_type == "auto":
        return methods
    return tuple(method for method in methods if method.state_dict_type == plan.state_dict_type)


def choose_save_method(
    methods: Sequence[SaveMethod], *, gpu_memory_bytes: int, host_memory_bytes: int | None = None
) -> SaveMethod:
    """The first method that fits into the free memory of the GPU and of the node (None: unlimited), else the first of all."""
    for method in methods:
        fits_node = host_memory_bytes is None or method.host_bytes_per_node <= host_memory_bytes
        if method.gpu_bytes <= gpu_memory_bytes and fits_node:
            return method
    return methods[0]
