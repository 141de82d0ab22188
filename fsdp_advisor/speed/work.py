"""The compute of a step by stretch of the tape: seconds on the GPU by class of operator, and on the CPU that launches them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, cast

from fsdp_advisor.models.profile import ROOT, Polynomial, Profile, Tape, Unit, evaluate
from fsdp_advisor.speed.achieved import KERNEL_GAP_S, LAUNCH_S
from fsdp_advisor.speed.operators import Device, attention_s, batched_s, head_dim, matmul_s_per_flop


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
    """A stretch of root code (`stack` is ROOT, its work under layer 0), or a stack with its recorded layers' work."""

    stack: int
    work: dict[int, Work]


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


class _Form(NamedTuple):
    """A tape as far as its time goes: by segment its stack, its layer (the root's: 0) and which of the `distinct` it is.

    `forward_flops` are those of a whole forward, over all real layers.
    """

    rated: tuple[_Rated, ...]
    distinct: tuple[_Timed, ...]
    segments: tuple[tuple[int, int, int], ...]
    forward_flops: Polynomial


@lru_cache(maxsize=512)
def _form(profile: Profile, tape: Tape) -> _Form:
    forwards = [s for s in tape.segments if s.phase == "forward" and s.stack == ROOT]
    root = _Rated(profile.root, True, _total(s.matmul_flops for s in forwards))
    by_place = {(ROOT, 0): root}
    last_root = max((s.layer for s in forwards), default=0)
    rated: dict[_Rated, int] = {}
    distinct: dict[_Timed, int] = {}
    segments = []
    flops = []
    for segment in tape.segments:
        at_root, backward = segment.stack == ROOT, segment.phase == "backward"
        place = segment.stack, 0 if at_root else segment.layer
        if place not in by_place:
            by_place[place] = _Rated(profile.stacks[segment.stack].units[segment.layer], False, segment.matmul_flops)
        timed = _Timed(
            rated=rated.setdefault(by_place[place], len(rated)),
            backward=backward,
            loss=at_root and segment.layer == (0 if backward else last_root),
            matmul_flops=segment.matmul_flops,
            attention_flops=segment.attention_flops,
            traffic_bytes=segment.traffic_bytes,
            operators=segment.operators,
        )
        segments.append((*place, distinct.setdefault(timed, len(distinct))))
        if not backward:
            count = 1 if at_root else profile.stacks[segment.stack].counts[segment.layer]
            flops += [segment.matmul_flops, segment.attention_flops] * count
    return _Form(tuple(rated), tuple(distinct), tuple(segments), _total(flops))


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
    done: dict[tuple[int, int], Work] = {}
    for stack, layer, number in form.segments:
        work, place = works[number], (stack, layer)
        stretches = forward
        if form.distinct[number].backward:
            stretches = backward
            if checkpointing and stack != ROOT and place in done:
                work = _split(work, done[place])
        else:
            done[place] = work
        if stack == ROOT or not stretches or stretches[-1].stack != stack:
            stretches.append(Stretch(stack, {}))
        stretches[-1].work[layer] = work
    seconds = _by_class(profile, (*forward, *backward))
    return Compute(tuple(forward), tuple(backward), seconds, 3 * evaluate(form.forward_flops, b, t))


def _by_class(profile: Profile, stretches: tuple[Stretch, ...]) -> dict[str, float]:
    matmul = attention = pointwise = loss = recomputation = 0.0
    for stretch in stretches:
        for layer, work in stretch.work.items():
            times = 1 if stretch.stack == ROOT else profile.stacks[stretch.stack].counts[layer]
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
