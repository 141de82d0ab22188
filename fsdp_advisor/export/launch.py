"""Launch lines, as shell scripts: torchrun, accelerate, deepspeed and Slurm, on one node or several.

Source: torch.distributed.run (torch 2.13), accelerate/commands/launch.py (1.15.0), deepspeed/launcher/runner.py (0.19.8).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from fsdp_advisor.export import accelerate, deepspeed
from fsdp_advisor.export.job import Job, Target, comments, header
from fsdp_advisor.export.rendering import render
from fsdp_advisor.job.request import Framework

SCRIPT = "train.py"
RENDEZVOUS_PORT = 29400


def _write(job: Job, template: str, checked: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    plan = job.plan
    text = render(
        template,
        header=comments(header(job, *checked)),
        script=SCRIPT,
        nodes=plan.nnodes,
        ranks_per_node=plan.ranks_per_node,
        world_size=plan.world_size,
        rendezvous_port=RENDEZVOUS_PORT,
        port=accelerate.PORT,
        accelerate_file=accelerate.TARGET.file_name,
        deepspeed_file=deepspeed.FILE,
        environment=dict(job.environment),
        job_name=re.sub(r"[^A-Za-z0-9._-]+", "-", job.model_name).strip("-.")[-60:] or "train",
    )
    return text, (f"it starts {SCRIPT}; what follows the script's name on the command line is handed to it",)


def _anything(job: Job) -> None:
    return None


def _target(
    name: str, description: str, file_name: str, *packages: str, starts_with: str = "bash",
    cannot: Callable[[Job], str | None] = _anything, backend: str | None = None, framework: Framework = "torch",
) -> Target:  # fmt: skip
    return Target(
        name=name,
        description=description,
        file_name=file_name,
        media_type="text/x-shellscript",
        checked=packages,
        cannot=cannot,
        write=lambda job: _write(job, f"{file_name}.jinja", packages),
        usage=lambda job, file: f"{starts_with} {file}",
        backend=backend,
        framework=framework,
    )


TORCHRUN = _target("torchrun", "torchrun launch line (shell)", "torchrun.sh", "torch")
ACCELERATE = _target(
    "accelerate-launch", "accelerate launch line (shell)", "accelerate-launch.sh", "accelerate", "torch",
    cannot=accelerate.cannot, framework="accelerate",
)  # fmt: skip
DEEPSPEED = _target(
    "deepspeed-launch", "deepspeed launch line (shell)", "deepspeed-launch.sh", "deepspeed", "torch",
    cannot=deepspeed.cannot, backend="deepspeed", framework="deepspeed",
)  # fmt: skip
SBATCH = _target("sbatch", "Slurm batch script (shell)", "train.sbatch", "torch", starts_with="sbatch")
