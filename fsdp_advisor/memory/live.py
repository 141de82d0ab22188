"""Live memory: the tensors alive on rank 0 during a step. It is a reader of the step program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from fsdp_advisor.model.tape import value_at
from fsdp_advisor.program.accounts import ACCOUNTS, PHASES, Account, Phase
from fsdp_advisor.program.instructions import (
    Alloc,
    Compute,
    DropBatch,
    DropGraph,
    DropLoss,
    Free,
    Instruction,
    MicroBatch,
    Reclassify,
    StepProgram,
    Visit,
)
from fsdp_advisor.program.spans import Span, changes_by_account, span_bytes, storage_bytes
from fsdp_advisor.program.storages import round_up

_INPUT_ACCOUNTS = (int(Account.OTHER),)
_GRAPH_ACCOUNTS = (int(Account.ACTIVATIONS), int(Account.TEMPORARIES), int(Account.DEQUANTIZATION))
_LOSS_ACCOUNTS = (int(Account.LOSS),)
_Drop = DropBatch | DropGraph | DropLoss
_WORKSPACE = frozenset({int(Account.WORKSPACE)})
_WORKSPACE_AND_LOSS = frozenset({int(Account.WORKSPACE), int(Account.LOSS)})


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPeak:
    """The peak of a step; the first one if there are several. Bytes, with each storage rounded up to 512.

    `phase_peaks`: peak bytes by phase of the step. `tape_phase_peaks`: the same with scoring and generation separate from the forward.
    """

    peak: int
    phase: Phase
    where: str
    phase_peaks: dict[Phase, int]
    at_peak: dict[str, int]
    tape_phase_peaks: dict[str, int]


class TimelinePoint(NamedTuple):
    """Live bytes after one visit, and their peak during it."""

    phase: Phase
    where: str
    live_bytes: int
    high_bytes: int


def step_peak(program: StepProgram, b: int, t: int) -> StepPeak:
    """The peak of a step at micro-batch `b` and `t` tokens."""
    reader = _Reader(program, b, t, _WORKSPACE)
    best, phase_peaks = None, dict.fromkeys(PHASES, 0)
    tape_phase_peaks: defaultdict[str, int] = defaultdict(int)
    for visit, _, high, highest_at in reader.walk():
        if best is None or high > best[0]:
            best = high, visit, highest_at
        phase_peaks[visit.phase] = max(phase_peaks[visit.phase], high)
        of_tape = visit.phase if visit.segment is None else program.layout.tape.segments[visit.segment].phase
        tape_phase_peaks[of_tape] = max(tape_phase_peaks[of_tape], high)
    assert best is not None
    peak, visit, highest_at = best
    return StepPeak(
        peak=peak,
        phase=visit.phase,
        where=visit.name,
        phase_peaks=phase_peaks,
        at_peak=dict(zip(ACCOUNTS, reader.accounts_at(visit, highest_at), strict=False)),
        tape_phase_peaks=dict(tape_phase_peaks),
    )


def peak_bytes(program: StepProgram, b: int, t: int, *, fused_loss: bool = False) -> int:
    """The bytes of `step_peak`, computed faster because the breakdown by account is left out. `fused_loss`: the loss allocates nothing."""
    reader = _Reader(program, b, t, _WORKSPACE_AND_LOSS if fused_loss else _WORKSPACE)
    return max(high for _, _, high, _ in reader.walk())


def step_timeline(program: StepProgram, b: int, t: int) -> tuple[TimelinePoint, ...]:
    """Live memory visit by visit. A run of repeated layers has its first two visits, its last two, and one for all others."""
    points: list[TimelinePoint] = []
    for visit, live, high, _ in _Reader(program, b, t, _WORKSPACE).walk():
        points.append(TimelinePoint(visit.phase, visit.name, live, high))
    return tuple(points)


def step_moments(program: StepProgram, b: int, t: int, phase: Phase) -> tuple[Callable[[], dict[str, int]], ...]:
    """For each visit of a phase in the last micro-batch, in order, a function that returns the bytes alive at its peak, by account."""
    reader = _Reader(program, b, t, _WORKSPACE)
    last = {id(visit) for visit in (*program.micro_batches[-1].visits, program.optimizer)}
    peaks = [(visit, at) for visit, _, _, at in reader.walk() if id(visit) in last and visit.phase == phase]
    return tuple(partial(_accounts, reader, visit, at) for visit, at in peaks)


def _accounts(reader: _Reader, visit: Visit, at: int) -> dict[str, int]:
    return dict(zip(ACCOUNTS, reader.accounts_at(visit, at), strict=False))


class _Reader:
    """Walks a program at one (B, T)."""

    def __init__(self, program: StepProgram, b: int, t: int, excluded: frozenset[int]) -> None:
        self._program, self._b, self._t, self._excluded = program, b, t, excluded
        self._sizes = storage_bytes(program.layout.tape, b, t)
        self._spans = span_bytes(program.layout, self._sizes, excluded)

    def walk(self) -> Iterator[tuple[Visit, int, int, int]]:
        """(visit, live bytes after it, peak during it, index of the instruction that reaches the peak), in order."""
        net, high = self._spans
        total = sum(alloc.storages.rounded for alloc in self._program.states)
        for visit, before in self._visits():
            highest, highest_at = total, -1
            for at, instruction in enumerate(visit.instructions):
                if isinstance(instruction, Compute):
                    number = instruction.span.number
                    reached = total + high[number]
                    total += net[number]
                elif isinstance(instruction, Alloc):
                    reached = total = total + self._bytes(instruction)
                elif isinstance(instruction, Free):
                    total -= self._bytes(instruction)
                    continue
                elif isinstance(instruction, _Drop):
                    total -= sum(self._dropped(instruction, before).values())
                    if highest_at < 0:
                        highest = total
                    continue
                else:
                    continue
                if reached > highest:
                    highest, highest_at = reached, at
            yield visit, total, highest, highest_at

    def accounts_at(self, visit: Visit, index: int) -> list[int]:
        """Live bytes by account at the peak of `visit`, which its instruction `index` reaches (-1: its beginning)."""
        live = [0] * len(Account)
        for alloc in self._program.states:
            live[alloc.account] += alloc.storages.rounded
        for other, before in self._visits():
            for at, instruction in enumerate(other.instructions):
                if other is visit and at >= index:
                    if index >= 0:
                        self._apply(live, instruction, before, to_highest=True)
                    elif isinstance(instruction, _Drop):
                        self._apply(live, instruction, before)
                        continue
                    return live
                self._apply(live, instruction, before)
            if other is visit:
                return live
        raise AssertionError("the visit is not part of the program")

    def _visits(self) -> Iterator[tuple[Visit, MicroBatch | None]]:
        """Every visit, with the micro-batch before the one that it belongs to; None in the first micro-batch."""
        before = None
        for micro_batch in self._program.micro_batches:
            for visit in micro_batch.visits:
                yield visit, before
            before = micro_batch
        yield self._program.optimizer, before

    def _bytes(self, instruction: Alloc | Free) -> int:
        if instruction.per_batch is not None:
            return round_up(value_at(instruction.per_batch, self._b, self._t))
        return instruction.storages.rounded if isinstance(instruction, Alloc) else instruction.n_bytes

    def _dropped(self, instruction: _Drop, before: MicroBatch | None) -> dict[int, int]:
        """Bytes by account that the instruction frees of those alive since the previous micro-batch."""
        match instruction:
            case DropBatch():
                accounts: tuple[int, ...] = _INPUT_ACCOUNTS
            case DropGraph():
                accounts = _GRAPH_ACCOUNTS
            case DropLoss(with_graph):
                accounts = _LOSS_ACCOUNTS + (_GRAPH_ACCOUNTS if with_graph else ())
        left: defaultdict[int, int] = defaultdict(int)
        for visit in before.visits if before else ():
            for other in visit.instructions:
                if isinstance(other, Compute):
                    for account, n_bytes in changes_by_account(other.span, self._sizes, self._excluded).items():
                        if account in accounts:
                            left[account] += n_bytes
        return left

    def _apply(
        self, live: list[int], instruction: Instruction, before: MicroBatch | None, *, to_highest: bool = False
    ) -> None:
        """Apply an instruction to `live`. `to_highest`: apply a span only up to its peak."""
        match instruction:
            case Compute(span=span):
                changes = (
                    self._until_highest(span) if to_highest else changes_by_account(span, self._sizes, self._excluded)
                )
                for account, n_bytes in changes.items():
                    live[account] += n_bytes
            case Alloc():
                live[instruction.account] += self._bytes(instruction)
            case Free():
                live[instruction.account] -= self._bytes(instruction)
            case Reclassify():
                live[instruction.before] -= instruction.n_bytes
                live[instruction.after] += instruction.n_bytes
            case DropBatch() | DropGraph() | DropLoss():
                for account, n_bytes in self._dropped(instruction, before).items():
                    live[account] -= n_bytes
            case _:
                pass  # collectives and copies take time, not memory

    def _until_highest(self, span: Span) -> dict[int, int]:
        """Net bytes by account that a span has allocated at its first peak."""
        changes = [(a, self._sizes[size] * times) for a, size, times in span.changes if a not in self._excluded]
        levels = list(accumulate((n_bytes for _, n_bytes in changes), initial=0))
        result: defaultdict[int, int] = defaultdict(int)
        for account, n_bytes in changes[: levels.index(max(levels))]:
            result[account] += n_bytes
        return result
