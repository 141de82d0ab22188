"""The data of each chart, made from views."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_advisor.render.advice_view import CandidateView
from fsdp_advisor.render.svg import Bar, FrontierPoint
from fsdp_advisor.render.view import ReportView, RowView


def strategy_bars(view: ReportView, chosen: RowView) -> list[Bar]:
    """A bar per row. `chosen`: the row of the view whose bar is marked."""
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
