"""Takes the steps of one case of the kept campaign: python kept_case.py JOB.json. A rehearsal's meter counts them.

The job is a plan, a model's configuration and its task, because this environment need not be able to predict.
"""

import json
import os
import sys
from pathlib import Path

import torch

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.recording.adapted import source_of
from fsdp_advisor.rehearsal.inside import meter
from fsdp_advisor.validation.gpu_memory import measure_baseline
from fsdp_advisor.validation.stand_in import stand_in


def main(path: Path) -> None:
    """Run the case in this process, which may be a fork of one that imported torch before the rehearsal's folder was known."""
    job = json.loads(path.read_text())
    plan = Plan(**{**job["plan"], "mesh": Mesh(**job["plan"]["mesh"])})
    os.environ["REHEARSAL_FOLDER"] = job["folder"]
    metered = meter.install(torch)
    assert metered is not None
    error: BaseException | None = None
    try:
        stand_in(source_of(job["config"], name=job["name"], task=job["task"]), plan, baseline=measure_baseline(0))
    except torch.OutOfMemoryError as ran_out:
        error = ran_out
        metered.error = str(ran_out)
    metered.write_at_exit()
    assert (error is not None) == job["runs_out"], error


main(Path(sys.argv[1]))
