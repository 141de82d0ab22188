"""Loading the weights onto the GPUs: every method of a plan's backend, and the choice of one.

Host bytes of a method include a private copy of the model only if loading converts the checkpoint to another dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fsdp_advisor.engines.ddp import loading as ddp
from fsdp_advisor.engines.deepspeed import loading as deepspeed
from fsdp_advisor.engines.fsdp1 import loading as fsdp1
from fsdp_advisor.engines.fsdp2 import loading as fsdp2
from fsdp_advisor.engines.transfer import LoadMethod
from fsdp_advisor.errors import assert_never
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.policies.dtypes import cast_bytes, stored_bytes


def load_methods(profile: Profile, plan: Plan, *, gpu_memory_bytes: int | None = None) -> tuple[LoadMethod, ...]:
    """Every load method of the plan's backend, the simplest to set up first.

    `gpu_memory_bytes`: the GPU's memory, None if unlimited. Only DeepSpeed's stages 1 and 2 load differently on a small GPU.
    """
    match plan.backend:
        case "ddp":
            return ddp.load_methods(profile, plan)
        case "fsdp1":
            return fsdp1.load_methods(profile, plan)
        case "fsdp2":
            return fsdp2.load_methods(profile, plan)
        case "deepspeed":
            return deepspeed.load_methods(profile, plan, gpu_memory_bytes=gpu_memory_bytes)
        case _:
            return assert_never(plan.backend)


def choose_load_method(
    methods: Sequence[LoadMethod], *, gpu_memory_bytes: int | None = None, host_memory_bytes: int | None = None
) -> LoadMethod:
    """The first method that fits the GPU and the node. If the node's memory is unknown, that of exported scripts, or else the one with the
    least host memory.

    If none fits the GPU, the one with the least GPU memory. If none fits the node, the one with the least host memory.
    """
    fit_gpu = [m for m in methods if gpu_memory_bytes is None or m.gpu_bytes <= gpu_memory_bytes]
    if not fit_gpu:
        return min(methods, key=lambda m: m.gpu_bytes)
    if host_memory_bytes is None:
        fit_node = (m for m in fit_gpu if m.is_of_script)
    else:
        fit_node = (m for m in fit_gpu if m.host_bytes_per_node <= host_memory_bytes)
    return next(fit_node, min(fit_gpu, key=lambda m: m.host_bytes_per_node))


def one_copy_bytes(profile: Profile, plan: Plan) -> int:
    """Bytes of the whole model in the dtype in which it is loaded. FSDP and DDP load the masters, DeepSpeed the compute dtype."""
    match plan.backend:
        case "ddp" | "fsdp1" | "fsdp2":
            return profile.bytes_of(partial(stored_bytes, plan))
        case "deepspeed":
            return profile.bytes_of(partial(cast_bytes, plan))
        case _:
            return assert_never(plan.backend)
