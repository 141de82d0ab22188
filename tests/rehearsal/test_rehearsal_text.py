"""What the text of a rehearsal says about ranks that did not end by themselves."""

from __future__ import annotations

import pytest

from fsdp_advisor.rehearsal.launch import Ended
from fsdp_advisor.rehearsal.report import PhasePeak, RankResult, Rehearsal
from fsdp_advisor.rehearsal.text import rehearsal_text
from fsdp_advisor.render.terminal import Screen

PEAK = PhasePeak(
    step=1, phase="forward", device=0, peak_allocated_bytes=1 << 30, peak_reserved_bytes=2 << 30, peak_device_bytes=3 << 30,
    allocated_bytes_at_end=1 << 30, allocator_retries=0,
)  # fmt: skip


def rank(number: int, status: str) -> RankResult:
    return RankResult(
        rank=number, world_size=2, pid=number, status=status, error=None, steps=3, seconds=1.0, torch="2.13.0", gpu_memory_bytes=80 << 30,
        phases=(PEAK,), out_of_memory=(), timeline=(),
    )  # fmt: skip


def rehearsal(status: int, statuses: tuple[str, ...]) -> Rehearsal:
    return Rehearsal(
        command=("torchrun", "train.py"), gpu="A100-80GB", gpus=2, nnodes=1,
        ranks=tuple(rank(i, each) for i, each in enumerate(statuses)),
        ended=Ended(status=status, seconds=5.0, peak_host_bytes=20 << 30),
    )  # fmt: skip


def test_a_narrow_screen_keeps_ranks_and_phases_whole() -> None:
    lines = rehearsal_text(rehearsal(0, ("completed", "completed")), Screen(width=40)).splitlines()
    assert max(map(len, lines)) <= 40
    assert [line.split() for line in lines if "GiB" in line and ", GiB" in line] == [
        ["rank", "allocated,", "GiB", "reserved,", "GiB"],
        ["step", "phase", "of", "rank", "0", "allocated,", "GiB"],
    ]


@pytest.mark.parametrize(
    ("status", "statuses"),
    [(137, ("completed", "completed")), (1, ("completed", "running"))],
    ids=["the command", "a rank of a launcher"],
)
def test_a_killed_process_is_reported_with_the_memory_of_the_host(status: int, statuses: tuple[str, str]) -> None:
    text = rehearsal_text(rehearsal(status, statuses), Screen(width=200))
    assert "The host's memory may be exhausted: the processes used 20.00 GiB" in text
    assert ("Rank 1 was ended from outside after 3 steps" in text) == ("running" in statuses)
