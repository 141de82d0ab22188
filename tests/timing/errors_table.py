"""The errors of the time model over all published runs: the table that ships with the package, and the README's drawing of it.

Run: python tests/timing/errors_table.py    writes both
"""

from __future__ import annotations

import csv
import io
from pathlib import Path

from published_runs import Row, predictable_rows

from fsdp_advisor.engines.registry import step_program
from fsdp_advisor.render.svg import speed_errors
from fsdp_advisor.timing import StepTime, step_time
from fsdp_advisor.validation import published

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "fsdp_advisor" / "validation" / "published.csv"
DRAWING = ROOT / "web" / "screenshots" / "speed-errors.svg"


def compared() -> list[tuple[Row, StepTime]]:
    found = [
        (row, step_time(row.profile, step_program(row.profile, row.tape, row.plan), row.plan, row.gpu, row.between))
        for row in predictable_rows()
    ]
    return [(row, step) for row, step in found if step is not None]


def table() -> str:
    """The table as CSV: one line per published run that `estimate` can describe."""
    out = io.StringIO()
    writer = csv.DictWriter(out, published.COLUMNS, lineterminator="\n")
    writer.writeheader()
    for row, step in compared():
        p = row.plan
        writer.writerow(
            {
                "id": row.id,
                "part": row.part,
                "source": row.source,
                "model": row.model,
                "parameters": row.profile.parameters,
                "gpu": row.gpu.name,
                "gpus": p.world_size,
                "strategy": p.strategy,
                "backend": p.backend,
                "offload": p.offload,
                "precision": p.precision,
                "micro_batch": p.micro_batch_size,
                "seq_len": p.seq_len,
                "checkpointing": row.checkpointing,
                "measured_s": f"{row.measured_seconds:.4g}",
                "predicted_s": f"{step.seconds:.4g}",
                "low_s": f"{step.low_seconds:.4g}",
                "high_s": f"{step.high_seconds:.4g}",
                "error_percent": f"{100 * (step.seconds / row.measured_seconds - 1):+.1f}",
                "caveats": "; ".join(caveat.about for caveat in step.caveats),
            }
        )
    return out.getvalue()


def drawing() -> str:
    """The table drawn, as SVG."""
    return speed_errors(published.points(published.read(TABLE.read_text(encoding="utf-8")))) + "\n"


if __name__ == "__main__":
    TABLE.write_text(table(), encoding="utf-8")
    DRAWING.write_text(drawing(), encoding="utf-8")
