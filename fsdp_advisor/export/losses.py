"""The settings of losses without whole logits and of Liger's other kernels in exported files.

Source: transformers 5.23, training_args.py (`liger_kernel_config`); liger-kernel 0.8.5, transformers/monkey_patch.py;
axolotl 0.19.0, integrations/{liger,cut_cross_entropy}/args.py.
"""

from __future__ import annotations

from typing import Any

from fsdp_advisor.configs.axolotl import LIGER_KERNELS
from fsdp_advisor.errors import assert_never
from fsdp_advisor.export.job import Job
from fsdp_advisor.job.losses import LossCode

LIGER_LOSS_ALONE = {
    "fused_linear_cross_entropy": True,
    **dict.fromkeys(("rope", "rms_norm", "layer_norm", "swiglu", "geglu"), False),
}
"""The keywords with which Liger replaces the loss and no other kernel."""


def loss_limit(job: Job, *possible: LossCode) -> str | None:
    """Why a consumer that supports only the losses `possible`, besides the loss on whole logits, cannot train the job."""
    if job.plan.task != "sft" and "trl" not in possible:
        return f"only TRL has the task {job.plan.task}"
    if job.plan.facts.own_models:
        return f"{job.plan.framework} trains its own model, from a function in Python that makes its configuration"
    code = job.plan.loss_code
    if code in possible:
        return None
    match code:
        case "full":
            return None
        case "trl":
            return "only TRL computes the loss in these tiles; use --loss liger"
        case "torchtitan":
            return "only torchtitan computes the loss in these chunks; use --loss liger"
        case "liger":
            return "it does not accept Liger's loss"
        case "cce":
            return "it has no cut cross entropy; use --loss liger, or the target axolotl"
        case _:
            return assert_never(code)


def script_loss_limit(job: Job) -> str | None:
    """Why an exported script cannot compute the loss; None if it can. TRL's own script computes it itself."""
    by_trl = job.plan.framework == "trl" and job.plan.task == "sft"
    return None if by_trl else loss_limit(job, "liger")


def packages(job: Job) -> tuple[str, ...]:
    """The packages that compute the loss or replace kernels."""
    return ("liger_kernel",) if job.plan.loss_code == "liger" or job.plan.use_liger_kernel else ()


def _liger_config(job: Job) -> dict[str, bool]:
    """The keywords of Liger's patch that differ from Liger's defaults."""
    if not job.plan.use_liger_kernel:
        return LIGER_LOSS_ALONE
    return {} if job.plan.loss_code == "liger" else {"fused_linear_cross_entropy": False}


def script_call(job: Job) -> str:
    """The line of a script that replaces the loss and kernels of its variable `model`; empty if neither is replaced."""
    if not packages(job):
        return ""
    others = [f"{name}={value}" for name, value in _liger_config(job).items() if not value]
    return f"_apply_liger_kernel_to_instance({', '.join(('model', *others))})"


def trainer_arguments(job: Job) -> dict[str, Any]:
    """The Trainer's arguments for loss and kernels. TRL itself leaves Liger's loss out."""
    if not packages(job):
        return {}
    config = {} if job.plan.loss_code == "trl" else _liger_config(job)
    return {"use_liger_kernel": True, **({"liger_kernel_config": config} if config else {})}


def axolotl_keys(job: Job) -> dict[str, Any]:
    """axolotl's keys for the loss and for Liger's other kernels."""
    plugins: list[str] = []
    keys: dict[str, bool] = {}
    if packages(job):
        plugins.append("axolotl.integrations.liger.LigerPlugin")
    if job.plan.use_liger_kernel:
        keys |= dict.fromkeys(LIGER_KERNELS, True)
    if job.plan.loss_code == "liger":
        keys["liger_fused_linear_cross_entropy"] = True
    if job.plan.loss_code == "cce":
        plugins.append("axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin")
        keys["cut_cross_entropy"] = True
    return {"plugins": plugins, **keys} if plugins else {}
