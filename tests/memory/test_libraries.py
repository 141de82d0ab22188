"""What cuBLAS and attention kernels take through the allocator."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from jobs import Job, job, operations_of, peak_of

from fsdp_advisor.errors import UsageError
from fsdp_advisor.memory.allocator import simulate_allocator
from fsdp_advisor.memory.libraries import cublas_workspace_bytes, real_attention
from fsdp_advisor.model.profile import (
    EAGER_ON_GPU,
    SDPA_BY_CUDNN,
    SDPA_ON_GPU,
    SDPA_ON_GPU_WINDOWED,
    Category,
    Variant,
)
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
def test_workspace(capability: tuple[int, int] | None, config: str | None, kib: int) -> None:
    assert cublas_workspace_bytes(capability, config) == kib * 1024


def test_workspace_config_refused() -> None:
    with pytest.raises(UsageError, match="is not :SIZE:COUNT"):
        cublas_workspace_bytes((9, 0), "4096")


@pytest.mark.parametrize(
    ("attention", "precision", "capability", "windowed", "becomes"),
    [
        ("sdpa", "bf16-mixed", (8, 0), False, "flash_attention_2"),
        ("sdpa", "bf16", None, False, "flash_attention_2"),
        ("sdpa", "bf16-mixed", (7, 5), False, "sdpa"),
        ("sdpa", "fp32", (9, 0), False, SDPA_ON_GPU),
        ("sdpa", "fp32", (7, 5), True, SDPA_ON_GPU_WINDOWED),
        ("eager", "bf16-mixed", (9, 0), False, EAGER_ON_GPU),
        ("eager", "fp32", (9, 0), True, EAGER_ON_GPU),
    ],
)
def test_real_attention(
    attention: str, precision: str, capability: tuple[int, int] | None, windowed: bool, becomes: str
) -> None:
    variant = Variant("fsdp2", precision, attention, "none", False)
    assert real_attention(variant, capability, windowed=windowed).attention == becomes


@pytest.mark.parametrize(
    ("capability", "recorded", "becomes"),
    [
        ((9, 0), (SDPA_ON_GPU, SDPA_BY_CUDNN), SDPA_BY_CUDNN),
        (None, (SDPA_ON_GPU, SDPA_BY_CUDNN), SDPA_BY_CUDNN),
        ((8, 0), (SDPA_ON_GPU, SDPA_BY_CUDNN), SDPA_ON_GPU),
        ((12, 0), (SDPA_ON_GPU, SDPA_BY_CUDNN), SDPA_ON_GPU),
        ((9, 0), (SDPA_ON_GPU,), SDPA_ON_GPU),
        ((8, 0), (SDPA_BY_CUDNN,), "flash_attention_2"),
    ],
)
def test_real_attention_where_it_is_recorded_by_kinds(
    capability: tuple[int, int] | None, recorded: tuple[str, ...], becomes: str
) -> None:
    variant = Variant("fsdp2", "bf16", "sdpa", "none", False)
    keys = [replace(variant, attention=attention).key for attention in recorded]
    assert real_attention(variant, capability, recorded=keys).attention == becomes


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
        if category == Category.SCRATCH
        for _ in range(profile.stacks[segment.stack].counts[segment.layer])
    )
    elements = 2048 * 32 * 64
    assert workspace == {elements * 4: 16, 2048 * 32 * 4: 16, elements * 2: 32}
    requested = Counter(operations_of(profile, tape, plan).requests)
    assert all(requested[size] >= count for size, count in workspace.items())
    assert (
        simulate_allocator(operations_of(profile, tape, plan)).requested_peak_bytes >= peak_of(profile, tape, plan).peak
    )
