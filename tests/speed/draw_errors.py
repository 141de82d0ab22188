"""The errors of the time model over all published runs: as a table, and drawn against size, GPUs and sequence.

Run: python tests/speed/draw_errors.py [FILE.svg]    writes errors.csv beside this script, and the drawing (needs matplotlib)
"""

from __future__ import annotations

import csv
import importlib
import io
import sys
from pathlib import Path
from typing import Any

from published_runs import Row, said

from fsdp_advisor.speed import StepTime, step_time

TABLE = Path(__file__).with_name("errors.csv")
COLUMNS = (
    "id", "part", "source", "model", "parameters", "gpu", "gpus", "strategy", "backend", "offload", "precision", "micro_batch",
    "seq_len", "checkpointing", "measured_s", "predicted_s", "error_percent",
)  # fmt: skip
AXES = (
    ("parameters", "parameters"),
    ("gpus", "GPUs"),
    ("seq_len", "tokens per sequence"),
    ("micro_batch", "micro-batch"),
)


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


def draw(path: Path) -> None:
    """Signed error against each axis, one point per run."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    rows = list(csv.DictReader(io.StringIO(table())))
    figure, axes = pyplot.subplots(1, len(AXES), figsize=(16, 4.5), layout="constrained", sharey=True)
    for axis, (name, label) in zip(axes, AXES, strict=True):
        for part, marker in (("fitted", "x"), ("judged", "o")):
            own = [r for r in rows if r["part"] == part]
            xs, ys = [float(r[name]) for r in own], [float(r["error_percent"]) for r in own]
            axis.scatter(xs, ys, marker=marker, s=22, alpha=0.7, label=f"{part} ({len(own)})")
        axis.axhspan(-30, 30, alpha=0.08)
        axis.axhspan(-15, 15, alpha=0.12)
        axis.set(xscale="log", xlabel=label)
    axes[0].set_ylabel("error of the step's time, %")
    axes[0].legend()
    figure.savefig(path)


if __name__ == "__main__":
    TABLE.write_text(table())
    for name in sys.argv[1:]:
        draw(Path(name))
