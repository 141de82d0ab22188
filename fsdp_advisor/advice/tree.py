"""The decision tree: questions about bytes, each answered with its numbers, whatever the model is called.

DDP first; if it does not fit, which term is too large. Where it is what grows with the batch, recomputing it or a smaller
micro-batch may do; where it is the states, they are sharded further and further, then recomputed, cut smaller, moved to
the host, to NVMe. The first question answered by yes says that something fits. What is recommended is the fastest of all
that fit, which need not be the first; and the last questions are whether it fits with the allocator's fragmentation too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fsdp_advisor.advice.families import Family
from fsdp_advisor.advice.finding import Finding
from fsdp_advisor.advice.judge import Candidate
from fsdp_advisor.advice.nodes import NO, PERHAPS, YES, Node, Tree
from fsdp_advisor.advice.search import Search
from fsdp_advisor.advice.settling import Settled
from fsdp_advisor.job.plan import label
from fsdp_advisor.job.request import Strategy
from fsdp_advisor.units import format_gib, format_speed

STATES, ACTIVATIONS = "states", "activations"
FRAGMENTATION = ("fragmentation", "expandable_segments", "next")
"""Questions about what the allocator reserves, the last ones."""


@dataclass(frozen=True, slots=True)
class _Rung:
    """A question whether something fits: which families, at which micro-batch."""

    id: str
    question: str
    families: tuple[Family, ...]
    size: int


def grow(search: Search, finding: Finding | None, settled: Settled, more: Node) -> Tree:
    """The tree of a search, its path lit.

    It ends in what was looked for, else in the fastest; where nothing fits, in `more`: what another job would do.
    """
    questions = _questions(search)
    path = _walk(questions)
    nodes: list[Node] = []
    for node in questions:
        taken = node in path
        nodes.append(replace(node, taken=taken))
        if node.id != "term":
            nodes.append(_fits(node, taken=taken and node.answer in (YES, PERHAPS)))
    nodes += _end(search, path[-1], finding, settled, more)
    return Tree(nodes=tuple(nodes))


def _questions(search: Search) -> list[Node]:
    """Every question after the one that leads to it."""
    result: list[Node] = []
    for rung in _rungs(search):
        node, candidate = _ask(search, rung)
        parent, on = _before(node, result)
        result.append(replace(node, parent=parent, on=on))
        if node.id == "ddp":
            result.append(replace(_term(search, candidate), parent="ddp", on=NO))
    return result


def _before(node: Node, asked: Sequence[Node]) -> tuple[str | None, str]:
    """The question that leads to this one, and the answer.

    DDP's other ways follow from activations that are too large; the sharded strategies from states that are, or from DDP's
    other ways having failed.
    """
    if not asked:
        return None, ""
    last, of_ddp = asked[-1], node.id.startswith("ddp_")
    term = next((question.answer or "" for question in asked if question.id == "term"), "")
    if last.id == "term":
        return "term", ACTIVATIONS if of_ddp else term
    if last.id.startswith("ddp_") and not of_ddp and term == STATES:
        return "term", STATES
    return last.id, NO


def _walk(questions: Sequence[Node]) -> list[Node]:
    """From the first question along the answers, until one fits or none is left."""
    follows = {(node.parent, node.on): node for node in questions}
    path = [questions[0]]
    while path[-1].answer not in (YES, PERHAPS) and (following := follows.get((path[-1].id, path[-1].answer or ""))):
        path.append(following)
    return path


def _rungs(search: Search) -> list[_Rung]:
    """The questions that the request leaves open, in the order in which they are asked."""
    wanted, smallest = search.batches.wanted, search.batches.smallest
    at = f" at micro-batch {wanted}" if len(search.batches.sizes) > 1 or wanted > 1 else ""

    def these(
        strategy: str | None, checkpointing: str, offload: str = "none", device: str = "cpu"
    ) -> tuple[Family, ...]:
        return tuple(
            f
            for f in search.families
            if strategy in (None, f.strategy)
            and (f.activation_checkpointing, f.offload, f.offload_device) == (checkpointing, offload, device)
        )

    order: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "hsdp", "zero3")
    strategies = [s for s in order if any(f.strategy == s for f in search.families)]
    plain = "none" if any(f.activation_checkpointing == "none" for f in search.families) else "full"
    most = strategies[-1]
    recomputed = these(most, "full") if plain == "none" else ()
    lean = "full" if any(f.activation_checkpointing == "full" for f in search.families) else plain
    with_it = " with activation checkpointing" if lean == "full" else ""
    few = f"micro-batch {smallest} and accumulation {search.batches.accumulation(smallest)}"
    found = [_Rung("ddp", f"Does DDP fit{at}?", these("ddp", plain), wanted)]
    if "ddp" in strategies:
        found.append(
            _Rung(
                "ddp_checkpointing",
                "Does DDP with activation checkpointing?",
                these("ddp", "full") if plain == "none" else (),
                wanted,
            )
        )
        if smallest < wanted:
            found.append(_Rung("ddp_micro_batch", f"Does DDP with {few}?", these("ddp", plain), smallest))
    for strategy in strategies:
        if strategy != "ddp":
            said = {"hsdp": " (sharded within a node, replicated across)"}.get(strategy, "")
            found.append(_Rung(strategy, f"Does {label(strategy)} fit{at}{said}?", these(strategy, plain), wanted))
    if most != "ddp":
        found.append(_Rung("checkpointing", f"Does {label(most)} with activation checkpointing?", recomputed, wanted))
        if smallest < wanted:
            found.append(
                _Rung(
                    "micro_batch",
                    f"Does {label(most)} with {few}{' and checkpointing' if with_it else ''}?",
                    these(most, lean),
                    smallest,
                )
            )
    for offload, what in (
        ("optimizer", "the optimizer"),
        ("parameters", "everything (parameters, gradients, optimizer)"),
    ):
        question = f"Does offloading {what} to the CPU{with_it}?"
        found.append(_Rung(f"offload_{offload}", question, these(None, lean, offload), smallest))
    nvme = these(None, lean, "parameters", "nvme") or these(None, lean, "optimizer", "nvme")
    found.append(_Rung("offload_nvme", f"Does offloading to NVMe{with_it}?", nvme, smallest))
    return [rung for rung in found if rung.families]


def _ask(search: Search, rung: _Rung) -> tuple[Node, Candidate]:
    """The first backend that fits; where none does, the one that needs least."""
    candidates = [
        search.judge.untimed(f.plan(search.job, rung.size, search.batches.accumulation(rung.size)))
        for f in rung.families
    ]
    chosen = next((c for c in candidates if c.fits is not False), None) or min(candidates, key=lambda c: c.known_bytes)
    answer = None if chosen.fits is None else YES if chosen.fits else NO
    node = Node(
        id=rung.id,
        question=rung.question,
        answer=answer or PERHAPS,
        because=numbers(chosen),
        needed_bytes=chosen.known_bytes,
        available_bytes=chosen.available_bytes,
    )
    return node, chosen


def numbers(candidate: Candidate) -> str:
    """Both sides: what is needed and what is there."""
    has = format_gib(candidate.available_bytes)
    if candidate.walked is not None:
        said = f"with fragmentation {candidate.walked.said}"
    elif candidate.needed_bytes is None:
        said = f"its states alone need {format_gib(candidate.state_bytes)}, has {has}"
    else:
        said = f"needs {format_gib(candidate.needed_bytes)}, has {has}"
    host = candidate.host_bytes_per_node
    if candidate.plan.offload != "none" and host:
        room = candidate.host_available_bytes
        there = f", which has {format_gib(room)}" if room is not None else ""
        said += f"; and {format_gib(host)} of host memory per node{there}"
    return said


def _term(search: Search, first: Candidate) -> Node:
    """Which part of DDP's need is too large: what stays from step to step, or what grows with the batch."""
    states = search.judge.estimate(first.plan).states
    kept, has = sum(states.values()), first.available_bytes
    largest = max(states, key=lambda name: states[name])
    parts = ", ".join(f"{name} {format_gib(n)}" for name, n in states.items() if 1000 * n > kept)
    if kept > has or first.needed_bytes is None:
        answer = STATES
        because = f"the states alone take {format_gib(kept)} of {format_gib(has)} ({parts}); the largest is {largest}"
    else:
        answer = ACTIVATIONS
        because = (
            f"the states take {format_gib(kept)} of {format_gib(has)}; "
            f"what the batch adds, {format_gib(first.needed_bytes - kept)}, is too much beside them"
        )
    return Node(
        id="term",
        question="Which term is too large?",
        answer=answer,
        because=because,
        needed_bytes=kept,
        available_bytes=has,
    )


