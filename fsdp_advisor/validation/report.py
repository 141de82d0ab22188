"""What the records say of the estimates: every case, the errors' distribution, the verdicts. Imports no torch."""

from __future__ import annotations

import importlib
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_advisor.errors import MissingExtra, UsageError
from fsdp_advisor.units import GIB, format_gib
from fsdp_advisor.validation.records import FIGURES, Record

PHASES = ("forward", "backward", "optimizer")
TIMES = ("step_seconds", "step_seconds_without_communication")
NEAR_FULL = 0.03
"""A verdict this close to the GPU's memory may go either way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Signed relative errors of one figure in a group of cases: the median, and by size the 95th percentile and the worst."""

    rung: str
    strategy: str
    figure: str
    cases: int
    median: float
    p95: float
    worst: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdicts:
    """How often "fits" and "does not fit" were right. A positive is a case that is said to fit."""

    right_fits: int = 0
    wrong_fits: int = 0
    right_misfits: int = 0
    wrong_misfits: int = 0

    @property
    def precision(self) -> float | None:
        """Of those said to fit, the share that did."""
        said = self.right_fits + self.wrong_fits
        return self.right_fits / said if said else None

    @property
    def recall(self) -> float | None:
        """Of those that did fit, the share said to."""
        did = self.right_fits + self.wrong_misfits
        return self.right_fits / did if did else None


def spreads(records: Iterable[Record]) -> list[Spread]:
    """One row per rung, strategy and figure, and one per rung and figure over all its strategies."""
    groups: dict[tuple[str, str, str], list[float]] = {}
    for record in records:
        for figure, error in record.errors.items():
            for strategy in ("all", _strategy(record)):
                groups.setdefault((place(record), strategy, figure), []).append(error)
    return [
        Spread(
            rung=rung,
            strategy=strategy,
            figure=figure,
            cases=len(errors),
            median=percentile(errors, 50),
            p95=percentile(sorted(errors, key=abs), 95, ordered=True),
            worst=max(errors, key=abs),
        )
        for (rung, strategy, figure), errors in sorted(
            groups.items(), key=lambda item: (item[0][0], item[0][2], item[0][1])
        )
    ]


def place(record: Record) -> str:
    """The rung, and the device where it is not the rung's own."""
    own = "cpu" if record.rung == "simulate" else "cuda"
    return record.rung if record.device == own else f"{record.rung} ({record.device})"


def _strategy(record: Record) -> str:
    offload = record.request.get("offload", "none")
    name = f"{record.request['strategy']} {record.request['backend']}"
    return name if offload == "none" else f"{name}+{offload}"


