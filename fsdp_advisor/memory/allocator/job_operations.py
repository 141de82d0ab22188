"""The allocator's operations of a job, and what an evaluation, a CUDA graph or another first step changes in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fsdp_advisor.memory.allocator.caching import FREE, MALLOC, WAIT, kind_of, operation, storage_of
from fsdp_advisor.program.storages import round_up


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOperations:
    """The allocator operations of a job, on numbered storages. `caching` defines their encoding.

    `setup` precedes the first step; `first` and `following` are steps. `carried_over` are the storages that stay alive from one step
    to the next: (number when allocated, number in the next step). `visits` are (first operation, phase, name). `between` runs once after
    the first steps, between two of them. `captured`: forward and backward that a CUDA graph captures once after the first step, in pools of
    the stream `GRAPH`; later steps allocate only what `following` has.
    """

    requests: tuple[int, ...]
    setup: tuple[int, ...]
    first: tuple[int, ...]
    following: tuple[int, ...]
    carried_over: tuple[tuple[int, int], ...]
    visits: tuple[tuple[int, str, str], ...]
    between: tuple[int, ...] = ()
    captured: tuple[int, ...] = ()

    @property
    def optimizer_begins(self) -> int:
        """Index in `following` of the optimizer's first operation; the end if there is no optimizer."""
        return next((at for at, phase, _ in self.visits if phase == "optimizer"), len(self.following))


SIDE, GRAPH = 8, 16
"""Added to the numbers of streams: for the side stream of a graph's warm-up, and for a graph's own pools."""


def with_evaluation(
    steps: StepOperations, forward: StepOperations, *, before: Sequence[int] = (), after: Sequence[int] = ()
) -> StepOperations:
    """The operations of steps with an evaluation between two of them. `forward`: the operations of its forwards as steps.

    `before`: bytes of each storage that is alive during the last forward. `after`: allocations (positive bytes) and frees (negative bytes,
    of an earlier storage of that size) after it, in order. In the end everything is freed, also units that are still gathered because no
    backward follows.
    """
    requests = [*steps.requests, *forward.requests]
    ends = forward.optimizer_begins
    own, shift = _allocated(forward.following), len(steps.requests)
    between: list[int] = []
    alive: list[int] = []

    def change(n_bytes: int) -> None:
        if n_bytes < 0:
            number = next(each for each in alive if requests[each] == round_up(-n_bytes))
            alive.remove(number)
            between.append(operation(FREE, number))
            return
        alive.append(len(requests))
        between.append(operation(MALLOC, len(requests)))
        requests.append(round_up(n_bytes))

    for n_bytes in before:
        change(n_bytes)
    between += _shifted(forward.following[:ends], own, shift)
    for n_bytes in after:
        change(n_bytes)
    between += [*_shifted(forward.following[ends:], own, shift), *(operation(FREE, number) for number in alive)]
    return replace(steps, requests=tuple(requests), between=tuple(between))


def with_first_step(steps: StepOperations, first: StepOperations) -> StepOperations:
    """The operations of steps whose first step is that of `first`, which has the same states."""
    own = _allocated(steps.following)
    return replace(
        first,
        requests=(*first.requests, *steps.requests),
        following=tuple(_shifted(steps.following, own, len(first.requests))),
        visits=steps.visits,
    )


def with_graph(steps: StepOperations) -> StepOperations:
    """The operations of steps whose forward and backward are captured as a CUDA graph in the second step.

    The first step runs them on a side stream. Capturing empties the cache and allocates in pools of the graph, which keep their memory.
    Source: torchtitan 0.3.0, distributed/cudagraph.py, `CUDAGraphWrapper.__call__`; torch 2.13, cuda/graphs.py, `graph.__enter__`.
    """
    ends = steps.optimizer_begins
    body, rest = steps.following[:ends], steps.following[ends:]
    own = _allocated(body)
    requests = [request + SIDE if number in own else request for number, request in enumerate(steps.requests)]
    return replace(
        steps,
        requests=(*requests, *(request + GRAPH for request in steps.requests)),
        captured=tuple(_shifted(body, own, len(steps.requests))),
        following=tuple(op for op in rest if kind_of(op) == WAIT or storage_of(op) not in own),
    )


def _allocated(operations: Sequence[int]) -> set[int]:
    """The storages that the operations allocate."""
    return {storage_of(op) for op in operations if kind_of(op) == MALLOC}


def _shifted(operations: Sequence[int], storages: set[int], shift: int) -> list[int]:
    """The waits, and the operations on these storages, to whose numbers `shift` is added."""
    return [
        op if kind_of(op) == WAIT else operation(kind_of(op), storage_of(op) + shift)
        for op in operations
        if kind_of(op) == WAIT or storage_of(op) in storages
    ]
