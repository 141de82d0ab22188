"""Predicts the published measurements: `PYTHONPATH=. python tests/published/published_campaign.py [FAMILY ...]`.

It writes `results.csv` next to it, and prints medians and 90th percentiles of the absolute errors. Adapters are recorded, so it needs
torch, transformers, PEFT and torchao, and about five minutes.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from published_jobs import (
    EXPLAINED,
    FAMILIES,
    INSTALLED,
    OTHER_KERNELS,
    Mapped,
    Measurement,
    Unmapped,
    mapped,
    measurements,
)

from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.adapter_fields import with_files_read
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.memory.allocator import CachingAllocator, simulation
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.step_figures import allocator_result
from fsdp_advisor.strategy_estimate import StrategyEstimate

RESULTS = Path(__file__).with_name("results.csv")
NEEDS_EXPLANATION = 0.03
WITH_NEW_TORCH = ("peft-method-comparison",)
"""The families that ran PyTorch 2.12 or newer. Others took the newest of equal free blocks: see `takes_newest_first`."""
COLUMNS = ("id", "family", "method", "figure", "measured", "predicted", "error", "note")


@dataclass(frozen=True, kw_only=True)
class Result:
    """One figure of one row. `error`: predicted / measured - 1; None if there is no comparison, and `note` says why."""

    id: str
    family: str
    method: str
    figure: str
    measured: float | None = None
    predicted: float | None = None
    note: str = ""

    @property
    def error(self) -> float | None:
        if self.measured is None or self.predicted is None:
            return None
        return self.predicted / self.measured - 1

    def line(self) -> dict[str, str]:
        error = "" if self.error is None else f"{self.error:+.5f}"
        numbers = {name: _number(getattr(self, name)) for name in ("measured", "predicted")}
        return {
            "id": self.id, "family": self.family, "method": self.method, "figure": self.figure, **numbers,
            "error": error, "note": self.note,
        }  # fmt: skip


def estimate_of(job: Mapped) -> StrategyEstimate:
    request = make_request(with_files_read(job.options))
    if job.variant == INSTALLED:
        model = resolve(request.model)
    else:
        from published_code import model_with  # imports torch, which catalog models do not need

        model = model_with(request.model, adaptation_of(request), job.variant)
    [found] = estimate_resolved(request, model).estimates
    return found


@contextmanager
def order_of_blocks(family: str) -> Iterator[None]:
    """Estimates within take equal free blocks in the order of the PyTorch that the family ran."""
    allocator = partial(CachingAllocator, newest_first=family not in WITH_NEW_TORCH)
    allocator_result.cache_clear()
    with patch.object(simulation, "CachingAllocator", allocator):
        yield
    allocator_result.cache_clear()


def results_of(row: Measurement) -> list[Result]:
    about: dict[str, Any] = {"id": row.id, "family": row.family, "method": row.method}
    job = mapped(row)
    if isinstance(job, Unmapped):
        return [Result(**about, figure="none", note=f"not mapped: {job.reason}")]
    try:
        with order_of_blocks(row.family):
            found = estimate_of(job)
    except AdvisorError as error:
        return [Result(**about, figure="none", note=f"refused: {error.message}")]
    if found.peak_allocated_bytes is None:
        return [Result(**about, figure="none", note=f"no prediction: {found.not_modelled[0]}")]
    if row.measured.get("out_of_memory"):
        return [Result(**about, figure="out of memory", measured=1, predicted=float(not found.fits))]
    results = []
    for figure, name in _FIGURES.items():
        if name not in row.measured:
            continue
        predicted, note = _predicted(found, job, figure)
        result = Result(**about, figure=figure, measured=row.measured[name], predicted=predicted, note=note)
        results.append(explained(result))
    return results


def explained(result: Result) -> Result:
    """The result, with an explanation of its error if that is above 3 %."""
    if result.error is None or abs(result.error) <= NEEDS_EXPLANATION:
        return result
    return replace(result, note=EXPLAINED.get((result.id, result.figure), ""))


_FIGURES = {
    "allocated": "allocated_bytes",
    "reserved": "reserved_bytes",
    "device": "device_bytes",
    "memory": "memory_bytes",
    "tokens/s": "tokens_per_second_per_gpu",
}
"""Figure -> key of its measurement. `memory`: the source does not say which kind; it is compared with reserved bytes."""


def _predicted(found: StrategyEstimate, job: Mapped, figure: str) -> tuple[float | None, str]:
    """(prediction of a figure, note). The note says why there is no prediction, or explains its error."""
    comparable = job.only_if_peak_in in (None, found.peak_phase)
    value: float | None
    if figure == "allocated":
        if not comparable:
            return None, f"not compared: the peak is in {found.peak_phase}, where the run had other kernels or lengths"
        value = found.peak_allocated_bytes
    elif figure == "tokens/s":
        if not job.compares_speed:
            return None, f"not compared: {job.why_not_speed}"
        value = found.step.tokens_per_second_per_gpu if found.step else None
    else:
        if not job.compares_reserved:
            return None, f"not compared: {OTHER_KERNELS}"
        value = found.needed_bytes if figure == "device" else found.peak_reserved_bytes
    return value, ""


def summary(results: Iterable[Result]) -> str:
    """Medians and 90th percentiles of absolute errors by figure, family and method, then by figure."""
    groups: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for result in results:
        if result.error is not None:
            groups[result.figure, result.family, result.method].append(abs(result.error))
            groups[result.figure, "all", ""].append(abs(result.error))
    lines = [f"{'figure':<14} {'family':<24} {'method':<12} {'rows':>5} {'median':>8} {'p90':>8} {'max':>8}"]
    for (figure, family, method), errors in sorted(groups.items()):
        median, high = statistics.median(errors), percentile(errors, 0.9)
        lines.append(
            f"{figure:<14} {family:<24} {method:<12} {len(errors):>5} {median:>8.3%} {high:>8.3%} {max(errors):>8.3%}"
        )
    return "\n".join(lines)


def percentile(values: list[float], part: float) -> float:
    """The smallest value that at least `part` of the values do not exceed.

    >>> percentile([3, 1, 2, 4], 0.5)
    2
    """
    return sorted(values)[math.ceil(part * len(values)) - 1]


def read_results(path: Path = RESULTS) -> list[Result]:
    with path.open(newline="") as file:
        return [
            Result(
                **{name: line[name] for name in ("id", "family", "method", "figure", "note")},
                measured=float(line["measured"]) if line["measured"] else None,
                predicted=float(line["predicted"]) if line["predicted"] else None,
            )
            for line in csv.DictReader(file)
        ]


def write_results(results: Iterable[Result], path: Path = RESULTS) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(result.line() for result in results)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}".removesuffix(".0")


def main(families: list[str]) -> None:
    """Predict the rows of these families. Results of the others stay as they are."""
    kept = [r for r in read_results() if r.family not in families] if RESULTS.exists() else []
    made = {family: [r for r in kept if r.family == family] for family in FAMILIES}
    for row in measurements():
        if row.family in families:
            made[row.family] += results_of(row)
            print(
                row.id, [(r.figure, r.line()["error"], r.note) for r in made[row.family] if r.id == row.id], flush=True
            )
            write_results([r for family in FAMILIES for r in made[family]])
    print(summary([r for family in FAMILIES for r in made[family]]))


if __name__ == "__main__":
    main(sys.argv[1:] or list(FAMILIES))
