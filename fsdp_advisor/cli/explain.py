"""`--explain`: what is needed at the peak of one strategy, and the step as a timeline."""

from __future__ import annotations

from rich.text import Text

from fsdp_advisor.cli.drawing import Column, bar, draw, widths, wrap
from fsdp_advisor.cli.figures import (
    PARTS,
    Sizes,
    host_lines,
    left_out_besides,
    loss_line,
    step_lines,
)
from fsdp_advisor.cli.job import job_lines
from fsdp_advisor.cli.output import Screen
from fsdp_advisor.memory.device import BESIDE
from fsdp_advisor.memory.ledger import ACCOUNTS, Point
from fsdp_advisor.report import Report, StrategyEstimate

_STATES = PARTS[0]
_BAR_WIDTHS = (10, 40)


def explanation(report: Report, estimate: StrategyEstimate, screen: Screen) -> str:
    """The explanation of one row, without a final newline."""
    sizes = Sizes.of(report)
    states = ", ".join(f"{name} {sizes.near(n)}" for name, n in estimate.states.items() if n)
    blocks = [f"{estimate.label} ({estimate.plan.backend})"]
    if estimate.allocated is None or estimate.needed_bytes is None:
        blocks[0] += ": the peak is unknown"
    else:
        step = estimate.allocated.step
        at = f"tensors and kernels peak at {sizes.full(step.peak)} in {step.peak_phase}, at {step.peak_where}"
        phases = ", ".join(f"{phase} {sizes.full(n)}" for phase, n in step.phase_peaks.items())
        blocks[0] = wrap(f"{blocks[0]}: needs {sizes.full(estimate.needed_bytes)}; {at}", screen)
        blocks[0] += "\n" + wrap(f"Highest by phase: {phases}", screen, indent="  ")
        blocks.append(_needed(estimate, sizes, screen))
    lines = [
        f"Kept from step to step: {sizes.near(estimate.kept_bytes)} ({states})"
        if states
        else "Nothing is kept on the GPU"
    ]
    lines = [*([line] if (line := loss_line(estimate)) else []), *lines, *host_lines(estimate, sizes)]
    lines += job_lines(estimate, sizes)
    lines += step_lines(report, estimate)
    if besides := left_out_besides(report, estimate):
        lines.append(f"Not in this row's figures either: {'; '.join(besides)}")
    blocks.append("\n".join(wrap(line, screen, indent="  ") for line in lines))
    if points := estimate.timeline_on_gpu:
        blocks.append(timeline(points, report.gpu_memory_bytes, sizes, screen))
    return "\n\n".join(blocks)


def _needed(estimate: StrategyEstimate, sizes: Sizes, screen: Screen) -> str:
    """Every account that holds anything; the loss last, since it is what a different loss would change."""
    needed = estimate.needed_breakdown or {}
    meanings, total = ACCOUNTS | BESIDE, sum(needed.values())
    rows = sorted(((n, name) for name, n in needed.items() if n and name != "loss"), reverse=True)
    rows += [(needed["loss"], "loss")] if needed.get("loss") else []
    rows.append((total, "sum"))
    return draw(
        [
            Column("needed at the peak", [name.replace("_", " ") for _, name in rows]),
            Column(sizes.unit, [sizes.bare(n) for n, _ in rows], right=True),
            Column("share", [f"{100 * n / total:.1f} %" for n, _ in rows], right=True),
            Column("what it is", [meanings.get(name, "") for _, name in rows]),
        ],
        screen,
    )


def timeline(points: tuple[Point, ...], whole: int, sizes: Sizes, screen: Screen) -> str:
    """One line per stretch of the step; repetitions that were not walked stand as one line."""
    phases, places, live, high = [], [], [], []
    forwards = 0
    for before, point in zip((None, *points), points, strict=False):
        begins = before is None or before.phase != point.phase
        forwards += begins and point.phase == "forward"
        phases.append(point.phase if begins else "")
        folded = point.repeats > 1
        places.append(f"  x {point.repeats} more" if folded else point.where)
        live.append(sizes.bare(point.live_bytes))
        high.append("" if folded else sizes.bare(point.high_bytes))
    columns = [
        Column("phase", phases),
        Column("where", places),
        Column("live", live, right=True),
        Column("high", high, right=True),
    ]
    narrow, wide = _BAR_WIDTHS
    room = screen.width - widths(columns) - 2
    if room >= narrow:
        width = min(room, wide)
        bars = [Text("") if p.repeats > 1 else bar([(_STATES, p.high_bytes)], whole, width, screen) for p in points]
        columns.append(Column("of the GPU", bars))
    caption = f"The step, in {sizes.unit}: live at the end of each stretch, and the highest within it."
    if forwards > 1:
        caption += " Two micro-batches: those that follow are like the second."
    return wrap(caption, screen) + "\n" + draw(columns, screen)
