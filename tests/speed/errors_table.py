"""The errors of the time model over all published runs, as a table.

Run: python tests/speed/errors_table.py    writes errors.csv beside this script
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from published_runs import Row, said

from fsdp_advisor.speed import StepTime, step_time

TABLE = Path(__file__).with_name("errors.csv")
COLUMNS = (
    "id", "part", "source", "model", "parameters", "gpu", "gpus", "strategy", "backend", "offload", "precision", "micro_batch",
    "seq_len", "checkpointing", "measured_s", "predicted_s", "error_percent",
)  # fmt: skip


def compared() -> list[tuple[Row, StepTime]]:
    found = [(row, step_time(row.profile, row.tape, row.plan, row.gpu, row.between)) for row in said()]
    return [(row, step) for row, step in found if step is not None]


def table() -> str:
    """One line per published run that can be said, as CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row, step in compared():
        p = row.plan
        writer.writerow(
            (
                row.id,
                row.part,
                row.source,
                row.model,
                row.profile.parameters,
                row.gpu.name,
                p.world_size,
                p.strategy,
                p.backend,
                p.offload,
                p.precision,
                p.micro_batch_size,
                p.seq_len,
                row.checkpointing,
                f"{row.measured_seconds:.4g}",
                f"{step.seconds:.4g}",
                f"{100 * (step.seconds / row.measured_seconds - 1):+.1f}",
            )
        )
    return out.getvalue()


if __name__ == "__main__":
    TABLE.write_text(table())
