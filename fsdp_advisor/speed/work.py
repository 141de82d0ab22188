"""The compute of a step by stretch of the tape: seconds on the GPU by class of operator, and on the CPU that launches them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from fsdp_advisor.models.profile import ROOT, Profile, Segment, Tape, evaluate
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
    """A step's compute on one device, in the order in which it runs."""

    forward: tuple[Stretch, ...]
    backward: tuple[Stretch, ...]
    model_flops: (
        float  # of one micro-batch as the model needs them: forward and twice as much backward, nothing recomputed
    )


@lru_cache(maxsize=128)
def compute_of(profile: Profile, tape: Tape, b: int, t: int, device: Device, checkpointing: bool) -> Compute:
    """The tape's work at micro-batch `b` and `t` tokens."""
    tokens, head, causal = b * t, head_dim(profile), profile.task == "causal-lm"
    rates: dict[tuple[int, int], tuple[float, float, float]] = {}
    forward_flops = 0.0
    root_flops = 0
    segments = _timed(tape)
    for segment in segments:
        if segment.phase == "forward" and segment.stack == ROOT:
            root_flops += evaluate(segment.matmul_flops, b, t)
    rates[ROOT, 0] = (*matmul_s_per_flop(profile.root, True, tokens, device, root_flops), float(root_flops))
    phases: dict[str, list[Stretch]] = {"forward": [], "backward": []}
    done: dict[tuple[int, int], Work] = {}
    last_root = max((s.layer for s in segments if s.phase == "forward" and s.stack == ROOT), default=0)
    for segment in segments:
        own = evaluate(segment.matmul_flops, b, t)
        place = (ROOT, 0) if segment.stack == ROOT else (segment.stack, segment.layer)
        backward = segment.phase == "backward"
        if place not in rates:
            unit = profile.stacks[segment.stack].units[segment.layer]
            rates[place] = (*matmul_s_per_flop(unit, False, tokens, device, own), float(own))
        loss = segment.stack == ROOT and segment.layer == (0 if backward else last_root)
        work = _work(segment, own, b, t, device, head, causal, rates[place][backward], loss)
        if not backward:
            times = 1 if segment.stack == ROOT else profile.stacks[segment.stack].counts[segment.layer]
            forward_flops += times * (own + evaluate(segment.attention_flops, b, t))
            done[place] = work
        elif checkpointing and segment.stack != ROOT and place in done:
            work = _split(work, done[place])
        stretches = phases[segment.phase]
        if segment.stack == ROOT or not stretches or stretches[-1].stack != segment.stack:
            stretches.append(Stretch(segment.stack, {}))
        stretches[-1].work[place[1]] = work
    return Compute(tuple(phases["forward"]), tuple(phases["backward"]), 3 * forward_flops)


@lru_cache(maxsize=512)
def _timed(tape: Tape) -> tuple[Segment, ...]:
    """The tape's segments without their births and deaths, which are most of it and are not timed."""
    return tuple(replace(segment, events=()) for segment in tape.segments)


def _work(
    segment: Segment, own: int, b: int, t: int, device: Device, head: int, causal: bool, rate: float, loss: bool
) -> Work:
    moved = evaluate(segment.traffic_bytes, b, t) / device.memory_bytes_per_s + segment.operators * KERNEL_GAP_S
    # attention's own products grow with B T^2; those of the weights with B T
    batched = min(own, evaluate((0, 0, 0, 0, segment.matmul_flops[4], segment.matmul_flops[5]), b, t))
    attention = evaluate(segment.attention_flops, b, t)
    return Work(
        matmul=(own - batched) * rate,
        attention=batched_s(batched, device, head)
        + attention_s(attention, device, head, t, causal=causal, backward=segment.phase == "backward"),
        pointwise=0.0 if loss else moved,
        loss=moved if loss else 0.0,
        cpu=segment.operators * LAUNCH_S,
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
