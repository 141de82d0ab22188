"""The errors of predicted step times against published training runs, from `published.csv`. Imports no torch.

`tests/timing/errors_table.py` writes the file from the published runs and the predictions.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import get_type_hints

from fsdp_advisor.render.svg import ErrorPoint

TABLE = Path(__file__).with_name("published.csv")
BOUNDS = (15, 30)
"""Errors in percent within which runs are counted and drawn as bands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedRun:
    """One published run and its prediction. The fields are the columns of the table.

    `part`: `fitted` if constants of the time model were chosen with this run, `older` if its libraries are older than those with which the
    GPU's rates were measured, else `judged`. `caveats`: the caveats that the estimate itself gives for its step time, separated by
    semicolons.
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
    caveats: str

    @property
    def point(self) -> ErrorPoint:
        return ErrorPoint(
            label=(
                f"{self.model}, {self.strategy} by {self.backend} on {self.gpus} x {self.gpu}, {self.seq_len:,} tokens: "
                f"{self.predicted_s:g} s predicted, {self.measured_s:g} s measured, {self.error_percent:+.1f} % ({self.source})"
            ),
            error_percent=self.error_percent,
            judges=self.part == "judged",
            caveats=tuple(filter(None, self.caveats.split("; "))),
            parameters=self.parameters,
            gpus=self.gpus,
            seq_len=self.seq_len,
        )


COLUMNS = tuple(field.name for field in fields(PublishedRun))


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Absolute errors of one part in percent: their median, and how many are within each of BOUNDS."""

    part: str
    runs: int
    median_percent: float
    within: tuple[int, ...]


@lru_cache(maxsize=1)
def runs() -> tuple[PublishedRun, ...]:
    """All runs of the table."""
    return read(TABLE.read_text(encoding="utf-8"))


def read(table: str) -> tuple[PublishedRun, ...]:
    """The runs of a table in CSV."""
    kinds = get_type_hints(PublishedRun)
    rows = csv.DictReader(table.splitlines())
    return tuple(PublishedRun(**{name: kinds[name](text) for name, text in row.items()}) for row in rows)


def points(drawn: Iterable[PublishedRun]) -> list[ErrorPoint]:
    """The points of a drawing of these runs. Those with older libraries are left out."""
    return [run.point for run in drawn if run.part != "older"]


def summaries() -> tuple[Summary, ...]:
    """The summary of the judged runs, of the fitted ones, and of those with older libraries."""
    found = []
    for part in ("judged", "fitted", "older"):
        errors = [abs(run.error_percent) for run in runs() if run.part == part]
        within = tuple(sum(error <= bound for error in errors) for bound in BOUNDS)
        found.append(
            Summary(part=part, runs=len(errors), median_percent=round(statistics.median(errors), 1), within=within)
        )
    return tuple(found)
