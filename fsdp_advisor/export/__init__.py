"""Files that launch a plan: one module per consumer, and what they have in common in `job`.

>>> from fsdp_advisor import estimate
>>> report = estimate(model="meta-llama/Llama-2-7b-hf", gpus=8, gpu="H100-80GB", strategy="zero3")
>>> job = Job.of(report, report.estimates[0])
>>> export("accelerate", job).file_name
'accelerate.yaml'
>>> export("deepspeed", job)
Traceback (most recent call last):
fsdp_advisor.errors.UsageError: deepspeed cannot do ZeRO-3 (fsdp2): it shards with DeepSpeed: --backend deepspeed
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fsdp_advisor.errors import UsageError
from fsdp_advisor.export import accelerate, axolotl, deepspeed, launch, script, trainer
from fsdp_advisor.export.job import FRAMEWORKS, Exported, Job, Target, left_out, with_environment

__all__ = ["TARGETS", "Exported", "Job", "Target", "export", "find"]

_ALL = (
    accelerate.TARGET,
    deepspeed.TARGET,
    trainer.TARGET,
    axolotl.TARGET,
    script.FSDP2,
    script.DDP,
    launch.TORCHRUN,
    launch.ACCELERATE,
    launch.DEEPSPEED,
    launch.SBATCH,
)
TARGETS: Mapping[str, Target] = MappingProxyType({target.name: target for target in _ALL})
"""Every consumer by its name, in the order in which they are listed."""


def find(name: str) -> Target:
    """The target of that name. Raises UsageError with what it could have been."""
    wanted = name.strip().lower().replace("_", "-")
    if wanted not in TARGETS:
        import difflib

        near = difflib.get_close_matches(wanted, TARGETS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"targets: {', '.join(TARGETS)}"
        raise UsageError(f"no export is called {name[:80]!r}", hint=hint)
    return TARGETS[wanted]


def export(target: str, job: Job) -> Exported:
    """The consumer's file of a job. Raises UsageError where the consumer cannot do the job's plan, and says which can."""
    consumer = find(target)
    if consumer.cannot(job) is not None:
        raise _refusal(consumer, job)
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
    """What holds for every consumer: whose behaviour was estimated, and what a file cannot set."""
    notes = left_out(job)
    readers = ("deepspeed", job.plan.framework)  # accelerate and the Trainer read DeepSpeed's file
    runs_it = consumer.framework in readers
    if job.plan.prepared and not runs_it:
        notes.append(f"the prediction is of {FRAMEWORKS[job.plan.framework]}, which {consumer.name} does not run")
    if job.environment and not consumer.command:
        notes.append("launch it with " + with_environment(job, "...").removesuffix(" ..."))
    return notes


def _refusal(consumer: Target, job: Job) -> UsageError:
    able = [t.name for t in _ALL if t.cannot(job) is None]
    return UsageError(
        f"{consumer.name} cannot do {job.what}: {consumer.cannot(job)}",
        hint=f"those that can: {', '.join(able)}",
    )
