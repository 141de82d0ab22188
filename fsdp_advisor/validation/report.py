"""Statistics over records: errors, verdicts and ranges. Imports no torch."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fsdp_advisor.validation.records import FIGURES, Record

TIMES = ("step_seconds", "step_seconds_without_communication")
NEAR_FULL = 0.03
"""Distance from a full GPU, relative to its memory, within which both verdicts are acceptable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Signed relative errors of one figure in a group of cases. `p95` and `worst` are by absolute size."""

    mode: str
    strategy: str
    figure: str
    cases: int
    median: float
    p95: float
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """How often "fits" and "does not fit" were right. "Fits" is the positive class."""

    right_fits: int = 0
    wrong_fits: int = 0
    right_misfits: int = 0
    wrong_misfits: int = 0

    @property
    def total(self) -> int:
        return self.right_fits + self.wrong_fits + self.right_misfits + self.wrong_misfits

    @property
    def precision(self) -> float | None:
        """Of the cases predicted to fit, the share that fits; None if none is predicted to."""
        predicted = self.right_fits + self.wrong_fits
        return self.right_fits / predicted if predicted else None

    @property
    def recall(self) -> float | None:
        """Of the cases that fit, the share predicted to fit; None if none fits."""
        fitting = self.right_fits + self.wrong_misfits
        return self.right_fits / fitting if fitting else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Within:
    """The number of cases in which a measured figure is within its predicted range."""

    mode: str
    figure: str
    cases: int
    within: int


def spreads(records: Iterable[Record]) -> list[Spread]:
    """One row per mode, strategy and figure, and one per mode and figure over all strategies."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for record in records:
        for figure, error in record.errors.items():
            for strategy in ("all", _strategy(record)):
                groups.setdefault((mode_and_device(record), figure, strategy), []).append(error)
    return [
        Spread(
            mode=mode,
            strategy=strategy,
            figure=figure,
            cases=len(errors),
            median=statistics.median(errors),
            p95=_percentile_by_size(errors, 95),
            worst=max(errors, key=abs),
        )
        for (mode, figure, strategy), errors in sorted(groups.items())
    ]


def mode_and_device(record: Record) -> str:
    """The mode, with the device if it is not the mode's usual one."""
    usual = "cpu" if record.mode == "simulate" else "cuda"
    return record.mode if record.device == usual else f"{record.mode} ({record.device})"


def _strategy(record: Record) -> str:
    offload = record.request.get("offload", "none")
    name = f"{record.request['strategy']} {record.request['backend']}"
    return name if offload == "none" else f"{name}+{offload}"


def _percentile_by_size(values: Sequence[float], percent: float) -> float:
    """The nearest-rank percentile by absolute size; one of the values."""
    return sorted(values, key=abs)[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def verdicts(records: Iterable[Record]) -> Verdicts:
    """The verdicts of runs on GPUs, as far as both sides are known. Other runs cannot run out of GPU memory."""
    counts = Counter((r.fits_predicted, r.fits_really) for r in records if r.device != "cpu")
    return Verdicts(
        right_fits=counts[True, True],
        wrong_fits=counts[True, False],
        right_misfits=counts[False, False],
        wrong_misfits=counts[False, True],
    )


def wrong_verdict(record: Record) -> bool:
    """Whether the verdict on a run on a GPU was wrong."""
    known = record.fits_predicted is not None and record.fits_really is not None
    return record.device != "cpu" and known and record.fits_predicted != record.fits_really


def near_full(record: Record) -> bool:
    """Whether the device's peak is so close to the GPU's memory that both verdicts are acceptable.

    The peak is the measured one, or the predicted one if the run ended out of memory.
    """
    limit = record.detail.get("gpu_memory_bytes", record.measured.get("device_memory_bytes"))
    peak = record.measured.get("peak_device_bytes", record.predicted.get("peak_device_bytes"))
    return isinstance(limit, int) and isinstance(peak, int) and abs(peak / limit - 1) <= NEAR_FULL


def latest(records: Iterable[Record]) -> list[Record]:
    """The last record of each case, in the order of the cases' first records."""
    return list({record.key: record for record in records}.values())


def main_figure(record: Record) -> str | None:
    """The largest measured figure, preferably one that is also predicted. The device's figure is the last choice, because its
    prediction is a range.
    """
    measured = [f for f in ("peak_device_bytes", *FIGURES[:-1]) if f in record.measured]
    predicted = [f for f in measured if f in record.predicted]
    candidates = predicted or measured
    return candidates[-1] if candidates else None


def ranges(records: Iterable[Record]) -> list[Within]:
    """One row per mode and figure with a predicted range, `<figure>_range`."""
    groups: dict[tuple[str, str], list[bool]] = {}
    for record in records:
        for name, ends in record.predicted.items():
            figure = name.removesuffix("_range")
            found = record.measured.get(figure)
            if name != figure and isinstance(found, int) and isinstance(ends, (list, tuple)):
                groups.setdefault((mode_and_device(record), figure), []).append(ends[0] <= found <= ends[1])
    return [
        Within(mode=mode, figure=figure, cases=len(hits), within=sum(hits))
        for (mode, figure), hits in sorted(groups.items())
    ]


def as_dict(records: Sequence[Record]) -> dict[str, Any]:
    """The whole report as JSON values."""
    found = verdicts(records)
    return {
        "schema_version": 1,
        "cases": [{**r.as_dict(), "case": r.label} for r in records],
        "outcomes": dict(Counter(r.outcome for r in records)),
        "errors": [asdict(row) for row in spreads(records)],
        "ranges": [asdict(row) for row in ranges(records)],
        "verdicts": {**asdict(found), "precision": found.precision, "recall": found.recall},
    }


def signed_percent(error: float) -> str:
    """A relative error in percent, with a sign unless it is zero.

    >>> signed_percent(0.0123), signed_percent(-0.5), signed_percent(0)
    ('+1.23 %', '-50.00 %', '0 %')
    """
    return "0 %" if error == 0 else f"{error:+.2%}".replace("%", " %")
