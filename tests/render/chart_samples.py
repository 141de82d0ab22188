"""A small drawing of every chart, for the tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fsdp_advisor.memory.live import TimelinePoint
from fsdp_advisor.program.accounts import Phase
from fsdp_advisor.render.parts import PARTS, PartBytes
from fsdp_advisor.render.svg import (
    AccuracyPoint,
    Bar,
    ErrorPoint,
    FrontierPoint,
    accuracy,
    frontier,
    memory_timeline,
    speed_errors,
    stacked_bars,
    stream_timeline,
    two_timelines,
)
from fsdp_advisor.timing import Interval
from fsdp_advisor.units import GIB

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '<script>alert(1)</script>" onload="x" & \x00\u202e]]>'
LIVE = {"parameters": 3 * GIB, "optimizer": 6 * GIB, "activations": GIB, "loss": GIB // 2, "temporaries": 7}

Draw = Callable[[str, int], str]


def parts(needed: dict[str, int]) -> PartBytes:
    return tuple((part, part.bytes_in(needed)) for part in PARTS)


def draw_bars(words: str, width: int) -> str:
    rows = [
        Bar(
            label=words,
            backend=words,
            parts=parts(LIVE | {"libraries": GIB}),
            verdict=words,
            fits=fits,
            chosen=fits is True,
        )
        for fits in (True, False, None)
    ]
    return stacked_bars(rows, 8 * GIB, words, width=width)


PHASES: tuple[tuple[Phase, int], ...] = (("forward", 3), ("forward", 5), ("backward", 4), ("optimizer", 2))


def draw_timeline(words: str, width: int) -> str:
    moments = [
        TimelinePoint(phase=phase, where=words, live_bytes=live * GIB, high_bytes=(live + 1) * GIB)
        for phase, live in PHASES
    ]
    return memory_timeline(moments, label=words, capacity_bytes=7 * GIB, kept_bytes=GIB, width=width)


def draw_streams(words: str, width: int) -> str:
    return stream_timeline(
        [Interval(words, words, 0, 0.1), Interval("b", "c", 0.1, 0.3)],
        label=words,
        width=width,
    )


def draw_frontier(words: str, width: int) -> str:
    points = [
        FrontierPoint(label=words, memory_bytes=m * GIB, throughput=s, fits=m < 8, chosen=m == 4)
        for m, s in ((4, 90.0), (6, 120.0), (9, 100.0))
    ]
    return frontier(points, capacity_bytes=8 * GIB, width=width)


def draw_accuracy(words: str, width: int) -> str:
    points = [AccuracyPoint(group=words, measured_bytes=m * GIB, predicted_bytes=m * GIB + 5) for m in (1, 9, 70)]
    return accuracy(points, width=width)


def draw_two_timelines(words: str, width: int) -> str:
    predicted = {"forward": [2 * GIB, 4 * GIB], "backward": [5 * GIB], "optimizer": [GIB]}
    return two_timelines(predicted, {**predicted, "backward": [4 * GIB] * 70}, label=words, width=width)


def error_point(error: float, *, judges: bool = True, caveats: tuple[str, ...] = (), **size: int) -> ErrorPoint:
    sizes = {"parameters": 7 * 10**9, "gpus": 8, "seq_len": 2048} | size
    return ErrorPoint(label=f"a run off by {error:g} %", error_percent=error, judges=judges, caveats=caveats, **sizes)


def draw_errors(words: str, width: int) -> str:
    points = [
        replace(error_point(-70, caveats=(words, words)), label=words),
        error_point(12, judges=False, gpus=128),
        error_point(3, seq_len=65_536, parameters=10**11),
    ]
    return speed_errors(points, width=width)


CHARTS: dict[str, Draw] = {
    "bars": draw_bars,
    "timeline": draw_timeline,
    "streams": draw_streams,
    "frontier": draw_frontier,
    "accuracy": draw_accuracy,
    "two timelines": draw_two_timelines,
    "speed errors": draw_errors,
}
