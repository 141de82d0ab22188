"""Records and the report over them, as text, Markdown or JSON. Imports no torch."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from fsdp_advisor.program.accounts import PHASES
from fsdp_advisor.render.document import Table, to_markdown
from fsdp_advisor.units import format_gib
from fsdp_advisor.validation.records import FIGURES, Record
from fsdp_advisor.validation.report import (
    TIMES,
    Spread,
    as_dict,
    main_figure,
    mode_and_device,
    near_full,
    ranges,
    signed_percent,
    spreads,
    verdicts,
    wrong_verdict,
)

CASE_COLUMNS = ("case", "mode", "outcome", "figure", "predicted", "measured", "error", "fits: predicted", "really")
SPREAD_COLUMNS = ("mode", "strategy", "figure", "cases", "median", "p95", "worst")
FIGURE_COLUMNS = ("figure", "predicted", "measured", "error", "predicted bytes", "measured bytes")


def render(records: Sequence[Record], form: str) -> str:
    """The report over records. `form` is `text`, `markdown` or `json`."""
    if form == "json":
        return json.dumps(as_dict(records), indent=2)
    if not records:
        return "no records"
    table = _markdown if form == "markdown" else _text
    parts = [table(CASE_COLUMNS, [_case_row(r) for r in records], 1)]
    rows = [
        [s.mode, s.strategy, s.figure, str(s.cases), *map(signed_percent, (s.median, s.p95, s.worst))]
        for s in spreads(records)
        if _is_shown(s)
    ]
    if rows:
        parts.append(table(SPREAD_COLUMNS, rows, 3))
    notes = [*_gloo_lines(records), *_range_lines(records), *_segment_lines(records), *_verdict_lines(records)]
    parts += ["\n".join(notes), "\n".join(_version_lines(records))]
    return "\n\n".join(part for part in parts if part)


def render_case(record: Record, form: str) -> str:
    """One case, figure by figure. `form` is `text`, `markdown` or `json`."""
    if form == "json":
        return json.dumps(record.as_dict(), indent=2)
    table = _markdown if form == "markdown" else _text
    title = f"{record.label}: {record.mode} on {record.versions.get('gpu', record.device)}, {record.outcome}"
    parts = [title, record.message, table(FIGURE_COLUMNS, _figure_rows(record), 1), _rank_line(record)]
    measured = "did" if record.device == "cuda" else "found"
    notes = [
        *_gloo_lines([record]),
        *(_seconds_line(record, name) for name in TIMES if name in record.measured),
        *_range_lines([record]),
        *_segment_lines([record]),
        f"fits: {_yes_no(record.fits_predicted)} predicted, {_yes_no(record.fits_really)} {measured}",
    ]
    return "\n\n".join(part for part in [*parts, "\n".join(notes)] if part)


def _case_row(record: Record) -> list[str]:
    figure = main_figure(record)
    predicted = record.predicted.get(figure or FIGURES[0])
    measured = record.measured.get(figure) if figure else None
    error = record.errors.get(figure) if figure else None
    return [
        record.label,
        mode_and_device(record),
        record.outcome,
        figure or FIGURES[0],
        format_gib(predicted) if isinstance(predicted, int) else "?",
        format_gib(measured) if isinstance(measured, int) else "-",
        _percent_or_dash(error),
        _yes_no(record.fits_predicted),
        _yes_no(record.fits_really),
    ]


def _figure_rows(record: Record) -> list[list[str]]:
    """One row per memory figure and per phase's figure that is predicted or measured."""
    of_phases = [f"phase_peaks.{phase}" for phase in PHASES]
    if "phases" in record.measured:
        of_phases = [f"phases.{phase}.{name}_bytes" for name in ("allocated", "reserved") for phase in PHASES]
    rows = []
    for figure in (*FIGURES, *of_phases):
        values = [_value(side, figure) for side in (record.predicted, record.measured)]
        if any(v is not None for v in values):
            gib = [format_gib(v) if v is not None else "-" for v in values]
            exact = [f"{v:,}" if v is not None else "-" for v in values]
            rows.append([figure, *gib, _percent_or_dash(record.errors.get(figure)), *exact])
    return rows


def _value(figures: dict[str, Any], name: str) -> int | None:
    """The figure with a dotted name; None if there is none."""
    found: Any = figures
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found if isinstance(found, int) else None


def _rank_line(record: Record) -> str:
    """A line about the difference of the largest figure between the ranks; empty for runs of one rank."""
    ranks = record.measured.get("by_rank", {})
    if not ranks:
        return ""
    name, values = list(ranks.items())[-1]
    nodes = len(record.measured.get("ranks_per_node", ()))
    where = f"{len(values)} ranks on {nodes} nodes" if nodes > 1 else f"{len(values)} ranks"
    return f"{name} over {where}: largest {max(values):,}, rank 0 {values[0]:,}, spread {max(values) - min(values):,}"


