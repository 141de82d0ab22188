"""The decision tree of a recommendation: questions about memory, each answered with the figures of an estimate.

It asks about DDP first. If DDP does not fit, it asks whether the states or the activations are too large. Activations are
recomputed or the micro-batch is reduced; states are sharded more, then moved to the host. The first strategy that fits ends
these questions. The recommendation is the fastest plan that fits, which may be another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fsdp_advisor.advice.candidate import Candidate
from fsdp_advisor.advice.memory_questions import Question, memory_questions
from fsdp_advisor.advice.ranking import actual_speed, faster
from fsdp_advisor.advice.search import Search
from fsdp_advisor.advice.sweeps import SweepResult
from fsdp_advisor.job.compatibility import label
from fsdp_advisor.json_fields import JsonFields
from fsdp_advisor.units import format_gib

YES, NO, UNKNOWN = "yes", "no", "unknown"
STATES, ACTIVATIONS = "states", "activations"

_SWEEP_QUESTIONS = {
    "batch": "What is the largest micro-batch that fits?",
    "sequence": "What is the longest sequence that fits?",
    "gpus": "What is the smallest number of GPUs that fits?",
    "gpu-type": "Which is the smallest GPU that fits?",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Node(JsonFields):
    """A question with its answer and the figures that decide it, or an outcome, with which the tree ends.

    `parent` is the id of the question before it, `on` the answer to that question that leads to this node. `taken`: whether the
    path goes through the node. `answer` is None if the question is not on the path: only the path is evaluated.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """All nodes of the tree. A parent comes before its children; the first node has no parent."""

    nodes: tuple[Node, ...]

    @property
    def path(self) -> tuple[Node, ...]:
        """The questions that were answered, in order."""
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


def decision_tree(search: Search, winner: Candidate | None, sweep: SweepResult | None, remedies: Sequence[str]) -> Tree:
    """The tree of a search. It ends in the recommendation (`winner`), or in what would fit (`remedies`) if nothing does."""
    questions = _questions(search)
    path = [node for node in questions if node.taken]
    nodes: list[Node] = []
    for node in questions:
        nodes.append(node)
        if node.id != "term":
            nodes.append(_fits_outcome(node))
    return Tree(nodes=(*nodes, *_end(search, path[-1], winner, sweep, remedies)))


def _questions(search: Search) -> list[Node]:
    """All questions, each after the one that leads to it; those on the path are answered."""
    nodes: list[Node] = []
    last: Node | None = None  # the last question on the path
    for question in memory_questions(search):
        parent, on = _parent(question.id, nodes)
        node = Node(id=question.id, question=question.text, parent=parent, on=on)
        candidate = None
        if last is None or (last.id, last.answer) == (parent, on):
            candidate = _evaluate(search, question)
            node = last = replace(node, taken=True, **_answer(candidate, question))
        nodes.append(node)
        if question.id == "ddp":
            term = Node(id="term", question="What is too large?", parent="ddp", on=NO)
            if candidate is not None and node.answer == NO:
                term = last = replace(term, taken=True, **_too_large_part(candidate))
            nodes.append(term)
    return nodes


def _parent(question: str, nodes: Sequence[Node]) -> tuple[str | None, str]:
    """The id of the question that leads to this one, and its answer.

    If DDP's activations are too large, the variants of DDP follow (such as with checkpointing). If DDP's states are too large, or no
    variant fits, the sharded strategies follow.
    """
    if not nodes:
        return None, ""
    term = next((node.answer for node in nodes if node.id == "term"), None)
    if nodes[-1].id == "term":
        return "term", ACTIVATIONS if question.startswith("ddp_") else term or STATES
    if nodes[-1].id.startswith("ddp_") and not question.startswith("ddp_") and term == STATES:
        return "term", STATES
    return nodes[-1].id, NO


def _evaluate(search: Search, question: Question) -> Candidate:
    """The simplest choice of a question that fits; if none does, the one that needs least.

    Choices whose lower bound is too large are evaluated only if this is so for all of them, and then only the one with the least.
    """
    possible = [c for c in question.choices if search.may_fit(c, question.size)]
    if not possible:
        return replace(search, choices=question.choices).smallest_footprint(question.size)
    tried: list[Candidate] = []
    for choice in possible:
        candidate = search.candidate(choice, question.size)
        if candidate.fits is not False:
            return candidate
        tried.append(candidate)
    return min(tried, key=lambda c: (c.host_fits is False, c.known_bytes))


def _answer(candidate: Candidate, question: Question | None = None) -> dict[str, Any]:
    """The fields of a node that asks whether a candidate fits. The candidate is named if the question is about several strategies, or if
    it is not the simplest choice.
    """
    plan, because = candidate.plan, candidate.memory_text
    strategies = {choice.strategy for choice in question.choices} if question else set()
    if question is not None and (len(strategies) > 1 or candidate.choice != question.choices[0]):
        because = f"{label(plan.strategy, plan.offload)} ({plan.backend}): {because}"
    return {
        "answer": UNKNOWN if candidate.fits is None else YES if candidate.fits else NO,
        "because": because,
        "needed_bytes": candidate.known_bytes,
        "available_bytes": candidate.available_bytes,
    }


