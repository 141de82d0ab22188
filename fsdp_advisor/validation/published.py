"""The errors of the time model against published training runs, as they ship: the table, and the drawing of it. Imports no torch.

`tests/speed/errors_table.py` writes `published.csv` from the runs as published and what the model says of each.
"""

from __future__ import annotations

import csv
import statistics
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import get_type_hints

from fsdp_advisor.render.svg import ErrorPoint

TABLE = Path(__file__).with_name("published.csv")
BOUNDS = (15, 30)
"""Errors in percent that are counted and drawn as bands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One published run beside its prediction: a line of the table, whose columns are these fields.

    `part` says what its source is for: on the `fitted` ones constants of the model were chosen, the others judge it.
    `doubts` is what the estimate itself says against its step time, in the few words of `speed.trust`.
    """

    id: str
    part: str
    source: str
    model: str
    parameters: int
    gpu: str
    gpus: int
    strategy: str
    backend: str
    offload: str
    precision: str
    micro_batch: int
    seq_len: int
    checkpointing: str
    measured_s: float
    predicted_s: float
    low_s: float
    high_s: float
    error_percent: float
    doubts: str

    @property
    def point(self) -> ErrorPoint:
        return ErrorPoint(
            label=(
                f"{self.model}, {self.strategy} by {self.backend} on {self.gpus} x {self.gpu}, {self.seq_len:,} tokens: "
                f"{self.predicted_s:g} s predicted, {self.measured_s:g} s measured, {self.error_percent:+.1f} % ({self.source})"
            ),
            error_percent=self.error_percent,
            judges=self.part == "judged",
            doubts=tuple(filter(None, self.doubts.split("; "))),
            parameters=self.parameters,
            gpus=self.gpus,
            seq_len=self.seq_len,
        )


COLUMNS = tuple(field.name for field in fields(PublishedRun))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Errors of one part by size, in percent: their median, and how many are within each of BOUNDS."""

    part: str
    runs: int
    median_percent: float
    within: tuple[int, ...]


@lru_cache(maxsize=1)
def runs() -> tuple[PublishedRun, ...]:
    """Every line of the table that ships."""
    return read(TABLE.read_text(encoding="utf-8"))


def read(table: str) -> tuple[PublishedRun, ...]:
    """The lines of a table."""
    kinds = get_type_hints(PublishedRun)
    rows = csv.DictReader(table.splitlines())
    return tuple(PublishedRun(**{name: kinds[name](text) for name, text in row.items()}) for row in rows)


def summaries() -> tuple[Summary, ...]:
    """The judged part first: it is what counts."""
    found = []
    for part in ("judged", "fitted"):
        errors = [abs(run.error_percent) for run in runs() if run.part == part]
        within = tuple(sum(error <= bound for error in errors) for bound in BOUNDS)
        found.append(
            Summary(part=part, runs=len(errors), median_percent=round(statistics.median(errors), 1), within=within)
        )
    return tuple(found)
