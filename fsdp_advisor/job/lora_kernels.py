"""axolotl's kernels for adapters (`--lora-kernels`): when they run, and the jobs that are modelled with them."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.adaptation import Adaptation, adaptation_of
from fsdp_advisor.job.adapter_fields import LORA_KERNELS
from fsdp_advisor.job.choices import Framework
from fsdp_advisor.job.conflicts import check_conflicts
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest

_CHOICES = ("auto", "none")


def chosen_kernels(plan: Plan, adaptation: Adaptation) -> tuple[str, ...]:
    """The parts of the model whose adapters axolotl runs in its kernels.

    Source: axolotl 0.19.0, utils/schemas/config.py, `check_auto_enable_lora_kernels`.
    """
    if plan.framework != "axolotl" or adaptation.method != "LORA" or plan.lora_kernels == "none":
        return ()
    if plan.lora_kernels != "auto":
        return tuple(plan.lora_kernels.split(","))
    with_fsdp1 = plan.backend == "fsdp1" and plan.world_size > 1
    return () if with_fsdp1 or "load_in_8bit" in adaptation.quantization else LORA_KERNELS


def modelled_kernels(plan: Plan, adaptation: Adaptation) -> tuple[str, ...]:
    """Those of `chosen_kernels` that the estimate has: all, or none for a job that is not modelled with them."""
    return () if kernels_not_modelled(plan, adaptation) else chosen_kernels(plan, adaptation)


def kernels_not_modelled(plan: Plan, adaptation: Adaptation) -> str | None:
    """Why the estimate has PEFT's code instead of axolotl's kernels: what is not modelled with them. None if it has the kernels."""
    if not chosen_kernels(plan, adaptation):
        return None
    if adaptation.peft.get("use_dora"):
        return "DoRA"
    if adaptation.peft.get("lora_bias") or adaptation.peft.get("bias", "none") != "none":
        return "biases of adapters"
    if plan.backend == "deepspeed" and plan.strategy == "zero3":
        return "DeepSpeed ZeRO-3"
    if plan.mixed and plan.backend == "ddp" and not plan.stores_half:
        return "weights in fp32 under autocast"
    return None


def kernels_text(framework: Framework, adaptation: Adaptation, kernels: Sequence[str]) -> str:
    """The kernels of an estimate in words; empty for a job that has no choice of them, and for all, which is axolotl's choice."""
    if framework != "axolotl" or adaptation.method != "LORA" or tuple(kernels) == LORA_KERNELS:
        return ""
    return f"axolotl's kernels for adapters: {','.join(kernels) or 'none'}"


def check_lora_kernels(request: EstimateRequest) -> None:
    """Raises UsageError for a job that cannot have the kernels that it asks for, or is not modelled with them, under any strategy."""
    adaptation = adaptation_of(request)
    asked = request.lora_kernels not in _CHOICES
    needed = {"--framework axolotl": request.framework == "axolotl", "--use-peft": adaptation.method == "LORA"}
    if asked and (missing := [option for option, given in needed.items() if not given]):
        raise UsageError(
            f"--lora-kernels {request.lora_kernels} asks for axolotl's kernels for LoRA",
            hint=f"leave it out, or add {' '.join(missing)}",
        )
    if asked and "load_in_8bit" in adaptation.quantization:
        raise UsageError(
            "axolotl's kernels for adapters do not unpack weights in 8 bits: axolotl leaves them off by itself",
            hint="--lora-kernels none or auto, or --load-in-4bit",
        )
    if asked and adaptation.peft.get("use_dora"):
        raise UsageError(
            "axolotl's kernels for adapters are not modelled with DoRA",
            hint="--lora-kernels none or auto, with which the estimate has PEFT's code",
        )
    runs = request.framework == "axolotl" and adaptation.method == "LORA" and request.lora_kernels != "none"
    if runs and "load_in_8bit" not in adaptation.quantization:
        others = {"--tiled-mlp": request.tiled_mlp != "none", f"--compile {request.compile}": request.compile != "none"}
        check_conflicts("axolotl's kernels for adapters (--lora-kernels none leaves them out)", others)


def lora_kernels_refusal(plan: Plan) -> UsageError | None:
    """Why the plan's backend cannot have the kernels that were asked for; None if it can.

    Source: axolotl 0.19.0, utils/schemas/config.py, `check_multigpu_lora_kernels`.
    """
    if plan.lora_kernels in _CHOICES or plan.backend != "fsdp1" or plan.world_size == 1:
        return None
    return UsageError(
        "axolotl refuses FSDP1: lora_mlp_kernel, lora_qkv_kernel, and lora_o_kernel are not compatible with FSDP1",
        hint="--backend fsdp2, or --lora-kernels none",
    )
