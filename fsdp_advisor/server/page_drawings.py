"""The page's charts: drawings made of an answer, each in two widths."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fsdp_advisor.advice import Recommendation
from fsdp_advisor.memory.ledger import Point
from fsdp_advisor.render import (
    PARTS,
    Bar,
    FrontierPoint,
    Moment,
    Span,
    TreeNode,
    decision_tree,
    frontier,
    memory_timeline,
    part_bytes,
    stacked_bars,
    stream_timeline,
)
from fsdp_advisor.report import Report, StrategyEstimate
from fsdp_advisor.timing import Interval
from fsdp_advisor.verdict import in_words

WIDE, NARROW = 960, 350
"""The two widths every chart is laid out for, in pixels: the page's column, and a phone's."""
MOST_POINTS = 24
"""Configurations in the drawing of memory against speed: the fastest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """A chart in both widths; the page shows the one that fits. `patterns` are its fills, of which a page needs each once."""

    wide: Markup
    narrow: Markup
    patterns: tuple[str, ...]


def drawing(draw: Callable[..., str], *data: object, key: str, **options: object) -> Drawing:
    """A chart drawn twice, with one title and description. Charts escape what they are given: their text is safe as it is."""
    wide = _on_page(draw(*data, **options, width=WIDE, key=key), key, "wide")
    narrow = _on_page(draw(*data, **options, width=NARROW, key=key), key, "narrow")
    return Drawing(
        wide=Markup(_PATTERNS.sub("", wide)),
        narrow=Markup(_SAID.sub("", _PATTERNS.sub("", narrow))),
        patterns=tuple(_PATTERN.findall(wide)),
    )


def patterns(*drawings: Drawing | None) -> Markup:
    """The fills of a page's drawings."""
    found = dict.fromkeys(pattern for made in drawings if made for pattern in made.patterns)
    return Markup('<svg class="chart hush" aria-hidden="true"><defs>' + "".join(found) + "</defs></svg>")


_PATTERN = re.compile("<pattern.*?</pattern>")
_PATTERNS = re.compile("<defs>.*?</defs>")
_SAID = re.compile("<title.*</desc>")
_LOOK = re.compile(
    r'(?<=class="node-taken") fill="#\w{6}" stroke="#\w{6}" stroke-width="2"'
    r'| (?:xmlns|font-family|font-size|font-weight|text-anchor|paint-order)="[^"]*"| (?:fill|stroke)="(?:none|#\w{6})"'
)
"""What a chart that stands alone says of its look: the page's stylesheet says the same of the same classes."""
_TEXT = re.compile(r"<text((?: [xy]=\S+)*)([^>]*)>([^<]*)</text>")


def _on_page(svg: str, key: str, width: str) -> str:
    """A chart as a part of the page: its look left to the stylesheet, texts that look alike in one group, on top; patterns
    shared with other charts.
    """
    svg = _LOOK.sub("", svg).replace('class="chart"', f'class="chart {width}"', 1)
    alike: dict[str, list[str]] = {}
    for place, look, words in _TEXT.findall(svg):
        alike.setdefault(look, []).append(f"<text{place}>{words}</text>")
    texts = "".join(f"<g{look}>{''.join(some)}</g>" if look else "".join(some) for look, some in alike.items())
    svg = _TEXT.sub("", svg).removesuffix("</svg>") + texts + "</svg>"
    return svg.replace(f'<pattern id="{key}-', '<pattern id="woven-').replace(f'="url(#{key}-', '="url(#woven-')


def tree(recommendation: Recommendation) -> Drawing:
    """The decision tree. A question off the path says its answer beside its numbers; that something fits is said once."""
    nodes = []
    for node in recommendation.tree.nodes:
        if node.outcome and node.taken and node.id != "recommended":
            continue
        off = f"{node.answer}: " if node.answer and not node.taken else ""
        nodes.append(
            TreeNode(
                id=node.id,
                text="the fastest of those that fit" if node.outcome and not node.taken else node.question,
                details=(off + node.because,) if node.because else (),
                parent=node.parent,
                answer=node.on,
                taken=node.taken,
                outcome=node.outcome,
            )
        )
    return drawing(decision_tree, nodes, key="tree-chart")


def bars(report: Report, chosen: StrategyEstimate) -> Drawing:
    """A stacked bar per strategy, of what it needs; of a row whose peak is unknown, the states."""
    drawn = [
        Bar(
            label=e.label,
            backend=e.plan.backend,
            parts=((PARTS[0], e.kept_bytes),) if (needed := e.needed_breakdown) is None else part_bytes(needed),
            verdict=in_words(report, e),
            fits=e.fits,
            chosen=e is chosen,
            complete=needed is not None,
        )
        for e in report.estimates
    ]
    return drawing(stacked_bars, drawn, report.gpu_memory_bytes, report.gpu_name, key="bars-chart")


def step(report: Report, estimate: StrategyEstimate, points: Sequence[Point]) -> Drawing | None:
    """The memory of one step as `points` have it, None where no peak is known."""
    if not points:
        return None
    moments = [
        Moment(phase=p.phase, where=p.where, live_bytes=p.live_bytes, high_bytes=p.high_bytes, repeats=p.repeats)
        for p in points
    ]
    return drawing(
        memory_timeline,
        moments,
        label=estimate.label,
        capacity_bytes=report.gpu_memory_bytes,
        kept_bytes=estimate.states.get("parameters", 0) + estimate.states.get("optimizer", 0),
        key="step-chart",
    )


def speed(recommendation: Recommendation, capacity_bytes: int) -> Drawing | None:
    """Memory against speed of the best plans that fit, one per strategy choice; None for fewer than two."""
    feasible = ([recommendation.winner] if recommendation.winner else []) + list(recommendation.runners_up)
    points = [
        FrontierPoint(
            label=f"{c.label}, {c.plan.micro_batch_size}",
            memory_bytes=c.needed_bytes,
            tokens_per_second=c.tokens_per_second_per_gpu,
            fits=c.fits,
            chosen=c is recommendation.winner,
        )
        for c in feasible[:MOST_POINTS]
        if c.needed_bytes is not None and c.tokens_per_second_per_gpu is not None
    ]
    if len(points) < 2:
        return None
    return drawing(frontier, points, capacity_bytes=capacity_bytes, key="frontier-chart")


def streams(intervals: Sequence[Interval], label: str) -> Drawing | None:
    """Both streams of the last micro-batch and the optimizer's step; kinds are told by the first word of a name."""
    spans = [
        Span(lane=i.stream, kind=_kind(i.name), start_s=i.begin_seconds, end_s=i.end_seconds)
        for i in intervals
        if i.end_seconds > i.begin_seconds
    ]
    return drawing(stream_timeline, spans, label=label, key="streams-chart") if spans else None


def _kind(name: str) -> str:
    word, _, rest = name.partition(" ")
    if word == "reduce":
        return "reduce-scatter"
    return name if word in ("optimizer", "parameters") else word if rest else name