def _seconds_line(record: Record, name: str) -> str:
    line = f"{name.replace('_', ' ')}: {record.measured[name]:.4f}"
    if name not in record.errors:
        return line
    return f"{line}, predicted {record.predicted[name]:.4f} ({signed_percent(record.errors[name])})"


def _is_shown(spread: Spread) -> bool:
    """Whether text and Markdown show the row: memory and time by strategy, phases over all strategies. JSON has every row."""
    of_phase = spread.figure.startswith("phase_peaks.") or spread.figure.endswith(
        (".allocated_bytes", ".reserved_bytes")
    )
    return spread.figure in (*FIGURES, *TIMES) or (spread.strategy == "all" and of_phase)


def _range_lines(records: Sequence[Record]) -> list[str]:
    return [f"{w.figure} within the predicted range: {w.within} of {w.cases} ({w.mode})" for w in ranges(records)]


def _gloo_lines(records: Sequence[Record]) -> list[str]:
    """Lines about memory that runs need only over gloo, not over NCCL."""
    copies = [n for r in records if isinstance(n := r.measured.get("gloo_bytes"), int)]
    if not copies:
        return []
    size = f"{'up to ' if len(copies) > 1 else ''}{format_gib(max(copies))}"
    return [f"not counted: gloo's copy for reduce-scatter, {size}, which NCCL does not make"]


def _segment_lines(records: Sequence[Record]) -> list[str]:
    """Lines about the number of the allocator's segments at the end of the run that equal the predicted ones."""
    found = [r.measured["snapshot"] for r in records if isinstance(r.measured.get("snapshot"), dict)]
    if not found:
        return []
    equal, real, predicted = (
        sum(s[name] for s in found) for name in ("equal_segments", "segments", "modelled_segments")
    )
    exact = sum(s["equal_segments"] == s["segments"] == s["modelled_segments"] for s in found)
    lines = [f"allocator segments equal block by block: {equal} of {real} real ones, {predicted} predicted"]
    if len(found) > 1:
        lines[0] += f"; all segments in {exact} of {len(found)} runs"
    else:
        lines += [f"only real: {one}" for one in found[0].get("only_recorded", ())]
        lines += [f"only predicted: {one}" for one in found[0].get("only_modelled", ())]
    return lines


def _verdict_lines(records: Sequence[Record]) -> list[str]:
    found = verdicts(records)
    outcomes = ", ".join(f"{n} {outcome}" for outcome, n in Counter(r.outcome for r in records).most_common())
    lines = [f"outcomes: {outcomes}"]
    if found.total:
        shares = (("precision", found.precision), ("recall", found.recall))
        shown = ", ".join(f"{name} {'unknown' if share is None else f'{share:.1%}'}" for name, share in shares)
        lines.append(
            f"verdicts: {found.right_fits} fit as predicted, {found.right_misfits} do not fit as predicted, "
            f"{found.wrong_fits} wrongly predicted to fit, {found.wrong_misfits} wrongly predicted not to fit; {shown}"
        )
    lines += [f"{r.outcome}: {r.label}: {r.message}" for r in records if r.outcome not in ("ok", "oom")]
    wrong = filter(wrong_verdict, records)
    lines += [f"wrong verdict: {r.label}" + (", close to full" if near_full(r) else "") for r in wrong]
    return lines


def _version_lines(records: Sequence[Record]) -> list[str]:
    gpus = sorted({r.versions["gpu"] for r in records if "gpu" in r.versions})
    versions = {(r.versions["torch"], r.versions["transformers"]) for r in records if "torch" in r.versions}
    return [
        f"made with: {', '.join([*gpus, f'torch {torch}, transformers {transformers}'])}"
        for torch, transformers in sorted(versions)
    ]


def _percent_or_dash(error: float | None) -> str:
    return "-" if error is None else signed_percent(error)


def _yes_no(fits: bool | None) -> str:
    return "?" if fits is None else "yes" if fits else "no"


def _text(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    """A table with columns as wide as their cells. The first `left` columns and columns of words are aligned to the left."""
    widths = [max(len(row[i]) for row in (columns, *rows)) for i in range(len(columns))]
    aligned: list[Callable[[str, int], str]] = [
        str.rjust
        if i >= left and any(row[i][-1:] in "B%?" or row[i].replace(",", "").isdigit() for row in rows)
        else str.ljust
        for i in range(len(columns))
    ]
    lines = [
        "  ".join(align(cell, width) for align, cell, width in zip(aligned, row, widths, strict=True)).rstrip()
        for row in (columns, *rows)
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def _markdown(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> str:
    return to_markdown([Table(columns, rows, [i >= left for i in range(len(columns))])])
