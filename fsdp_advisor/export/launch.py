"""Launch scripts (shell) for torchrun, accelerate, deepspeed and Slurm, on one node or several.

Source: torch.distributed.run (torch 2.13), accelerate/commands/launch.py (1.15.0), deepspeed/launcher/runner.py (0.19.8).
"""

from __future__ import annotations

import re
from collections.abc import Callable

from fsdp_advisor.export import accelerate, deepspeed
from fsdp_advisor.export.constants import ACCELERATE_FILE, ACCELERATE_PORT, DEEPSPEED_FILE, RENDEZVOUS_PORT, SCRIPT
from fsdp_advisor.export.header import header
from fsdp_advisor.export.job import Job
from fsdp_advisor.export.rendering import render
from fsdp_advisor.export.target import Target
from fsdp_advisor.job.request import Framework


def _write(job: Job, template: str, checked: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    plan = job.plan
    text = render(
        template,
        header=header(job, *checked),
        script=SCRIPT,
        nodes=plan.nnodes,
        ranks_per_node=plan.ranks_per_node,
        world_size=plan.world_size,
        rendezvous_port=RENDEZVOUS_PORT,
        port=ACCELERATE_PORT,
        accelerate_file=ACCELERATE_FILE,
        deepspeed_file=DEEPSPEED_FILE,
        environment=dict(job.environment),
        job_name=re.sub(r"[^A-Za-z0-9._-]+", "-", job.model_name).strip("-.")[-60:] or "train",
    )
    return text, (f"it starts {SCRIPT} and passes its own command-line arguments on to it",)


def _all_supported(job: Job) -> None:
    """A launcher that starts any script supports every job."""


def _target(
    name: str, description: str, file_name: str, *packages: str, starts_with: str = "bash",
    unsupported: Callable[[Job], str | None] = _all_supported, backend: str | None = None, framework: Framework = "torch",
) -> Target:  # fmt: skip
    return Target(
        name=name,
        description=description,
        file_name=file_name,
        media_type="text/x-shellscript",
        checked=packages,
        unsupported=unsupported,
        write=lambda job: _write(job, f"{file_name}.jinja", packages),
        usage=lambda job, file: f"{starts_with} {file}",
        backend=backend,
        framework=framework,
    )


TORCHRUN = _target("torchrun", "torchrun launch line (shell)", "torchrun.sh", "torch")
ACCELERATE = _target(
    "accelerate-launch", "accelerate launch line (shell)", "accelerate-launch.sh", "accelerate", "torch",
    unsupported=accelerate.unsupported, framework="accelerate",
)  # fmt: skip
DEEPSPEED = _target(
    "deepspeed-launch", "deepspeed launch line (shell)", "deepspeed-launch.sh", "deepspeed", "torch",
    unsupported=deepspeed.unsupported, backend="deepspeed", framework="deepspeed",
)  # fmt: skip
SBATCH = _target("sbatch", "Slurm batch script (shell)", "train.sbatch", "torch", starts_with="sbatch")