def percentile(values: Sequence[float], percent: float, *, ordered: bool = False) -> float:
    """The nearest-rank percentile, a value that occurs; the mean of the two middle ones for an even median.

    >>> percentile([3.0, 1.0, 2.0, 4.0], 50), percentile([1.0, 2.0, 3.0], 95)
    (2.5, 3.0)
    """
    values = values if ordered else sorted(values)
    if percent == 50 and len(values) % 2 == 0:
        return (values[len(values) // 2 - 1] + values[len(values) // 2]) / 2
    return values[max(0, math.ceil(percent / 100 * len(values)) - 1)]


def verdicts(records: Iterable[Record]) -> Verdicts:
    """Over the records in which both sides are known."""
    counts = Counter((r.fits_predicted, r.fits_really) for r in records)
    return Verdicts(
        right_fits=counts[True, True],
        wrong_fits=counts[True, False],
        right_misfits=counts[False, False],
        wrong_misfits=counts[False, True],
    )


def latest(records: Iterable[Record]) -> list[Record]:
    """The last record of each case, in the order of first appearance: a case that was run again counts once."""
    return list({record.key: record for record in records}.values())


def main_figure(record: Record) -> str | None:
    """The strongest figure that was measured and, if any is, predicted too."""
    both = [f for f in FIGURES if f in record.measured and f in record.predicted]
    measured = [f for f in FIGURES if f in record.measured]
    found = both or measured
    return found[-1] if found else None


def as_dict(records: Sequence[Record]) -> dict[str, Any]:
    """The whole report, as data."""
    found = verdicts(records)
    return {
        "schema_version": 1,
        "cases": [{**r.as_dict(), "case": r.label} for r in records],
        "outcomes": dict(Counter(r.outcome for r in records)),
        "errors": [
            {
                "rung": s.rung,
                "strategy": s.strategy,
                "figure": s.figure,
                "cases": s.cases,
                "median": s.median,
                "p95": s.p95,
                "worst": s.worst,
            }
            for s in spreads(records)
        ],
        "verdicts": {
            "right_fits": found.right_fits,
            "wrong_fits": found.wrong_fits,
            "right_misfits": found.right_misfits,
            "wrong_misfits": found.wrong_misfits,
            "precision": found.precision,
            "recall": found.recall,
        },
    }


def render(records: Sequence[Record], form: str) -> str:
    """`text`, `markdown` or `json`."""
    if form == "json":
        return json.dumps(as_dict(records), indent=2)
    table = _markdown if form == "markdown" else _text
    if not records:
        return "no records"
    parts = [table(CASE_COLUMNS, [_case_row(r) for r in records], 1)]
    rows = [
        [s.rung, s.strategy, s.figure, str(s.cases), *map(signed_percent, (s.median, s.p95, s.worst))]
        for s in spreads(records)
        if _worth_a_row(s)
    ]
    if rows:
        parts.append(table(("rung", "strategy", "figure", "cases", "median", "p95", "worst"), rows, 3))
    parts.append("\n".join(_verdict_lines(records)))
    devices = sorted({r.versions["gpu"] for r in records if "gpu" in r.versions})
    made = sorted(
        {
            f"torch {r.versions['torch']}, transformers {r.versions['transformers']}"
            for r in records
            if "torch" in r.versions
        }
    )
    parts.append("\n".join(f"made with: {', '.join([*devices, one])}" for one in made))
    return "\n\n".join(part for part in parts if part)


def render_case(record: Record, form: str) -> str:
    """One case, figure by figure; `json` is its record."""
    if form == "json":
        return json.dumps(record.as_dict(), indent=2)
    table = _markdown if form == "markdown" else _text
    rows = []
    for figure in (*FIGURES, *(f"phase_peaks.{phase}" for phase in PHASES)):
        values = [_value(side, figure) for side in (record.predicted, record.measured)]
        if any(v is not None for v in values):
            shown = [format_gib(v) if v is not None else "-" for v in values]
            exact = [f"{v:,}" if v is not None else "-" for v in values]
            error = record.errors.get(figure)
            rows.append([figure, *shown, signed_percent(error) if error is not None else "-", *exact])
    title = f"{record.label}: {record.rung} on {record.versions.get('gpu', record.device)}, {record.outcome}"
    parts = [title, *([record.message] if record.message else [])]
    parts.append(table(("figure", "predicted", "measured", "error", "predicted bytes", "measured bytes"), rows, 1))
    if len(ranks := record.measured.get("by_rank", {})):
        name, values = list(ranks.items())[-1]
        parts.append(
            f"{name} over {len(values)} ranks: largest {max(values):,}, rank 0 {values[0]:,}, spread {max(values) - min(values):,}"
        )
    seconds = [_seconds(record, name) for name in TIMES if name in record.measured]
    verdict = f"fits: {_yes_no(record.fits_predicted)} said, {_yes_no(record.fits_really)} {'did' if record.device == 'cuda' else 'found'}"
    return "\n\n".join([*parts, "\n".join([*seconds, verdict])])


def _seconds(record: Record, name: str) -> str:
    line = f"{name.replace('_', ' ')}: {record.measured[name]:.4f}"
    if name not in record.errors:
        return line
    return f"{line}, predicted {record.predicted[name]:.4f} ({signed_percent(record.errors[name])})"


def _value(figures: dict[str, Any], name: str) -> int | None:
    outer, _, inner = name.partition(".")
    found = figures.get(outer)
    found = found.get(inner) if inner and isinstance(found, dict) else found
    return found if isinstance(found, int) else None


def _worth_a_row(spread: Spread) -> bool:
    """For people: the memory figures by strategy, their phases over all of them. The data has every row."""
    return spread.figure in (*FIGURES, *TIMES) or (spread.strategy == "all" and spread.figure.startswith("phase_peaks"))


CASE_COLUMNS = ("case", "rung", "outcome", "figure", "predicted", "measured", "error", "fits: said", "did")


def _case_row(record: Record) -> list[str]:
    figure = main_figure(record)
    predicted = record.predicted.get(figure) if figure else record.predicted.get(FIGURES[0])
    measured = record.measured.get(figure) if figure else None
    error = record.errors.get(figure) if figure else None
    return [
        record.label,
        place(record),
        record.outcome,
        figure or FIGURES[0],
        format_gib(predicted) if isinstance(predicted, int) else "?",
        format_gib(measured) if isinstance(measured, int) else "-",
        signed_percent(error) if error is not None else "-",
        _yes_no(record.fits_predicted),
        _yes_no(record.fits_really),
    ]


def _verdict_lines(records: Sequence[Record]) -> list[str]:
    found = verdicts(records)
    outcomes = ", ".join(f"{n} {outcome}" for outcome, n in Counter(r.outcome for r in records).most_common())
    lines = [f"outcomes: {outcomes}"]
    if found.right_fits + found.wrong_fits + found.right_misfits + found.wrong_misfits:
        shares = [
            f"{name} {share:.1%}" if share is not None else f"{name} unknown"
            for name, share in (("precision", found.precision), ("recall", found.recall))
        ]
        lines.append(
            f"verdicts: {found.right_fits} rightly fit, {found.right_misfits} rightly do not, {found.wrong_fits} wrongly fit, "
            f"{found.wrong_misfits} wrongly do not; {', '.join(shares)}"
        )
    lines += [f"{r.outcome}: {r.label}: {r.message}" for r in records if r.outcome not in ("ok", "oom")]
    for record in records:
        if (
            record.fits_predicted is not None
            and record.fits_really is not None
            and record.fits_predicted != record.fits_really
        ):
            lines.append(f"wrong verdict: {record.label}" + (", close to full" if near_full(record) else ""))
    return lines


def near_full(record: Record) -> bool:
    """Whether the measured figure is so close to the GPU's memory that either verdict may be right."""
    limit = record.measured.get("device_memory_bytes")
    figure = main_figure(record)
    found = record.measured.get(figure) if figure else None
    return isinstance(limit, int) and isinstance(found, int) and abs(found / limit - 1) <= NEAR_FULL


def signed_percent(error: float) -> str:
    """With its sign, unless it is none.

    >>> signed_percent(0.0123), signed_percent(-0.5), signed_percent(0)
    ('+1.23 %', '-50.00 %', '0 %')
    """
    return "0 %" if error == 0 else f"{error:+.2%}".replace("%", " %")


def _yes_no(fits: bool | None) -> str:
    return "?" if fits is None else "yes" if fits else "no"


def _text(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """Columns wide enough for their cells; the first `left` and words to the left, figures to the right."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    aligned: list[Callable[[str, int], str]] = [
        str.rjust
        if any(row[i][-1:] in "B%?" or row[i].replace(",", "").isdigit() for row in rows) and i >= left
        else str.ljust
        for i in range(len(columns))
    ]
    lines = [
        "  ".join(align(cell, width) for align, cell, width in zip(aligned, row, widths, strict=True)).rstrip()
        for row in (columns, *rows)
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    rule = ["---" if i < left else "---:" for i in range(len(columns))]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in (columns, rule, *rows)
    )


def plot(records: Sequence[Record], path: Path) -> None:
    """Predicted against measured, one point per case; and the two timelines of the last case that has them.

    The file's ending says what it is. Raises MissingExtra without matplotlib, UsageError where no case has both figures.
    """
    points = [
        (r.rung, r.measured[f] / GIB, r.predicted[f] / GIB)
        for r in records
        if (f := main_figure(r)) and f in r.predicted and f in r.measured
    ]
    if not points:
        raise UsageError("no record has a figure both predicted and measured", hint="run a campaign first")
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot: Any = importlib.import_module("matplotlib.pyplot")
    except ImportError:
        raise MissingExtra("a plot needs matplotlib", extra="plot") from None
    timed = next((r for r in reversed(records) if r.measured.get("timeline") and r.predicted.get("timeline")), None)
    figure, axes = pyplot.subplots(
        1, 2 if timed else 1, figsize=(13 if timed else 6.5, 6), layout="constrained", squeeze=False
    )
    scatter = axes[0][0]
    for rung in sorted({rung for rung, _, _ in points}):
        xs, ys = [x for r, x, _ in points if r == rung], [y for r, _, y in points if r == rung]
        scatter.scatter(xs, ys, s=16, alpha=0.7, label=f"{rung} ({len(xs)})")
    ends = [pick(v for _, x, y in points for v in (x, y)) for pick in (min, max)]
    scatter.plot(ends, ends, linewidth=0.8, color="black")
    scatter.set(xlabel="measured, GiB", ylabel="predicted, GiB", xscale="log", yscale="log", title="peaks")
    scatter.legend()
    if timed:
        lines = axes[0][1]
        for name, values in (("measured", timed.measured["timeline"]), ("predicted", timed.predicted["timeline"])):
            xs, ys = [], []
            for number, phase in enumerate(PHASES):
                highs = values.get(phase, [])
                xs += [number + i / max(1, len(highs)) for i in range(len(highs))]
                ys += [high / GIB for high in highs]
            lines.step(xs, ys, where="post", label=name, linewidth=1)
        lines.set(xticks=[0.5, 1.5, 2.5], xticklabels=PHASES, ylabel="alive, GiB", title=timed.label)
        lines.legend()
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        hint = "name a .svg, .png or .pdf file in a folder that exists"
        raise UsageError(f"cannot write {path}: {error}", hint=hint) from None
    finally:
        pyplot.close(figure)
