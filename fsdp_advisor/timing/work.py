"""The compute of a step by stretch of the tape: seconds on the GPU by class of operator, and on the CPU that launches them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, cast

from fsdp_advisor.model.profile import ROOT, Polynomial, Profile, Run, Tape, Unit, evaluate
from fsdp_advisor.timing.achieved import KERNEL_GAP_S, LAUNCH_S
from fsdp_advisor.timing.operators import Device, attention_s, batched_s, head_dim, matmul_s_per_flop


class Work(NamedTuple):
    """One stretch of one forward or backward. Seconds; `recomputation` is the part of the others that repeats a forward."""

    matmul: float = 0.0
    attention: float = 0.0
    pointwise: float = 0.0
    loss: float = 0.0
    recomputation: float = 0.0
    cpu: float = 0.0

    @property
    def gpu(self) -> float:
        return self.matmul + self.attention + self.pointwise + self.loss + self.recomputation


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of root code (`stack` is ROOT), or a stack. Layers that are alike are told as one: `work` is by the first of them,
    `counts` says how many real ones it stands for, `runs` in which order they run. The root's code is its layer 0.
    """

    stack: int
    work: dict[int, Work]
    counts: Mapping[int, int]
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Compute:
    """A step's compute on one device, in the order in which it runs; and in `seconds` by class of operator, over all real layers."""

    forward: tuple[Stretch, ...]
    backward: tuple[Stretch, ...]
    seconds: dict[str, float]
    model_flops: (
        float  # of one micro-batch as the model needs them: forward and twice as much backward, nothing recomputed
    )


_NOTHING: Polynomial = (0, 0, 0, 0, 0, 0)


class _Timed(NamedTuple):
    """What the time of a segment comes from, whatever B, T and the GPU are. Layers of a kind have the same.

    `rated` is the number of its matrix products' rate.
    """

    rated: int
    backward: bool
    loss: bool
    matmul_flops: Polynomial
    attention_flops: Polynomial
    traffic_bytes: Polynomial
    operators: int


class _Rated(NamedTuple):
    """What the rate of a unit's matrix products comes from: they, and the FLOPs of its first segment."""

    unit: Unit
    at_root: bool
    matmul_flops: Polynomial


class _Stretch(NamedTuple):
    """A `Stretch`, whatever B, T and the GPU are: `layers` are those that `work` is by, each with the numbers of its work and, in
    backward, of the forward that checkpointing repeats.
    """

    stack: int
    backward: bool
    layers: tuple[tuple[int, int, int | None], ...]
    counts: Mapping[int, int]
    runs: tuple[Run, ...]


class _Form(NamedTuple):
    """A tape as far as its time goes: its stretches in order, with the `distinct` works and rates that they number.

    `forward_flops` are those of a whole forward, over all real layers.
    """

    rated: tuple[_Rated, ...]
    distinct: tuple[_Timed, ...]
    stretches: tuple[_Stretch, ...]
    forward_flops: Polynomial


@lru_cache(maxsize=512)
def _form(profile: Profile, tape: Tape) -> _Form:
    forwards = [s for s in tape.segments if s.phase == "forward" and s.stack == ROOT]
    root = _Rated(profile.root, True, _total(s.matmul_flops for s in forwards))
    by_place = {(ROOT, 0): root}
    last_root = max((s.layer for s in forwards), default=0)
    rated: dict[_Rated, int] = {}
    distinct: dict[_Timed, int] = {}
    stretches: list[tuple[int, bool, dict[int, int]]] = []
    done: dict[tuple[int, int], int] = {}
    flops: list[Polynomial] = []
    for segment in tape.segments:
        at_root, backward = segment.stack == ROOT, segment.phase == "backward"
        stack, layer = place = segment.stack, 0 if at_root else segment.layer
        if place not in by_place:
            by_place[place] = _Rated(profile.stacks[stack].units[layer], False, segment.matmul_flops)
        timed = _Timed(
            rated=rated.setdefault(by_place[place], len(rated)),
            backward=backward,
            loss=at_root and segment.layer == (0 if backward else last_root),
            matmul_flops=segment.matmul_flops,
            attention_flops=segment.attention_flops,
            traffic_bytes=segment.traffic_bytes,
            operators=segment.operators,
        )
        number = distinct.setdefault(timed, len(distinct))
        if at_root or not stretches or stretches[-1][:2] != (stack, backward):
            stretches.append((stack, backward, {}))
        stretches[-1][2][layer] = number
        if not backward:
            flops += [segment.matmul_flops, segment.attention_flops] * (
                1 if at_root else profile.stacks[stack].counts[layer]
            )
            if not at_root:
                done[place] = number
    described = tuple(_stretch(profile, stack, backward, numbers, done) for stack, backward, numbers in stretches)
    return _Form(tuple(rated), tuple(distinct), described, _total(flops))


