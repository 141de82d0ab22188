"""A batch script for Slurm around a measurement."""

from __future__ import annotations

import shlex
from typing import Any

from fsdp_advisor.job.request import EstimateRequest, dashed


def sbatch_example(request: EstimateRequest, **run: Any) -> str:
    """A batch script that measures the request under Slurm, one torchrun per node; `run` are options of `validate` itself.

    Rank 0 writes the record. `--kill-on-bad-exit` ends the other nodes' ranks with one that dies, which srun else waits for.
    """
    per_node = request.gpus // request.nnodes
    on_cpu = run.get("device") == "cpu"
    options: list[str] = []
    for name, value in {**request.changed, **run}.items():
        if value is not None:
            options += [dashed(name), *([] if value is True else [str(value)])]
    measure = "-m fsdp_advisor validate --rung measure"
    return f"""#!/bin/bash
#SBATCH --job-name=fsdp-advisor
#SBATCH --nodes={request.nnodes}
#SBATCH --ntasks-per-node=1
#SBATCH --{"cpus-per-task" if on_cpu else "gpus-per-node"}={per_node}
#SBATCH --time=00:30:00
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 torchrun --nnodes={request.nnodes} --nproc-per-node={per_node} --rdzv-backend=c10d \\
  --rdzv-endpoint="$head:$((20000 + SLURM_JOB_ID % 10000))" --rdzv-id="$SLURM_JOB_ID" \\
  {measure} \\
  {shlex.join(options)}
# Without torchrun: --ntasks-per-node={per_node} above, and srun --kill-on-bad-exit=1 python {measure} ...
"""
