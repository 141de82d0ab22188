"""Figures as SVG text: data in, a string out. No chart library, no I/O.

Every drawing stands alone (its colours are presentation attributes, for light paper) and can be restyled by a page (each
shape has a class). It has a title and a description, patterns as well as colours, and no script, link or inline style.
`width` is in CSS pixels; drawn narrow, a chart is laid out anew rather than shrunk, so that its text stays legible.
"""

from fsdp_advisor.render.accuracy import AccuracyPoint, accuracy
from fsdp_advisor.render.bars import Bar, stacked_bars
from fsdp_advisor.render.comparison import two_timelines
from fsdp_advisor.render.errors import ErrorPoint, speed_errors
from fsdp_advisor.render.frontier import FrontierPoint, frontier
from fsdp_advisor.render.parts import PARTS, Part, part_bytes
from fsdp_advisor.render.streams import Span, stream_timeline
from fsdp_advisor.render.svg import stacked
from fsdp_advisor.render.timeline import Moment, memory_timeline, unfold
from fsdp_advisor.render.tree import TreeNode, decision_tree

__all__ = [
    "PARTS",
    "AccuracyPoint",
    "Bar",
    "ErrorPoint",
    "FrontierPoint",
    "Moment",
    "Part",
    "Span",
    "TreeNode",
    "accuracy",
    "decision_tree",
    "frontier",
    "memory_timeline",
    "part_bytes",
    "speed_errors",
    "stacked",
    "stacked_bars",
    "stream_timeline",
    "two_timelines",
    "unfold",
]
