"""Storages that many layers share, when one recorded layer stands for many real ones."""

from __future__ import annotations

import pytest

from fsdp_advisor.engines.registry import step_program
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.live import step_peak, step_timeline
from fsdp_advisor.model.profile import Profile, Run, Stack, Unit
from fsdp_advisor.model.tape import ROOT, Category, Op, Segment, Tape

MASK, SAVED, SCRATCH = 1024, 2048, 4096  # bytes per token
SIZES = tuple((0, 0, n_bytes, 0, 0, 0) for n_bytes in (MASK, SAVED, SCRATCH))


def model(*runs: Run) -> tuple[Profile, Tape]:
    """Layers of two kinds save a tensor each; those of kind 1 share a mask, which on the tape dies with layer 1's backward."""
    save, temporary = (int(Op.ALLOC), 1, int(Category.ACTIVATION)), (int(Op.ALLOC), 2, int(Category.TEMPORARY))
    free = int(Op.FREE)
    segments = (
        Segment("forward", ROOT, 0, ((int(Op.ALLOC), 0, int(Category.ACTIVATION)),)),
        Segment("forward", 0, 0, (save,)),
        Segment("forward", 0, 1, (save,)),
        Segment("backward", 0, 1, (temporary, (free, 2, 0), (free, 0, 0), (free, 3, 0))),
        Segment("backward", 0, 0, (temporary, (free, 1, 0), (free, 4, 0))),
    )
    layer = Unit("Layer", ())
    stack = Stack("layers", (layer, layer), runs)
    return Profile("two kinds", "causal-lm", Unit("Model", ()), (stack,), (0,), None, {}, {}), Tape(SIZES, segments)


def plan() -> Plan:
    request = make_request({"model": "openai-community/gpt2", "gpus": 1, "strategy": "ddp", "backend": "ddp"})
    return plans(request, seq_len=512)[0]


@pytest.mark.parametrize(
    "runs",
    [
        (Run((0, 1), 1),),
        (Run((0, 1), 3),),
        (Run((0, 1), 40),),  # most of them are jumped over
        (Run((0, 1), 2), Run((0,), 30)),
        (Run((1, 1, 0), 9), Run((0, 1), 12)),
    ],
    ids=str,
)
def test_storages_shared_by_layers_are_freed_with_the_last_of_them(runs: tuple[Run, ...]) -> None:
    profile, tape = model(*runs)
    program = step_program(profile, tape, plan())
    mask, saved, temporary = (512 * n_bytes for n_bytes in (MASK, SAVED, SCRATCH))
    assert step_timeline(program, 1, 512)[-1].live_bytes == 0
    assert step_peak(program, 1, 512).peak == mask + saved * profile.stacks[0].depth + temporary
