"""Files that launch a plan: configurations, training scripts and launch scripts.

One module per consumer defines a `Target`. `job` is their input; `header`, `limits` and `constants` are common to them.

>>> from fsdp_advisor import estimate
>>> report = estimate(model="meta-llama/Llama-2-7b-hf", gpus=8, gpu="H100-80GB", strategy="zero3")
>>> job = Job.of(report, report.estimates[0])
>>> export("accelerate", job).file_name
'accelerate.yaml'
>>> export("deepspeed", job)
Traceback (most recent call last):
fsdp_advisor.errors.UsageError: deepspeed cannot do ZeRO-3 (fsdp2): it shards only with DeepSpeed; use --backend deepspeed
hint: targets that can: accelerate, trainer, axolotl, trl, fsdp2, torchrun, accelerate-launch, sbatch
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from types import MappingProxyType, ModuleType
from typing import Any

from fsdp_advisor.errors import UsageError
from fsdp_advisor.export import accelerate, axolotl, deepspeed, launch, llamafactory, script, trainer, trl
from fsdp_advisor.export.job import Job
from fsdp_advisor.export.target import Exported, Target, with_environment
from fsdp_advisor.job.frameworks import FRAMEWORK_NAMES

__all__ = ["TARGETS", "Exported", "Job", "Target", "check_supported", "export", "find"]

_ALL = (
    accelerate.TARGET,
    deepspeed.TARGET,
    trainer.TARGET,
    axolotl.TARGET,
    trl.TARGET,
    llamafactory.TARGET,
    script.FSDP2,
    script.DDP,
    launch.TORCHRUN,
    launch.ACCELERATE,
    launch.DEEPSPEED,
    launch.SBATCH,
)
TARGETS: Mapping[str, Target] = MappingProxyType({target.name: target for target in _ALL})
"""Every target by name, in the order of `fsdp-advisor export --list`."""


def find(name: str) -> Target:
    """The target of that name, ignoring case and underscores. Raises UsageError with the nearest names."""
    wanted = name.strip().lower().replace("_", "-")
    if wanted == "torchtitan":
        raise UsageError(
            "torchtitan has no export target: its configuration is a function in Python",
            hint="fsdp2 writes a script of plain PyTorch, also with --fp8; `recommend --framework torchtitan` prints torchtitan's command",
        )
    if wanted not in TARGETS:
        near = difflib.get_close_matches(wanted, TARGETS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"targets: {', '.join(TARGETS)}"
        raise UsageError(f"unknown export target {name[:80]!r}", hint=hint)
    return TARGETS[wanted]


def export(target: str, job: Job) -> Exported:
    """The file with which `target` trains the job.

    Raises UsageError if the target is unknown or cannot train the job; its hint lists the targets that can.
    """
    consumer = find(target)
    check_supported(consumer, job)
    text, notes = consumer.write(job)
    return Exported(
        target=consumer.name,
        file_name=consumer.file_name,
        media_type=consumer.media_type,
        text=text,
        usage=consumer.line(job, consumer.file_name),
        notes=(*notes, *_notes(consumer, job)),
    )


def _notes(consumer: Target, job: Job) -> list[str]:
    """The notes that apply to every consumer."""
    notes = []
    if job.plan.uses_accelerate and job.not_modelled:
        notes.append("not in the prediction: " + "; ".join(job.not_modelled))
    # these also read DeepSpeed's file
    runs_framework = consumer.framework in ("deepspeed", job.plan.framework)
    if job.plan.uses_accelerate and not runs_framework:
        notes.append(f"the prediction is for {FRAMEWORK_NAMES[job.plan.framework]}, which {consumer.name} does not use")
    if job.plan.images is not None:
        notes.append(f"the prediction is for a data set with {job.plan.images} in each sample, which you have to name")
    if job.environment and not consumer.command:
        notes.append("launch it with " + with_environment(job, "...").removesuffix(" ..."))
    return notes


def check_supported(consumer: Target, job: Job) -> None:
    """Raises UsageError if the target cannot train the job. The hint lists the targets that can."""
    reason = consumer.limit(job)
    if reason is None:
        return
    able = [t.name for t in _ALL if t.limit(job) is None]
    if able:
        hint = f"targets that can: {', '.join(able)}"
    elif job.adaptation.packed_by:
        hint = "--load-in-4bit on the model before it was quantized"
    elif job.plan.facts.own_models:
        hint = "--framework torch, for which fsdp2 writes a script, also with --fp8"
    else:
        hint = "no target can: leave out the option that it names"
    raise UsageError(f"{consumer.name} cannot do {job.strategy}: {reason}", hint=hint)


class _CallablePackage(ModuleType):
    """This package, which can be called as `fsdp_advisor.export(...)`: the function and the package share their name."""

    def __call__(self, *arguments: Any, **options: Any) -> Exported:
        from fsdp_advisor.api import export as export_job

        return export_job(*arguments, **options)


sys.modules[__name__].__class__ = _CallablePackage