def _stretch(
    profile: Profile, stack: int, backward: bool, numbers: dict[int, int], done: dict[tuple[int, int], int]
) -> _Stretch:
    """`numbers` are those of the recorded layers' works, `done` of their forwards by place."""
    forward = {layer: done.get((stack, layer)) if backward else None for layer in numbers}
    units = (profile.root,) if stack == ROOT else profile.stacks[stack].units
    first: dict[tuple[object, ...], int] = {}
    like = {layer: first.setdefault((n, forward[layer], units[layer]), layer) for layer, n in numbers.items()}
    counts: Counter[int] = Counter()
    runs: list[Run] = []
    for run in (Run((0,), 1),) if stack == ROOT else profile.stacks[stack].runs:
        pattern = tuple(like[layer] for layer in run.pattern)
        alone = run.repeats == 1 or len(set(pattern)) == 1  # each layer may join its neighbours
        for part in [(layer,) for layer in pattern] if alone else [pattern]:
            before = runs.pop().repeats if runs and runs[-1].pattern == part else 0
            runs.append(Run(part, before + run.repeats))
        for layer in pattern:
            counts[layer] += run.repeats
    if backward:
        runs = [Run(run.pattern[::-1], run.repeats) for run in reversed(runs)]
    layers = tuple((layer, numbers[layer], forward[layer]) for layer in counts)
    return _Stretch(stack, backward, layers, counts, tuple(runs))


def _total(polynomials: Iterable[Polynomial]) -> Polynomial:
    return cast(Polynomial, tuple(map(sum, zip(_NOTHING, *polynomials, strict=True))))


@lru_cache(maxsize=128)
def compute_of(profile: Profile, tape: Tape, b: int, t: int, device: Device, checkpointing: bool) -> Compute:
    """The tape's work at micro-batch `b` and `t` tokens."""
    form, head, causal = _form(profile, tape), head_dim(profile), profile.task == "causal-lm"
    rates = [matmul_s_per_flop(unit, at_root, b * t, device, evaluate(p, b, t)) for unit, at_root, p in form.rated]
    works = [_work(timed, b, t, device, rates[timed.rated], head, causal) for timed in form.distinct]
    forward: list[Stretch] = []
    backward: list[Stretch] = []
    for stretch in form.stretches:
        work = {
            layer: works[number] if again is None or not checkpointing else _split(works[number], works[again])
            for layer, number, again in stretch.layers
        }
        found = Stretch(stretch.stack, work, stretch.counts, stretch.runs)
        (backward if stretch.backward else forward).append(found)
    seconds = _by_class((*forward, *backward))
    return Compute(tuple(forward), tuple(backward), seconds, 3 * evaluate(form.forward_flops, b, t))


def _by_class(stretches: tuple[Stretch, ...]) -> dict[str, float]:
    matmul = attention = pointwise = loss = recomputation = 0.0
    for stretch in stretches:
        for layer, work in stretch.work.items():
            times = stretch.counts[layer]
            matmul += times * work.matmul
            attention += times * work.attention
            pointwise += times * work.pointwise
            loss += times * work.loss
            recomputation += times * work.recomputation
    return {
        "matmul": matmul,
        "attention": attention,
        "pointwise": pointwise,
        "loss": loss,
        "recomputation": recomputation,
    }


def _work(timed: _Timed, b: int, t: int, device: Device, rates: tuple[float, float], head: int, causal: bool) -> Work:
    """`rates`: seconds per FLOP of its matrix products in forward and in backward."""
    own = evaluate(timed.matmul_flops, b, t)
    # attention's own products grow with B T^2; those of the weights with B T
    batched = min(own, evaluate((0, 0, 0, 0, *timed.matmul_flops[4:]), b, t))
    attention = evaluate(timed.attention_flops, b, t)
    moved = evaluate(timed.traffic_bytes, b, t) / device.memory_bytes_per_s + timed.operators * KERNEL_GAP_S
    return Work(
        matmul=(own - batched) * rates[timed.backward],
        attention=batched_s(batched, device, head)
        + attention_s(attention, device, head, t, causal=causal, backward=timed.backward),
        pointwise=0.0 if timed.loss else moved,
        loss=moved if timed.loss else 0.0,
        cpu=timed.operators * LAUNCH_S,
    )


def _split(work: Work, forward: Work) -> Work:
    """A checkpointed layer's backward: the forward it repeats, and the rest."""
    matmul = min(work.matmul, forward.matmul)
    attention = min(work.attention, forward.attention)
    pointwise = min(work.pointwise, forward.pointwise)
    return Work(
        matmul=work.matmul - matmul,
        attention=work.attention - attention,
        pointwise=work.pointwise - pointwise,
        recomputation=matmul + attention + pointwise,
        cpu=work.cpu,
    )