def _fits(node: Node, *, taken: bool) -> Node:
    """Where a question ends if it is answered by yes."""
    return Node(
        id=f"{node.id}_fits",
        question="look for the fastest that fits",
        parent=node.id,
        on=node.answer if taken and node.answer else YES,
        taken=taken,
        outcome=True,
    )


def _end(search: Search, last: Node, finding: Finding | None, settled: Settled, more: Node) -> list[Node]:
    """What follows the questions: any other configuration, the fastest of those that fit, whether fragmentation leaves it
    so, or what would help."""
    result: list[Node] = []
    leaders = search.leaders
    after, on = last.id, last.answer or ""
    if on not in (YES, PERHAPS):
        lean = leaders[0] if leaders else min(search.losers, key=lambda c: c.known_bytes)
        result.append(
            Node(
                id="other",
                question="Does any other configuration fit?",
                answer=YES if leaders else NO,
                because=f"{lean.label}, micro-batch {lean.plan.micro_batch_size}: {numbers(lean)}",
                needed_bytes=lean.known_bytes,
                available_bytes=lean.available_bytes,
                parent=after,
                on=on,
                taken=True,
            )
        )
        after, on = "other", YES if leaders else NO
    winner = settled.winner
    if leaders:
        leaf = _sought(finding) if finding is not None and winner else _fastest(leaders)
        for node in (leaf, *_fragmented(settled)):
            result.append(replace(node, parent=after, on=on))
            after, on = node.id, node.answer or ""
    if winner is not None:
        result.append(
            Node(
                id="recommended",
                question=f"{winner.label}, micro-batch {winner.plan.micro_batch_size}",
                because=numbers(winner),
                needed_bytes=winner.known_bytes,
                available_bytes=winner.available_bytes,
                parent=after,
                on=on,
                taken=True,
                outcome=True,
            )
        )
    else:
        result.append(replace(more, parent=after, on=on, taken=True))
    return result


