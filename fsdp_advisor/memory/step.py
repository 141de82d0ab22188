"""One step of a plan: its schedule and its tape, put together and replayed."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from fsdp_advisor.engines import schedule_for
from fsdp_advisor.engines.wrapping import marked_units
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.course import Course, Followed
from fsdp_advisor.memory.ledger import Ledger, Point
from fsdp_advisor.memory.replay import replay
from fsdp_advisor.memory.score import Score, Shape, score_of, sized
from fsdp_advisor.model.profile import Profile, Tape

MICRO_BATCHES = 3
"""As many of a step as may differ: the first, the others, the last."""


@lru_cache(maxsize=1024)
def replayed(
    profile: Profile, tape: Tape, plan: Plan, *, fused_loss: bool = False, scratch_on: int | None = None
) -> Followed:
    """A plan's steady step, as `composed`; `scratch_on` is how many threads the GPU runs at once whose scratch is counted."""
    played = _played(plan)
    score = composed(profile, tape, played, fused_loss=fused_loss, scratch=scratch_on is not None)
    return _course(profile, score.shape, played).follow(
        sized(score, plan.micro_batch_size, plan.seq_len, scratch_on or 0)
    )


def timeline(profile: Profile, tape: Tape, plan: Plan, *, scratch_on: int | None = None) -> tuple[Point, ...]:
    """A plan's steady step, stretch by stretch, as `replayed`."""
    score = composed(profile, tape, plan, scratch=scratch_on is not None)
    course = course_of(profile, score.shape, plan, whole=True)
    return course.timeline(sized(score, plan.micro_batch_size, plan.seq_len, scratch_on or 0))


def composed(profile: Profile, tape: Tape, plan: Plan, *, fused_loss: bool = False, scratch: bool = False) -> Score:
    """The score that a plan's schedule plays.

    `fused_loss`: as if nothing of the loss were ever whole. `scratch`: with what kernels take for themselves.
    """
    units, grad_marks = _marks(profile, plan)
    return score_of(profile, tape, units, grad_marks=grad_marks, fused_loss=fused_loss, scratch=scratch)


@lru_cache(maxsize=2048)
def _marks(profile: Profile, plan: Plan) -> tuple[frozenset[int], bool]:
    return marked_units(profile, plan), schedule_for(profile, plan).grad_marks


@lru_cache(maxsize=1600)
def _course(profile: Profile, shape: Shape, plan: Plan) -> Course:
    return course_of(profile, shape, plan)


def course_of(profile: Profile, shape: Shape, plan: Plan, *, whole: bool = False) -> Course:
    """What a plan's schedule makes of a tape of this shape."""
    ledger = Ledger(whole=whole)
    replay(profile, shape, schedule_for(profile, plan), plan.gradient_accumulation_steps, ledger)
    return Course.of(ledger, shape.stretches)


def _played(plan: Plan) -> Plan:
    """The plan as far as a schedule looks at it. DDP's alone looks at the batch: it may give out the logits."""
    accumulation = min(plan.gradient_accumulation_steps, MICRO_BATCHES)
    if plan.backend == "ddp" and plan.prepared:
        return replace(plan, gradient_accumulation_steps=accumulation)
    plan = plan.any_batch
    return (
        plan
        if plan.gradient_accumulation_steps == accumulation
        else replace(plan, gradient_accumulation_steps=accumulation)
    )
