"""Which jobs are modelled with linear layers in fp8 (`--fp8`)."""

from __future__ import annotations

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.adaptation import may_adapt
from fsdp_advisor.job.choices import Backend
from fsdp_advisor.job.conflicts import check_conflicts
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest

CONVERTING: tuple[Backend, ...] = ("ddp", "fsdp2")
"""The backends whose steps in fp8 were compared with PyTorch's own."""
FP8_FROM = (8, 9)
"""The compute capability from which GPUs multiply in fp8. Source: ATen/native/cuda/ScaledBlas.cpp, `_scaled_mm_allowed_device`."""


MULTIPLE = 16
"""Both dimensions of a converted weight are multiples of this number. Source: torchtitan 0.3, components/quantization/utils.py,
`module_filter_fn`.
"""


def suits_fp8(rows: int, columns: int) -> bool:
    """Whether a linear layer with a weight of this shape multiplies in fp8.

    >>> suits_fp8(4096, 1024), suits_fp8(4096, 8)
    (True, False)
    """
    return rows % MULTIPLE == 0 and columns % MULTIPLE == 0


def check_fp8(request: EstimateRequest) -> None:
    """Raises UsageError for a job that is not modelled with fp8 under any strategy."""
    if request.fp8 == "none":
        return
    if request.precision not in ("bf16", "bf16-mixed"):
        raise UsageError(
            f"fp8 is not modelled with --precision {request.precision}",
            hint="torchao casts from bf16: use --precision bf16-mixed or bf16",
        )
    own_models = FRAMEWORKS[request.framework].own_models
    if own_models and request.fp8 != "rowwise":
        raise UsageError(
            f"{request.framework} has no recipe {request.fp8}", hint="use --fp8 rowwise, or --framework torch"
        )
    policies = ("none", "full", "selective") if own_models else ("none", "full")
    others = {
        f"--framework {request.framework}": not own_models and request.framework != "torch",
        f"--activation-checkpointing {request.activation_checkpointing}": request.activation_checkpointing not in policies,
        "--activation-offload": request.activation_offload,
        "--use-liger-kernel": request.use_liger_kernel,
        "adapters, quantized or frozen weights": not own_models and may_adapt(request),
    }  # fmt: skip
    check_conflicts("fp8", others)


def fp8_refusal(plan: Plan) -> UsageError | None:
    """Why the plan's backend is not modelled with fp8. None if it is."""
    if plan.fp8 == "none" or plan.backend in CONVERTING:
        return None
    return UsageError(
        f"fp8 is not modelled with backend {plan.backend}",
        hint=f"use --backend {' or '.join(CONVERTING)}, or leave --fp8 out",
    )