def _fragmented(settled: Settled) -> Iterator[Node]:
    """Whether the best fits with the allocator's fragmentation, as it is set, then with expandable segments; else what does."""
    if not settled.attempts:
        if settled.winner is None:
            yield _walked("fragmentation", "Does any still fit with the allocator's fragmentation?", NO, None)
        return
    for index, candidate in enumerate(settled.attempts[0]):
        id, what = ("expandable_segments", "Does it with expandable segments?") if index else ("fragmentation", _STILL)
        node = _walked(id, what, _answer(candidate), candidate)
        yield replace(node, because=candidate.walked.numbers) if index and candidate.walked else node
    if len(settled.attempts) > 1:
        winner = settled.winner
        nearest = winner or settled.attempts[-1][-1]
        answer = f"{winner.label}, micro-batch {winner.plan.micro_batch_size}" if winner is not None else "none"
        yield _walked("next", f"Which does ({len(settled.attempts)} plans walked)?", answer, nearest)


_STILL = "Does it still fit with the allocator's fragmentation?"


def _answer(candidate: Candidate) -> str:
    return YES if candidate.walked is not None and candidate.walked.fits else NO


def _walked(id: str, question: str, answer: str, candidate: Candidate | None) -> Node:
    """A question about what the allocator reserves, with its numbers."""
    walked = candidate.walked if candidate is not None else None
    return Node(
        id=id,
        question=question,
        answer=answer,
        because=walked.said if walked is not None else "nothing that was walked through the allocator",
        needed_bytes=walked.device_bytes if walked is not None else None,
        available_bytes=walked.available_bytes if walked is not None else None,
        taken=True,
    )


_SOUGHT = {
    "batch": "What is the largest micro-batch that fits?",
    "sequence": "What is the longest sequence that fits?",
    "gpus": "How few GPUs will do?",
    "gpu-type": "Which is the smallest GPU that will do?",
}


def _sought(finding: Finding) -> Node:
    """The leaf's question where something was looked for."""
    assert finding.winner is not None
    return Node(
        id="found",
        question=_SOUGHT[finding.what],
        answer=str(finding.answer),
        because=finding.because,
        needed_bytes=finding.winner.known_bytes,
        available_bytes=finding.winner.available_bytes,
        taken=True,
    )


def _fastest(leaders: Sequence[Candidate]) -> Node:
    """The leaf's question."""
    winner, others = leaders[0], leaders[1:]
    speed = winner.tokens_per_second_per_gpu
    if winner.fits is None:
        question = f"Which is the simplest of the {len(leaders)} that its states allow?"
        because = "a bare parameter count tells neither the rest of the memory nor the time"
    elif speed is None:
        question = f"Which is the simplest of the {len(leaders)} that fit before fragmentation?"
        because = "the time of a step is not known here, so the simplest is taken"
    else:
        question = f"Which is the fastest of the {len(leaders)} that fit before fragmentation?"
        because = f"{format_speed(speed)} per GPU"
        if others:
            rival = others[0]
            other = rival.tokens_per_second_per_gpu or 0.0
            if other > speed and not rival.host_unusual:
                because += f", within 1 % of {rival.label}, and simpler"
            else:
                because += f"; next {rival.label} with {format_speed(other)}"
        host = next((c for c in others if c.host_unusual and (c.tokens_per_second_per_gpu or 0.0) > speed), None)
        if host is not None and not winner.host_unusual:
            because += f"; {host.label} is faster, but its host takes {format_gib(host.host_bytes_per_node)}"
    return Node(
        id="fastest",
        question=question,
        answer=winner.label,
        because=because,
        needed_bytes=winner.known_bytes,
        available_bytes=winner.available_bytes,
        taken=True,
    )
