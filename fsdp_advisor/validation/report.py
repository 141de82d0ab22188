"""What the records say of the estimates: every case, the errors' distribution, the verdicts. Imports no torch."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdp_advisor.units import format_gib
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
    """Over the runs on a GPU, in which alone something really fits or does not, as far as both sides are known."""
    counts = Counter((r.fits_predicted, r.fits_really) for r in records if r.device != "cpu")
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
    """The strongest figure that was measured and, if any is, predicted too; the device's, predicted as a range, comes last."""
    order = [f for f in ("peak_device_bytes", *FIGURES[:-1]) if f in record.measured]
    both = [f for f in order if f in record.predicted]
    found = both or order
    return found[-1] if found else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Within:
    """In how many cases a measured figure lies in the range that was predicted."""

    rung: str
    figure: str
    cases: int
    within: int


def ranges(records: Iterable[Record]) -> list[Within]:
    """One row per rung and figure that is predicted as a range: `<figure>_range`."""
    groups: dict[tuple[str, str], list[bool]] = {}
    for record in records:
        for name, ends in record.predicted.items():
            figure = name.removesuffix("_range")
            found = record.measured.get(figure)
            if name != figure and isinstance(found, int) and isinstance(ends, (list, tuple)):
                groups.setdefault((place(record), figure), []).append(ends[0] <= found <= ends[1])
    return [
        Within(rung=rung, figure=figure, cases=len(hits), within=sum(hits))
        for (rung, figure), hits in sorted(groups.items())
    ]


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
        "ranges": [{"rung": w.rung, "figure": w.figure, "cases": w.cases, "within": w.within} for w in ranges(records)],
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
    parts.append(
        "\n".join([*_gloo_lines(records), *_range_lines(records), *_snapshot_lines(records), *_verdict_lines(records)])
    )
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
    of_phases = [f"phase_peaks.{phase}" for phase in PHASES]
    if "phases" in record.measured:
        of_phases = [f"phases.{phase}.{name}_bytes" for name in ("allocated", "reserved") for phase in PHASES]
    for figure in (*FIGURES, *of_phases):
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
        nodes = len(record.measured.get("ranks_per_node", ()))
        where = f" on {nodes} nodes" if nodes > 1 else ""
        parts.append(
            f"{name} over {len(values)} ranks{where}: largest {max(values):,}, rank 0 {values[0]:,}, spread {max(values) - min(values):,}"
        )
    seconds = _gloo_lines([record]) + [_seconds(record, name) for name in TIMES if name in record.measured]
    seconds += [*_range_lines([record]), *_snapshot_lines([record])]
    verdict = f"fits: {_yes_no(record.fits_predicted)} said, {_yes_no(record.fits_really)} {'did' if record.device == 'cuda' else 'found'}"
    return "\n\n".join([*parts, "\n".join([*seconds, verdict])])


def _seconds(record: Record, name: str) -> str:
    line = f"{name.replace('_', ' ')}: {record.measured[name]:.4f}"
    if name not in record.errors:
        return line
    return f"{line}, predicted {record.predicted[name]:.4f} ({signed_percent(record.errors[name])})"


def _value(figures: dict[str, Any], name: str) -> int | None:
    found: Any = figures
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, int) else None


def _worth_a_row(spread: Spread) -> bool:
    """For people: the memory figures by strategy, their phases over all of them. The data has every row."""
    phase = spread.figure.startswith("phase_peaks.") or spread.figure.endswith((".allocated_bytes", ".reserved_bytes"))
    return spread.figure in (*FIGURES, *TIMES) or (spread.strategy == "all" and phase)


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


def _range_lines(records: Sequence[Record]) -> list[str]:
    return [f"{w.figure} within the predicted range: {w.within} of {w.cases} ({w.rung})" for w in ranges(records)]


def _gloo_lines(records: Sequence[Record]) -> list[str]:
    """What runs over gloo hold and no other backend would."""
    copies = [n for r in records if isinstance(n := r.measured.get("gloo_bytes"), int)]
    if not copies:
        return []
    upto = "up to " if len(copies) > 1 else ""
    return [
        f"not counted: the copy of {upto}{format_gib(max(copies))} that gloo makes to reduce-scatter, and NCCL does not"
    ]


def _snapshot_lines(records: Sequence[Record]) -> list[str]:
    """How the allocator's segments in the end compare with the model's, block by block."""
    found = [r.measured["snapshot"] for r in records if isinstance(r.measured.get("snapshot"), dict)]
    if not found:
        return []
    alike, held, modelled = (sum(s[name] for s in found) for name in ("alike", "segments", "modelled_segments"))
    whole = sum(s["alike"] == s["segments"] == s["modelled_segments"] for s in found)
    lines = [
        f"segments alike block by block: {alike} of {held} held, {modelled} modelled"
        + (f"; all of them in {whole} of {len(found)} runs" if len(found) > 1 else "")
    ]
    if len(found) == 1:
        lines += [f"only held: {one}" for one in found[0]["only_recorded"]]
        lines += [f"only modelled: {one}" for one in found[0]["only_modelled"]]
    return lines


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
    for record in filter(wrong_verdict, records):
        lines.append(f"wrong verdict: {record.label}" + (", close to full" if near_full(record) else ""))
    return lines


def wrong_verdict(record: Record) -> bool:
    """Whether a run on a GPU ended otherwise than was said."""
    known = record.fits_predicted is not None and record.fits_really is not None
    return record.device != "cpu" and known and record.fits_predicted != record.fits_really


def near_full(record: Record) -> bool:
    """Whether the device's figure, where a run ended for lack of memory the predicted one, is so close to the GPU's memory that
    either verdict may be right.
    """
    limit = record.detail.get("gpu_memory_bytes", record.measured.get("device_memory_bytes"))
    found = record.measured.get("peak_device_bytes", record.predicted.get("peak_device_bytes"))
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
