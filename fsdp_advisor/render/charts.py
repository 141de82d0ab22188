"""The data of each chart, made from views."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fsdp_advisor.render.advice_view import CandidateView
from fsdp_advisor.render.svg import Bar, FrontierPoint, Span
from fsdp_advisor.render.view import ReportView, RowView
from fsdp_advisor.timing import Interval


def strategy_bars(view: ReportView, chosen: RowView) -> list[Bar]:
    """A bar per row."""
    return [
        Bar(
            label=row.label,
            backend=row.backend,
            parts=row.parts,
            verdict=row.verdict,
            fits=row.fits,
            chosen=row is chosen,
            complete=row.peak_known,
        )
        for row in view.rows
    ]


def frontier_points(rows: Iterable[CandidateView]) -> list[FrontierPoint]:
    """A point per distinct configuration whose peak and throughput are known."""
    distinct = {(row.label, row.plan): row for row in rows}
    return [
        FrontierPoint(
            label=f"{row.label}, {row.plan.micro_batch_size} x {row.plan.seq_len}",
            memory_bytes=row.needed_bytes,
            throughput=row.throughput,
            fits=row.fits,
            chosen=row.chosen,
        )
        for row in distinct.values()
        if row.peak_known and row.throughput is not None
    ]


def stream_spans(intervals: Sequence[Interval]) -> list[Span]:
    """The operations on both streams."""
    return [
        Span(lane=i.stream, kind=_kind(i.name), start_s=i.begin_seconds, end_s=i.end_seconds)
        for i in intervals
        if i.end_seconds > i.begin_seconds
    ]


def _kind(name: str) -> str:
    """The kind of an operation: `forward layers.3` is `forward`."""
    word, _, rest = name.partition(" ")
    if word == "reduce":
        return "reduce-scatter"
    return name if word in ("optimizer", "parameters") else word if rest else name
