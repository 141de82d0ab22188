"""The decision tree, with the path taken highlighted and the numbers of each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_advisor.render.svg.elements import (  # fmt: skip
    ACCENT,
    LINE,
    NORMAL,
    PAPER,
    SMALL,
    TINT,
    element,
    frame,
    number,
    stroke,
    text,
    width_of,
    wrapped,
)

NARROW = 560
_PAD, _GAP, _LEADING, _EDGE = 10.0, 26.0, 17.0, 1.0
_GUTTER, _INDENT, _SHORT = 15.0, 28.0, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeNode:
    """A question, or an outcome at the end of the tree. `answer` leads here from `parent`; `details` are its numbers."""

    id: str
    text: str
    details: tuple[str, ...] = ()
    parent: str | None = None
    answer: str = ""
    taken: bool = False
    outcome: bool = False


@dataclass(frozen=True, slots=True)
class _Box:
    node: TreeNode
    x: float
    y: float
    width: float
    words: tuple[str, ...]
    details: tuple[str, ...]

    @property
    def height(self) -> float:
        return 2 * _PAD - 3 + _LEADING * len(self.words) + 16 * len(self.details)

    @property
    def middle(self) -> float:
        return self.y + min(self.height / 2, 24)


class _Layout:
    """Places the boxes. Questions form a vertical spine that follows the path taken.

    Outcomes stand to the right of their question, or below it in a narrow drawing, which omits outcomes off the path. Short
    branches are indented before the spine continues, long ones after it.
    """

    def __init__(self, nodes: Sequence[TreeNode], width: float) -> None:
        self.roomy = width >= NARROW
        self.width = width
        self.column = width * 0.56
        self.boxes: dict[str, _Box] = {}
        self.later: set[str] = set()
        self.children: dict[str | None, list[TreeNode]] = {}
        known = {node.id for node in nodes}
        for node in nodes:
            self.children.setdefault(node.parent if node.parent in known else None, []).append(node)
        bottom = _EDGE
        for root in self.children.get(None, []):
            bottom = self._place(root, _GUTTER, bottom)

    def _place(self, node: TreeNode, indent: float, y: float) -> float:
        """Places the node at `y` and its descendants below it; returns the y of the next box."""
        if node.id in self.boxes:  # a cycle would never end
            return y
        box = self._box(node, indent, y, max((self.column if self.roomy else self.width) - indent, 120))
        questions = [c for c in self.children.get(node.id, []) if not c.outcome]
        below = self._outcomes(box, [c for c in self.children.get(node.id, []) if c.outcome])
        spine = next((c for c in questions if c.taken), questions[-1] if questions else None)
        branches = [c for c in questions if c is not spine]
        for child in branches:
            if self._count(child) <= _SHORT:
                below = self._place(child, indent + _INDENT, below)
        if spine is not None:
            below = self._place(spine, indent, below)
        for child in branches:
            if child.id not in self.boxes:
                self.later.add(child.id)
                below = self._place(child, indent + _INDENT, below)
        return below

    def _outcomes(self, box: _Box, outcomes: Sequence[TreeNode]) -> float:
        """Places the outcomes; returns the y of the next question."""
        below = box.y + box.height + _GAP
        if not self.roomy:
            for outcome in (o for o in outcomes if o.taken):
                placed = self._box(outcome, box.x + _INDENT, below, self.width - box.x - _INDENT - 1)
                below = placed.y + placed.height + _GAP * 0.7
            return below
        x, y = self.column + 74, box.y
        for outcome in outcomes:
            placed = self._box(outcome, x, y, self.width - x - 1)
            if outcome is outcomes[0]:  # level with its question, so that the edge is straight
                placed = self._box(outcome, x, max(_EDGE, y + box.middle - placed.middle), self.width - x - 1)
            y = placed.y + placed.height + 10
        return max(below, y)

    def _count(self, node: TreeNode) -> int:
        """Number of questions in this branch, counted up to _SHORT + 1, so that a cycle ends."""
        seen, left = 0, [node]
        while left and seen <= _SHORT:
            seen += 1
            left += [c for c in self.children.get(left.pop().id, []) if not c.outcome]
        return seen

    def _box(self, node: TreeNode, x: float, y: float, width: float) -> _Box:
        room = width - 2 * _PAD
        words = tuple(wrapped(node.text, room, NORMAL * 1.04))
        details = tuple(line for detail in node.details for line in wrapped(detail, room, SMALL))
        self.boxes[node.id] = box = _Box(node, x, y, width, words, details)
        return box


def decision_tree(nodes: Sequence[TreeNode], *, width: int = 960, key: str = "tree") -> str:
    """The nodes in reading order, roots first. The path taken has thick solid lines, the rest thin dashed ones."""
    layout = _Layout(nodes, width - _EDGE)
    boxes = layout.boxes.values()
    height = max((box.y + box.height for box in boxes), default=20) + 2
    return frame(
        key,
        "Decision tree",
        _description(nodes),
        width,
        height,
        _edges(layout, taken=False),
        _edges(layout, taken=True),
        *(_drawn(box) for box in boxes),
    )


def _drawn(box: _Box) -> str:
    taken, outcome = box.node.taken, box.node.outcome
    body = [
        element(
            "rect", x=box.x, y=box.y, width=box.width, height=box.height, rx=13 if outcome else 4,
            class_="node-taken" if taken else "node", fill=TINT if taken else PAPER,
            stroke=ACCENT if taken else LINE, stroke_width=2 if taken else None,
        )
    ]  # fmt: skip
    y = box.y + _PAD + 10
    for words in box.words:
        body.append(text(box.x + _PAD, y, words, bold=taken, kind="ink" if taken or not outcome else "muted"))
        y += _LEADING
    y -= 1
    for words in box.details:
        body.append(text(box.x + _PAD, y, words, kind="muted", size=SMALL))
        y += 16
    return "".join(body)


def _edges(layout: _Layout, *, taken: bool) -> str:
    """The edges that were taken, or those that were not, with their answers."""
    edges = [
        _edge(layout, box)
        for box in layout.boxes.values()
        if box.node.parent in layout.boxes and box.node.taken is taken and box.node.parent != box.node.id
    ]
    if not edges:
        return ""
    path = "".join(path for path, _, _ in edges)
    kind, width, dash = ("accent", 2.4, None) if taken else ("muted", 1.0, "3 3")
    words = [
        text(*at, answer, kind="accent" if taken else "muted", size=SMALL, bold=taken)
        for _, at, answer in edges
        if answer
    ]
    return stroke(path, kind=kind, width=width, dash=dash) + "".join(words)


def _edge(layout: _Layout, box: _Box) -> tuple[str, tuple[float, float], str]:
    """The path to a box from its parent, the position of the answer, and the answer if there is room for it."""
    above, answer = layout.boxes[box.node.parent or ""], box.node.answer
    if box.node.outcome and layout.roomy:
        x, y = above.x + above.width, above.middle
        bend = "" if box.middle == y else f"H{number((x + box.x) / 2)}V{number(box.middle)}"
        long = width_of(answer, SMALL)
        at = (x + (box.x - x) / 2 - long / 2, box.middle - 5)
        return f"M{number(x)} {number(y)}{bend}H{number(box.x)}", at, answer if long < box.x - x else ""
    if box.node.id in layout.later:  # past the whole spine, in the gutter
        x, y = above.x - 9, above.y + above.height - 11
        path = f"M{number(above.x)} {number(y)}H{number(x)}V{number(box.middle)}H{number(box.x)}"
        return path, (x + 6, box.y - 6), answer
    x, y = above.x + 13, above.y + above.height
    if box.x > above.x:
        return f"M{number(x)} {number(y)}V{number(box.middle)}H{number(box.x)}", (x + 6, box.y - 6), answer
    return f"M{number(x)} {number(y)}V{number(box.y)}", (x + 7, box.y - 8), answer


def _description(nodes: Sequence[TreeNode]) -> str:
    """A short description; the drawing's texts are read too."""
    path = [node for node in nodes if node.taken]
    if not path:
        return "No path is taken."
    return f"{len(nodes)} boxes. The path taken goes through {len(path)} of them, from: {path[0].text} to: {path[-1].text}."
