"""A folder with every file that a launch needs: configuration, script, launch scripts, hosts, and a README."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsdp_advisor.errors import UsageError
from fsdp_advisor.export import (
    accelerate,
    axolotl,
    check_supported,
    deepspeed,
    launch,
    llamafactory,
    script,
    trainer,
    trl,
)
from fsdp_advisor.export.adapters import packages as adapting_packages
from fsdp_advisor.export.batches import batch_limit
from fsdp_advisor.export.constants import (
    ACCELERATE_FILE,
    ARGUMENTS_FILE,
    AXOLOTL_FILE,
    DEEPSPEED_ENVIRONMENT_FILE,
    DEEPSPEED_FILE,
    HOST_FILE,
    LINES_FILE,
    LLAMAFACTORY_FILE,
    NVME_NOTE,
    PACKAGES,
    README_FILE,
    SCRIPT,
    SLURM_FILE,
    TRL_FILE,
    VERSIONS,
    Consumer,
)
from fsdp_advisor.export.header import plan_items, prediction_items, printable_line
from fsdp_advisor.export.job import Job
from fsdp_advisor.export.losses import loss_limit
from fsdp_advisor.export.rendering import render
from fsdp_advisor.export.scripts import training_script
from fsdp_advisor.export.target import Target, with_environment

_LAUNCH_SCRIPTS: dict[Consumer, str] = {
    "torch": "torchrun.sh",
    "trainer": "torchrun.sh",
    "accelerate": "accelerate-launch.sh",
    "deepspeed": "deepspeed-launch.sh",
    "axolotl": launch.AXOLOTL_SCRIPT,
    "trl": "torchrun.sh",
    "llamafactory": "torchrun.sh",
}
"""Consumer -> its launch script."""

_NO_MODEL = "a bare parameter count is not a model to launch"
_WITHOUT_SCRIPT: tuple[Consumer, ...] = ("axolotl", "trl", "llamafactory")
"""Consumers that have training scripts of their own."""

_CONTENT = {
    ACCELERATE_FILE: "the configuration of accelerate",
    DEEPSPEED_FILE: "the configuration of DeepSpeed, which has no comments: its plan is below",
    ARGUMENTS_FILE: "the arguments of the Trainer",
    AXOLOTL_FILE: "the configuration of axolotl, with an example data set to replace",
    LLAMAFACTORY_FILE: "the configuration of LLaMA-Factory, with an example data set to replace",
    TRL_FILE: "the configuration of TRL's {task}, with an example data set to replace",
    SCRIPT: "the training script; --help lists its options",
    LINES_FILE: "the lines to add to your own script, which is to be train.py",
    SLURM_FILE: "the batch script for Slurm: `sbatch train.sbatch`",
    HOST_FILE: "the host names of the nodes, to be replaced by your own",
    DEEPSPEED_ENVIRONMENT_FILE: "the environment variables that DeepSpeed's launcher sets on the other nodes",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleFile:
    """One file of a bundle. Launch scripts are executable."""

    name: str
    text: str

    @property
    def executable(self) -> bool:
        return self.name.endswith(".sh")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    """The files that launch a job, README last, and notes on what they cannot express."""

    files: tuple[BundleFile, ...]
    notes: tuple[str, ...]


def bundle(target: Target, job: Job) -> Bundle:
    """Every file that launches the job with a target's consumer.

    Raises UsageError if the target cannot train the job, and for a bare parameter count, which has no model to train.
    """
    check_supported(target, job)
    if job.task is None:
        raise UsageError(_NO_MODEL, hint="-o FILE writes the configuration alone")
    consumer = _consumer(target, job)
    starter = _LAUNCH_SCRIPTS[consumer]
    files = {
        **_configuration(job, consumer),
        **_script(job, consumer, with_environment(job, f"bash {starter}")),
        starter: launch.launch_script(job, starter, consumer, target.name),
        **_several_nodes(job, consumer, target),
    }
    notes = tuple(_notes(job, consumer))
    files[README_FILE] = _readme(job, consumer, starter, tuple(files), notes, target)
    return Bundle(files=tuple(BundleFile(name=name, text=text) for name, text in files.items()), notes=notes)


def _notes(job: Job, consumer: Consumer) -> Iterator[str]:
    """Notes on settings that the files cannot express, and on values that the user has to replace."""
    if consumer in ("trl", "llamafactory"):
        yield from (trl if consumer == "trl" else llamafactory).notes(job)
        return
    if consumer in ("accelerate", "trainer", "axolotl"):
        yield from accelerate.difference_notes(job.plan)
    if consumer == "axolotl":
        yield axolotl.DATASETS_NOTE
    if job.offloads_to_nvme:
        yield NVME_NOTE


def start_command(target: Target, job: Job, folder: str) -> str:
    """The command that starts the job from a bundle's folder."""
    if target.name == "sbatch":
        return f"cd {folder} && sbatch {SLURM_FILE}"
    consumer = _consumer(target, job)
    one_node = job.plan.nnodes == 1 or consumer == "deepspeed"  # DeepSpeed's launcher starts the other nodes itself
    return f"bash {folder}{_LAUNCH_SCRIPTS[consumer]}" + (
        "" if one_node else f"  # on each of the {job.plan.nnodes} nodes"
    )


