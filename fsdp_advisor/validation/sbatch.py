"""A batch script that runs a measurement under Slurm."""

from __future__ import annotations

import shlex
from typing import Any

from fsdp_advisor.job.fields import as_words, fields_of
from fsdp_advisor.job.request import EstimateRequest


def sbatch_example(request: EstimateRequest, **options: Any) -> str:
    """A batch script that measures the request under Slurm, with one torchrun per node. `options` are those of `validate`.

    Rank 0 writes the record. `--kill-on-bad-exit` ends all nodes if the ranks of one fail; otherwise srun would wait.
    """
    per_node = request.gpus // request.nnodes
    resource = "cpus-per-task" if options.get("device") == "cpu" else "gpus-per-node"
    known = fields_of(EstimateRequest)
    job = {name: known[name].written(value) for name, value in request.changed.items()}
    words = [word for name, value in {**job, **options}.items() for word in as_words(name, value)]
    measure = "-m fsdp_advisor validate --mode measure"
    return f"""#!/bin/bash
#SBATCH --job-name=fsdp-advisor
#SBATCH --nodes={request.nnodes}
#SBATCH --ntasks-per-node=1
#SBATCH --{resource}={per_node}
#SBATCH --time=00:30:00
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 torchrun --nnodes={request.nnodes} --nproc-per-node={per_node} --rdzv-backend=c10d \\
  --rdzv-endpoint="$head:$((20000 + SLURM_JOB_ID % 10000))" --rdzv-id="$SLURM_JOB_ID" \\
  {measure} \\
  {shlex.join(words)}
# Without torchrun: --ntasks-per-node={per_node} above, and srun --kill-on-bad-exit=1 python {measure} ...
"""
