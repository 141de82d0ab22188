"""What cuBLAS and attention kernels take through the allocator."""

from __future__ import annotations

from collections import Counter

import pytest

from fsdp_advisor.engines import schedule_for
from fsdp_advisor.errors import UsageError
from fsdp_advisor.estimator import replayed
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.allocator import traced
from fsdp_advisor.memory.allocator.trace import Trace
from fsdp_advisor.memory.libraries import allocated, cublas_workspace_bytes
from fsdp_advisor.memory.replay import replay
from fsdp_advisor.memory.score import score_of, sized
from fsdp_advisor.model.profile import (
    Profile,
    Tape,
)
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.tape_key import TapeKey


@pytest.mark.parametrize(
    ("capability", "config", "kib"),
    [
        ((7, 0), None, 8320),
        ((8, 9), None, 8320),
        ((9, 0), None, 32768),
        ((10, 0), None, 32768),
        ((12, 0), None, 32768),
        (None, None, 32768),
        ((8, 0), ":4096:8", 32768),
        ((9, 0), ":16:8", 128),
        ((9, 0), ":4096:2:16:8", 8320),
    ],
)
def test_workspace(capability: tuple[int, int] | None, config: str | None, kib: int) -> None:
    assert cublas_workspace_bytes(capability, config) == kib * 1024


def test_workspace_config_refused() -> None:
    with pytest.raises(UsageError, match="is not :SIZE:COUNT"):
        cublas_workspace_bytes((9, 0), "4096")


def flash_job() -> tuple[Profile, Tape, Plan]:
    profile = resolve("meta-llama/Llama-3.2-1B").profile
    assert profile is not None
    plan = Plan(
        strategy="zero3",
        backend="fsdp2",
        shard_degree=4,
        seq_len=2048,
        micro_batch_size=1,
        attention="flash_attention_2",
    )
    return profile, profile.tapes[TapeKey("fsdp2", "bf16-mixed", "flash_attention_2", "none", device="gpu").name], plan


def test_scratch_is_walked_and_is_no_tensor() -> None:
    """Per layer, with shared keys: the fp32 accumulator of dq, one fp32 per row and head, dk and dv of every query head."""
    profile, tape, plan = flash_job()
    schedule = schedule_for(profile, plan)
    score = score_of(profile, tape)
    bare = Trace(profile, tape, sized(score, 1, 2048))
    replay(profile, score.shape, schedule, 1, bare)
    tensors = Counter(bare.steps(schedule.made_by_first_step).requests)
    more = Counter(traced(profile, tape, plan).requests) - tensors
    elements = 2048 * 32 * 64
    assert more == {elements * 4: 16, 2048 * 32 * 4: 16, elements * 2: 32}


def test_allocated_is_tensors_scratch_and_two_workspaces() -> None:
    profile, tape, plan = flash_job()
    result = allocated(profile, tape, plan, workspace_bytes=cublas_workspace_bytes((9, 0)))
    assert result.tensor_bytes == replayed(profile, tape, plan).peak
    assert result.peak_bytes == result.tensor_bytes + result.scratch_bytes + 2 * 32 * 2**20
