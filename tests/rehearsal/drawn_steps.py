"""Rehearses the drawn jobs again: `PYTHONPATH=. REHEARSAL_PYTHON=... python tests/rehearsal/drawn_steps.py`.

Each line of drawn_steps.jsonl is a job of TRL's or the Trainer's own code: the script that ran it, the model's configuration, the settings
of the script, the same as options of an estimate, and the peaks that were found. Task, model, engine, precision, adapters, checkpointing,
accumulation, evaluation and sizes were drawn independently.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from warm_process import Warm

PATH = Path(__file__).with_suffix(".jsonl")


def read_jobs() -> list[dict[str, Any]]:
    """The jobs with their peaks; `evaluated_bytes` is 0 for a job without evaluation."""
    return [json.loads(line) for line in PATH.read_text(encoding="utf-8").splitlines()]


def rehearsed(warm: Warm, job: dict[str, Any]) -> dict[str, int]:
    """The peaks of a job, which runs now."""
    words = [json.dumps(job["config"]), json.dumps(job["settings"])]
    with tempfile.TemporaryDirectory() as folder:
        printed = warm.run_ranks(job["script"], words, Path(folder), job["options"].get("gpus", 1))
    found = json.loads(re.findall(r'\{"(?:rank|x)".*?\}', printed)[0])
    evaluated = found.pop("evaluated", 0)
    peaks = [n_bytes for name, n_bytes in found.items() if name not in ("rank", "reserved")]
    return {"allocated_bytes": max(peaks), "evaluated_bytes": evaluated}


def main() -> None:
    warm = Warm(Path(os.environ["REHEARSAL_PYTHON"]))
    jobs = [{**job, **rehearsed(warm, job)} for job in read_jobs()]
    warm.process.communicate()
    PATH.write_text("".join(json.dumps(job) + "\n" for job in jobs), encoding="utf-8")


if __name__ == "__main__":
    main()
