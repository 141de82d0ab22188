"""Which jobs are modelled with linear layers in fp8 (`--fp8`)."""

from __future__ import annotations

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.adaptation import may_adapt
from fsdp_advisor.job.checkpointing import policies_of_changed_layers
from fsdp_advisor.job.choices import Backend, Fp8
from fsdp_advisor.job.conflicts import check_conflicts
from fsdp_advisor.job.frameworks import FRAMEWORKS, TORCHTITAN_CHUNKS
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest

CONVERTING: tuple[Backend, ...] = ("ddp", "fsdp2")
"""The backends whose steps in fp8 were compared with PyTorch's own."""

FP8_FROM = (8, 9)
"""The compute capability from which GPUs have instructions for fp8."""
_FROM: dict[Fp8, tuple[int, int]] = {"none": (0, 0), "tensorwise": FP8_FROM, "rowwise": FP8_FROM, "mxfp8": (10, 0)}
"""The compute capability from which GPUs multiply in fp8, and from which torchao has its kernels of MXFP8. Source: torch 2.13,
ATen/native/cuda/ScaledBlas.cpp, `_scaled_mm_allowed_device`; torchao 0.18, prototype/mx_formats/kernels.py, `is_sm_at_least_100`.
"""
_MULTIPLE: dict[Fp8, int] = {"none": 1, "tensorwise": 16, "rowwise": 16, "mxfp8": 32}
"""Both dimensions of a converted weight are multiples of this number. Source: torchtitan 0.3, components/quantization/utils.py,
`module_filter_fn`; torchao 0.18, prototype/mx_formats/kernels.py, `mxfp8_quantize_cuda`.
"""


def suits_fp8(rows: int, columns: int, fp8: Fp8) -> bool:
    """Whether a linear layer with a weight of this shape multiplies in fp8.

    >>> suits_fp8(4096, 1040, "rowwise"), suits_fp8(4096, 1040, "mxfp8")
    (True, False)
    """
    return rows % _MULTIPLE[fp8] == 0 and columns % _MULTIPLE[fp8] == 0


def converts_head(fp8: Fp8, *, own_models: bool) -> bool:
    """Whether the head multiplies in fp8 too. `own_models`: whether the framework trains its own model classes, as torchtitan does.

    Source: torchtitan 0.3, models/llama3/config_registry.py: the converter of `llama3_8b_mxfp8` takes all linear layers, and that of
    `llama3_debugmodel_float8` leaves the head out.
    """
    return fp8 == "mxfp8" and own_models


def check_capability(fp8: Fp8, gpu: str, capability: tuple[int, int]) -> None:
    """Raises UsageError if a GPU has no kernels for the recipe."""
    if capability >= _FROM[fp8]:
        return
    if fp8 == "mxfp8":
        raise UsageError(
            f"{gpu} has no kernels for MXFP8, which torchao and cuBLAS have from compute capability 10.0 on",
            hint="use --gpu with a GPU of the Blackwell generation, such as B200, or leave --fp8 mxfp8 out",
        )
    raise UsageError(
        f"{gpu} does not multiply in fp8",
        hint="leave --fp8 out, or use --gpu with a GPU of the Ada or Hopper generation or later",
    )


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
    if own_models and request.fp8 == "tensorwise":
        raise UsageError(
            f"{request.framework} has no recipe {request.fp8}",
            hint="use --fp8 rowwise or mxfp8, or --framework torch",
        )
    switches_on = own_models or request.framework == "torch"
    if request.fp8 == "mxfp8" and not switches_on:
        raise UsageError(
            f"--framework {request.framework} cannot switch on torchao's MXFP8: accelerate 1.15 has MXFP8 only by Transformer Engine, and "
            "DeepSpeed 0.19 has none",
            hint="use --framework torch or torchtitan",
        )
    policies = policies_of_changed_layers(own_models=own_models)
    others = {
        f"--framework {request.framework}": not switches_on,
        f"--activation-checkpointing {request.activation_checkpointing}": request.activation_checkpointing not in policies,
        "--activation-offload": request.activation_offload,
        "--use-liger-kernel": request.use_liger_kernel,
        "adapters, quantized or frozen weights": not own_models and may_adapt(request),
    }  # fmt: skip
    check_conflicts("fp8", others)


def fp8_refusal(plan: Plan) -> UsageError | None:
    """Why the plan's step is not modelled with fp8, or fails with it. None if it is modelled."""
    if plan.fp8 == "none":
        return None
    if plan.backend not in CONVERTING:
        return UsageError(
            f"fp8 is not modelled with backend {plan.backend}",
            hint=f"use --backend {' or '.join(CONVERTING)}, or leave --fp8 out",
        )
    if plan.fp8 != "mxfp8":
        return None
    if plan.backend == "ddp" and plan.mixed:
        return UsageError(
            "torchao's kernels of MXFP8 take only bf16, and under DDP's autocast linear layers have weights in fp32",
            hint="use --backend fsdp2, whose mixed precision gathers weights in bf16, or --precision bf16",
        )
    return _rows_refusal(plan)


def _rows_refusal(plan: Plan) -> UsageError | None:
    """Why the rows of a linear layer's input, whose blocks of 32 share a scale in backward, are not whole blocks. None if they are."""
    micro_batch_size, tokens = plan.tape_shape
    block = _MULTIPLE["mxfp8"]
    chunks = TORCHTITAN_CHUNKS if plan.loss_code == "torchtitan" else 1  # the head, too, multiplies in MXFP8
    if micro_batch_size * tokens % (block * chunks) == 0:
        return None
    each = f" ({block} in each of the loss's {chunks} chunks)" if chunks > 1 else ""
    return UsageError(
        f"torchao's kernels of MXFP8 take a multiple of {block * chunks} tokens{each}, not micro-batch {micro_batch_size} x {tokens}",
        hint=f"use a --seq-len that is a multiple of {block * chunks}",
    )
