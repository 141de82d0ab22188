"""Charts as SVG text, made without a chart library and without I/O.

A drawing stands alone: its colours are presentation attributes for light paper. A page overrides them by the class of each
shape. A drawing has a title, a description, and patterns as well as colours; it has no script, link or inline style. `width`
is in CSS pixels. A narrow chart has a different layout, not smaller text.
"""

from fsdp_advisor.render.svg.accuracy import AccuracyPoint, accuracy
from fsdp_advisor.render.svg.bars import Bar, stacked_bars
from fsdp_advisor.render.svg.comparison import two_timelines
from fsdp_advisor.render.svg.elements import stacked
from fsdp_advisor.render.svg.errors import ErrorPoint, speed_errors
from fsdp_advisor.render.svg.frontier import FrontierPoint, frontier
from fsdp_advisor.render.svg.streams import stream_timeline
from fsdp_advisor.render.svg.timeline import memory_timeline

__all__ = [
    "AccuracyPoint",
    "Bar",
    "ErrorPoint",
    "FrontierPoint",
    "accuracy",
    "frontier",
    "memory_timeline",
    "speed_errors",
    "stacked",
    "stacked_bars",
    "stream_timeline",
    "two_timelines",
]
