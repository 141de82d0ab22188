"""The page's charts. Those that need another layout on a phone are drawn in two widths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fsdp_advisor.memory.live import TimelinePoint
from fsdp_advisor.render import charts, svg
from fsdp_advisor.render.advice_view import AdviceView
from fsdp_advisor.render.view import ReportView, RowView
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.timing import Interval

WIDE, NARROW = 960, 350
"""The two widths in pixels: the page's column, and a phone's."""
MOST_POINTS = 24
"""The number of configurations in the chart of memory against throughput: the fastest ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A chart in both widths; the page's stylesheet shows the one that fits. Without a narrow one, the wide one scrolls."""

    wide: Markup
    narrow: Markup | None = None


def drawing(draw: Callable[..., str], *data: object, key: str, **options: object) -> Drawing:
    """A chart in both widths. Charts escape their texts, so the SVG is safe to include."""

    def drawn(width: int, name: str) -> Markup:
        text = draw(*data, **options, width=width, key=f"{key}-{name}")
        return Markup(text.replace('class="chart"', f'class="chart {name}"', 1))

    return Drawing(wide=drawn(WIDE, "wide"), narrow=drawn(NARROW, "narrow"))


def bars(view: ReportView, chosen: RowView) -> Drawing:
    """A stacked bar per strategy against the GPU's memory."""
    rows = charts.strategy_bars(view, chosen)
    return drawing(svg.stacked_bars, rows, view.gpu_memory_bytes, view.gpu_name, key="bars-chart")


def step(view: ReportView, estimate: StrategyEstimate, points: Sequence[TimelinePoint]) -> Drawing | None:
    """Tensor memory through one step; None if the peak is unknown."""
    if not points:
        return None
    return drawing(
        svg.memory_timeline,
        points,
        label=estimate.label,
        capacity_bytes=view.gpu_memory_bytes,
        kept_bytes=estimate.states.get("parameters", 0) + estimate.states.get("optimizer", 0),
        key="step-chart",
    )


def speed(view: AdviceView) -> Drawing | None:
    """Memory against throughput of the best configuration of each kind; None for fewer than two."""
    rows = [*([view.winner] if view.winner else []), *view.runners_up]
    points = charts.frontier_points(rows[:MOST_POINTS])
    if len(points) < 2:
        return None
    return drawing(
        svg.frontier,
        points,
        capacity_bytes=view.gpu_memory_bytes,
        unit=view.throughput_unit,
        key="frontier-chart",
    )


def streams(intervals: Sequence[Interval], label: str) -> Drawing | None:
    """Compute and communication in the last micro-batch and the optimizer step; None if the time is unknown."""
    return Drawing(wide=Markup(svg.stream_timeline(intervals, label=label))) if intervals else None
