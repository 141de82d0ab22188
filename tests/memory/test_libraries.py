"""What cuBLAS and attention kernels take through the allocator."""

from __future__ import annotations

from collections import Counter

import pytest
from jobs import Job, job, operations_of, peak_of

from fsdp_advisor.errors import UsageError
from fsdp_advisor.memory.allocator import simulate_allocator
from fsdp_advisor.memory.libraries import cublas_workspace_bytes
from fsdp_advisor.model.tape import Category
from fsdp_advisor.program.spans import storage_bytes


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
def test_workspace_follows_the_gpu_and_the_config(
    capability: tuple[int, int] | None, config: str | None, kib: int
) -> None:
    assert cublas_workspace_bytes(capability, config) == kib * 1024


def test_malformed_workspace_config_is_refused() -> None:
    with pytest.raises(UsageError, match="is not :SIZE:COUNT"):
        cublas_workspace_bytes((9, 0), "4096")


def flash_job() -> Job:
    """One sequence of 2,048 tokens on each of four ranks, with flash attention."""
    return job(
        "meta-llama/Llama-3.2-1B", "zero3", "fsdp2", attention="flash_attention_2", micro_batch_size=1, seq_len=2048
    )


def test_attention_workspace_is_allocated_but_is_no_tensor() -> None:
    """Per layer, with shared keys: the fp32 accumulator of dq, one fp32 per row and head, dk and dv of every query head."""
    profile, tape, plan = flash_job()
    sizes = storage_bytes(tape, 1, 2048)
    workspace = Counter(
        sizes[size]
        for segment, born in zip(tape.segments, tape.births, strict=True)
        for size, category in born
        if category == Category.SCRATCH and sizes[size]
        for _ in range(profile.stacks[segment.stack].counts[segment.layer])
    )
    elements = 2048 * 32 * 64
    assert workspace == {elements * 4: 16, 2048 * 32 * 4: 16, elements * 2: 32}
    requested = Counter(operations_of(profile, tape, plan).requests)
    assert all(requested[size] >= count for size, count in workspace.items())
    assert (
        simulate_allocator(operations_of(profile, tape, plan)).requested_peak_bytes >= peak_of(profile, tape, plan).peak
    )
