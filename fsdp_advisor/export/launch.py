"""Launch scripts (shell) for torchrun, accelerate, deepspeed, axolotl and Slurm, on one node or several.

Source: torch.distributed.run (torch 2.13), accelerate/commands/launch.py (1.15.0), deepspeed/launcher/runner.py (0.19.8),
axolotl/cli/main.py (0.19.0).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from fsdp_advisor.errors import assert_never
from fsdp_advisor.export import accelerate, deepspeed
from fsdp_advisor.export.batches import script_batch_limit
from fsdp_advisor.export.constants import (
    ACCELERATE_FILE,
    ACCELERATE_PORT,
    AXOLOTL_FILE,
    DEEPSPEED_FILE,
    LLAMAFACTORY_FILE,
    PACKAGES,
    RENDEZVOUS_PORT,
    SCRIPT,
    SLURM_FILE,
    TRL_FILE,
    Consumer,
)
from fsdp_advisor.export.header import header, printable_line
from fsdp_advisor.export.job import Job
from fsdp_advisor.export.losses import script_loss_limit
from fsdp_advisor.export.rendering import render
from fsdp_advisor.export.target import Target
from fsdp_advisor.job.choices import Framework, TrainingTask
from fsdp_advisor.job.plan import Plan

AXOLOTL_SCRIPT = "axolotl.sh"


def consumer_of(plan: Plan) -> Consumer:
    """The library whose loop trains the plan by default."""
    match plan.framework:
        case "accelerate" | "trainer" | "trl" | "axolotl":
            return plan.framework
        case "llamafactory":  # its file cannot describe FSDP
            return "trainer" if plan.backend in ("fsdp1", "fsdp2") else "llamafactory"
        case "torch" | "deepspeed" | "torchtitan":
            return "deepspeed" if plan.backend == "deepspeed" else "torch"
        case _:
            assert_never(plan.framework)


def program(consumer: Consumer, task: TrainingTask) -> str:
    """The words of a torchrun command after torchrun's own options: the program of the consumer. TRL has a script for each task."""
    match consumer:
        case "torch" | "trainer" | "accelerate":
            return SCRIPT
        case "deepspeed":
            return f"{SCRIPT} --deepspeed {DEEPSPEED_FILE}"
        case "axolotl":
            return f"-m axolotl.cli.train {AXOLOTL_FILE}"
        case "trl":
            return f"-m trl.scripts.{task} --config {TRL_FILE}"
        case "llamafactory":
            return f"-m llamafactory.launcher {LLAMAFACTORY_FILE}"
        case _:
            assert_never(consumer)


def torchtitan_line(plan: Plan) -> str:
    """The command that starts torchtitan with the plan's batch and sharding. MODULE and CONFIG name the user's own function in Python.

    Source: torchtitan 0.3.0, config/manager.py and config/configs.py. Checkpointing is an argument of that function.
    """
    resharded = "always" if plan.reshards else "never"
    options = {
        "training.local_batch_size": plan.micro_batch_size,
        "training.global_batch_size": plan.global_batch_size,
        "training.seq_len": plan.seq_len,
        "parallelism.data_parallel_replicate_degree": plan.replica_degree,
        "parallelism.data_parallel_shard_degree": plan.shard_degree,
        "parallelism.fsdp_reshard_after_forward": resharded,
    }
    words = " ".join(f"--{name} {value}" for name, value in options.items())
    words += " --training.disable_cuda_graphs" * (not plan.captures_graph)
    start = f"torchrun --nnodes {plan.nnodes} --nproc-per-node {plan.ranks_per_node} -m torchtitan.train"
    return f"{start} --module MODULE --config CONFIG {words}"


def launch_script(job: Job, file_name: str, consumer: Consumer, target: str) -> str:
    """The text of a launch script. `target` is the export that writes the files next to it."""
    plan = job.plan
    return render(
        f"{file_name}.jinja",
        header=header(job, *PACKAGES[consumer]),
        script=SCRIPT,
        program=program(consumer, plan.task),
        consumer=consumer,
        bundle=printable_line(job.command(target, "DIR/")),
        nodes=plan.nnodes,
        ranks_per_node=plan.ranks_per_node,
        world_size=plan.world_size,
        rendezvous_port=RENDEZVOUS_PORT,
        port=ACCELERATE_PORT,
        accelerate_file=ACCELERATE_FILE,
        axolotl_file=AXOLOTL_FILE,
        deepspeed_file=DEEPSPEED_FILE,
        environment=dict(job.environment),
        job_name=re.sub(r"[^A-Za-z0-9._-]+", "-", job.model_name).strip("-.")[-60:] or "train",
    )


def _any_script(job: Job) -> str | None:
    """Why torchrun cannot launch the job: accelerate's settings reach a script only through accelerate's launcher. None for other jobs."""
    if job.plan.framework == "accelerate":
        return "a script reads accelerate's configuration only under `accelerate launch`; use accelerate-launch"
    return script_loss_limit(job) or script_batch_limit(job)


def _any_launcher(job: Job) -> str | None:
    """Why no launcher can start a training script for the job; None if one can. Slurm can start every launcher."""
    return script_loss_limit(job) or script_batch_limit(job)


def _target(
    name: str, description: str, file_name: str, *, starts_with: str = "bash",
    unsupported: Callable[[Job], str | None], backend: str | None = None, framework: Framework = "torch",
    consumer: Consumer | None = None, place: str = "its own folder",
) -> Target:  # fmt: skip
    def write(job: Job) -> tuple[str, tuple[str, ...]]:
        text = launch_script(job, file_name, consumer or consumer_of(job.plan), name)
        return text, (f"it starts {SCRIPT} in {place} and passes its command-line arguments on to it",)

    return Target(
        name=name,
        description=description,
        file_name=file_name,
        media_type="text/x-shellscript",
        unsupported=unsupported,
        write=write,
        usage=lambda job, file: f"{starts_with} {file}",
        consumer=consumer,
        backend=backend,
        framework=framework,
    )


TORCHRUN = _target("torchrun", "torchrun launch line (shell)", "torchrun.sh", unsupported=_any_script)
ACCELERATE = _target(
    "accelerate-launch", "accelerate launch line (shell)", "accelerate-launch.sh",
    unsupported=accelerate.config_unsupported, framework="accelerate", consumer="accelerate",
)  # fmt: skip
DEEPSPEED = _target(
    "deepspeed-launch", "deepspeed launch line (shell)", "deepspeed-launch.sh",
    unsupported=deepspeed.unsupported, backend="deepspeed", framework="deepspeed",
)  # fmt: skip
SBATCH = _target(
    "sbatch", "Slurm batch script (shell)", SLURM_FILE, starts_with="sbatch", unsupported=_any_launcher,
    place="the folder where it is submitted",
)  # fmt: skip