def _consumer(target: Target, job: Job) -> Consumer:
    """The consumer of a target. A launcher or a DeepSpeed file serves the framework that was estimated."""
    return target.consumer or launch.consumer_of(job.plan)


def _configuration(job: Job, consumer: Consumer) -> dict[str, str]:
    match consumer:
        case "accelerate":
            needs_file = job.plan.backend == "deepspeed" and accelerate.needs_a_file(job.plan)
            files = {ACCELERATE_FILE: accelerate.write(job)[0]}
            return files | ({DEEPSPEED_FILE: deepspeed.write(job)[0]} if needs_file else {})
        case "deepspeed":
            return {DEEPSPEED_FILE: deepspeed.write(job)[0]}
        case "trainer":
            return {ARGUMENTS_FILE: trainer.write(job)[0]}
        case "axolotl":
            return {AXOLOTL_FILE: axolotl.write(job)[0]}
        case "llamafactory":
            return {LLAMAFACTORY_FILE: llamafactory.write(job)[0]}
        case "trl":
            return {TRL_FILE: trl.write(job)[0]}
        case "torch":
            return {}


def script_limit(target: Target, job: Job) -> str | None:
    """Why a target has no bundle that trains the job; None if it has one."""
    if job.task is None:
        return _NO_MODEL
    return _script_limit(job, _consumer(target, job))


def _script_limit(job: Job, consumer: Consumer) -> str | None:
    if consumer in _WITHOUT_SCRIPT:
        return None
    if (reason := loss_limit(job, "liger") or batch_limit(job)) is not None:
        return reason
    complete = _complete(job, consumer)
    return None if complete is None else complete.limit(job)


def _complete(job: Job, consumer: Consumer) -> Target | None:
    """The target that is a whole script of PyTorch for this job; None if there is none."""
    if consumer != "torch" or job.plan.backend not in ("fsdp2", "ddp"):
        return None
    return script.FSDP2 if job.plan.backend == "fsdp2" else script.DDP


def _script(job: Job, consumer: Consumer, start: str) -> dict[str, str]:
    if consumer in _WITHOUT_SCRIPT:
        return {}
    if (reason := _script_limit(job, consumer)) is not None:
        raise UsageError(f"no script can train {job.strategy}: {reason}", hint="-o FILE writes the target's file alone")
    complete = _complete(job, consumer)
    return dict([training_script(job, consumer, start)]) if complete is None else {SCRIPT: complete.write(job)[0]}


def _several_nodes(job: Job, consumer: Consumer, target: Target) -> dict[str, str]:
    """The batch script for Slurm, and the files of DeepSpeed's launcher, by name. Empty unless there are several nodes or Slurm is the
    target.
    """
    plan = job.plan
    files = {}
    if plan.nnodes > 1 or target.name == "sbatch":
        files[SLURM_FILE] = launch.launch_script(job, SLURM_FILE, consumer, target.name)
    if plan.nnodes > 1 and consumer == "deepspeed":
        nodes = range(1, plan.nnodes + 1)
        files[HOST_FILE] = "".join(f"node-{number} slots={plan.ranks_per_node}\n" for number in nodes)
        if job.environment:
            lines = (f"{name}={value}\n" for name, value in job.environment.items())
            files[DEEPSPEED_ENVIRONMENT_FILE] = "".join(lines)
    return files


def _readme(
    job: Job, consumer: Consumer, starter: str, files: tuple[str, ...], notes: tuple[str, ...], target: Target
) -> str:
    plan = job.plan
    described = {name: text.format(task=job.plan.task) for name, text in _CONTENT.items()}
    content = {**described, starter: f"the launch script: `bash {starter}`"}
    return render(
        "README.md.jinja",
        title=printable_line(job.title),
        starter=starter,
        slurm=SLURM_FILE if SLURM_FILE in files else None,
        nodes=plan.nnodes,
        ranks_per_node=plan.ranks_per_node,
        by_hosts=HOST_FILE in files,
        environment=dict(job.environment),
        files=[(name, content[name]) for name in files],
        plan=[(name, printable_line(value)) for name, value in plan_items(job)],
        prediction=[(name, printable_line(value)) for name, value in prediction_items(job)],
        not_modelled=[printable_line(item) for item in job.not_modelled],
        notes=[printable_line(note) for note in notes],
        versions=[(package, VERSIONS[package]) for package in (*PACKAGES[consumer], *adapting_packages(job))],
        command=printable_line(job.command(target.name, "DIR/")),
    )