def _too_large_part(ddp: Candidate) -> dict[str, Any]:
    """The fields of the node that says which part of DDP's memory is too large: states, or everything that grows with the batch."""
    states, available = ddp.estimate.states, ddp.available_bytes
    kept = ddp.state_bytes
    share = f"the states need {format_gib(kept)}, and {format_gib(available)} are available"
    if kept > available or ddp.needed_bytes is None:
        answer = STATES
        parts = ", ".join(f"{name} {format_gib(n)}" for name, n in states.items() if 1000 * n > kept)
        because = f"{share} ({parts})"
    else:
        answer = ACTIVATIONS
        because = f"{share}; the step needs {format_gib(ddp.needed_bytes - kept)} more"
    return {"answer": answer, "because": because, "needed_bytes": kept, "available_bytes": available}


def _fits_outcome(node: Node) -> Node:
    """The outcome node that follows a question about memory whose answer is yes."""
    ends = node.taken and node.answer in (YES, UNKNOWN)
    return Node(
        id=f"{node.id}_fits",
        question="look for the fastest plan that fits",
        parent=node.id,
        on=node.answer if ends and node.answer else YES,
        taken=ends,
        outcome=True,
    )


def _end(
    search: Search, last: Node, winner: Candidate | None, sweep: SweepResult | None, remedies: Sequence[str]
) -> Iterator[Node]:
    """The nodes after the questions about memory: any other plan, the choice among those that fit, the recommendation."""
    parent, on = last.id, last.answer or ""
    if on not in (YES, UNKNOWN):
        other = winner or search.smallest_footprint()
        answer = _answer(other) if winner else _answer(other) | {"answer": NO}
        answer["because"] = f"{other.label}, micro-batch {other.plan.micro_batch_size}: {other.memory_text}"
        question = "Does any other configuration fit?"
        yield Node(id="other", question=question, parent=parent, on=on, taken=True, **answer)
        parent, on = "other", str(answer["answer"])
    if winner is None:
        yield Node(
            id="remedies",
            question="Would more GPUs, another GPU or fewer tokens fit?",
            answer=YES if remedies else NO,
            because="; ".join(remedies) or "no such change is known",
            parent=parent,
            on=on,
            taken=True,
        )
        return
    choice = _fastest(search, winner) if sweep is None else _found(sweep, winner)
    yield replace(choice, parent=parent, on=on)
    yield Node(
        id="recommended",
        question=f"{winner.label}, micro-batch {winner.plan.micro_batch_size}",
        because=winner.memory_text,
        needed_bytes=winner.known_bytes,
        available_bytes=winner.available_bytes,
        parent=choice.id,
        on=choice.answer or "",
        taken=True,
        outcome=True,
    )


def _found(sweep: SweepResult, winner: Candidate) -> Node:
    """The node with the last question of a sweep: which size, number of GPUs or GPU the sweep found."""
    return Node(
        id="found",
        question=_SWEEP_QUESTIONS[sweep.what],
        answer=str(sweep.answer),
        because=sweep.because,
        needed_bytes=winner.known_bytes,
        available_bytes=winner.available_bytes,
        taken=True,
    )


def _fastest(search: Search, winner: Candidate) -> Node:
    """The node with the last question of a search: which plan is the fastest, or the simplest if the time of a step is unknown."""
    speed = winner.tokens_per_second_per_gpu
    if winner.needed_bytes is None:
        question = "Which is the simplest choice whose states fit?"
        is_count = search.evaluator.model.profile is None
        because = (
            "a parameter count says nothing about the rest of the memory or the time"
            if is_count
            else "the peak of a step is unknown, because it could not be recorded"
        )
    elif speed is None:
        question = "Which is the simplest plan that fits?"
        because = "the time of a step is unknown on this GPU"
    else:
        question = "Which plan that fits is the fastest, or as fast and simpler?"
        because = f"{search.evaluator.speed_text(speed, winner.plan.seq_len)} per GPU{_compared(search, winner)}"
    return Node(
        id="fastest",
        question=question,
        answer=winner.label,
        because=because,
        needed_bytes=winner.known_bytes,
        available_bytes=winner.available_bytes,
        taken=True,
    )


def _compared(search: Search, winner: Candidate) -> str:
    """The fastest other plan, and why it was not chosen; empty if there is none."""
    others = search.result.runners_up
    other = faster(winner, others) or next(iter(others), None)
    if other is None:
        return ""
    rate = search.evaluator.speed_text(actual_speed(other.candidate), winner.plan.seq_len)
    return f"; next {other.candidate.label} with {rate}: {other.why_not}"
