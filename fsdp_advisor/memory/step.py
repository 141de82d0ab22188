"""One step of a plan: its schedule and its tape, put together and replayed."""

from __future__ import annotations

from functools import lru_cache

from fsdp_advisor.memory.ledger import Ledger
from fsdp_advisor.memory.replay import Schedule, replay
from fsdp_advisor.memory.schedules import schedule_for
from fsdp_advisor.memory.score import Score, compile_tape
from fsdp_advisor.memory.wrapping import marked
from fsdp_advisor.models.profile import Profile, Tape
from fsdp_advisor.plan import Plan


def composed(
    profile: Profile, tape: Tape, plan: Plan, *, fused_loss: bool = False, scratch: bool = False
) -> tuple[Schedule, Score]:
    """A plan's schedule, fresh, and the score that it plays.

    `fused_loss`: as if nothing of the loss were ever whole. `scratch`: with what kernels take for themselves.
    """
    schedule = schedule_for(profile, plan)
    score = compile_tape(
        profile,
        marked(profile, tape, plan),
        plan.micro_batch_size,
        plan.seq_len,
        grad_marks=schedule.grad_marks,
        fused_loss=fused_loss,
        scratch=scratch,
    )
    return schedule, score


@lru_cache(maxsize=2048)
def replayed(profile: Profile, tape: Tape, plan: Plan, *, fused_loss: bool = False, scratch: bool = False) -> Ledger:
    """A plan's steady step, as `composed`."""
    schedule, score = composed(profile, tape, plan, fused_loss=fused_loss, scratch=scratch)
    return replay(profile, score, schedule, plan.gradient_accumulation_steps)
