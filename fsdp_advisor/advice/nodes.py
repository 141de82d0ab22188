"""What a decision tree is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

YES, NO, PERHAPS = "yes", "no", "perhaps"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A question, its numbers and its answer; or an outcome, where the tree ends.

    `parent` is the question before it and `on` the answer to it that leads here. `answer` is None where the question was
    not reached and is costly to answer.
    """

    id: str
    question: str
    answer: str | None = None
    because: str = ""
    needed_bytes: int | None = None
    available_bytes: int | None = None
    parent: str | None = None
    on: str = ""
    taken: bool = False
    outcome: bool = False

    def as_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "question": self.question,
            "answer": self.answer,
            "because": self.because,
            "needed_bytes": self.needed_bytes,
            "available_bytes": self.available_bytes,
            "parent": self.parent,
            "on": self.on,
            "taken": self.taken,
            "outcome": self.outcome,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """All nodes, a question before what follows from it; every node has one parent, the first none."""

    nodes: tuple[Node, ...]

    @property
    def path(self) -> tuple[Node, ...]:
        """The questions that were asked, in order."""
        return tuple(node for node in self.nodes if node.taken and not node.outcome)

    def as_dict(self) -> dict[str, Any]:
        return {
            "nodes": [node.as_dict() for node in self.nodes],
            "edges": [
                {"from": node.parent, "to": node.id, "answer": node.on, "taken": node.taken}
                for node in self.nodes
                if node.parent is not None
            ],
        }
