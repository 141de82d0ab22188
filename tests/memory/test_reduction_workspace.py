"""The workspace of column reductions: as PyTorch 2.13 requests it (in a rehearsal), and in a step."""

from __future__ import annotations

import pytest
from jobs import job, operations_of

from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.memory.allocator import simulate_allocator
from fsdp_advisor.program.reduction_workspace import reduction_workspace_bytes

ASKED = {
    (1024, 768): (6291456, 6291456),
    (1576, 3072): (39321600, 39321600),
    (1576, 768): (9830400, 9830400),
    (8192, 1024): (67108864, 67108864),
    (8192, 4096): (138412032, 113246208),
    (65536, 4096): (138412032, 134217728),
    (1023, 4096): (33554432, 33554432),
    (300000, 1024): (153616384, 153616384),
    (8192, 1001): (2178176, 1793792),
    (8192, 1002): (16416768, 13851648),
    (50000, 2): (0, 0),
    (70000, 1): (0, 0),
    (2048, 49152): (150994944, 125829120),
    (100, 50304): (0, 0),
    (4096, 64): (524288, 524288),
    (4096, 30522): (23440896, 15627264),
}
"""By (rows, columns): bytes on an H100 and on an A100, the same in fp32 and in bf16."""


def threads(gpu: str) -> int:
    return find_gpu(gpu).resident_threads


@pytest.mark.parametrize(("shape", "asked"), ASKED.items(), ids=str)
def test_workspace_is_what_pytorch_requests(shape: tuple[int, int], asked: tuple[int, int]) -> None:
    assert tuple(reduction_workspace_bytes(*shape, threads(gpu)) for gpu in ("H100-80GB", "A100-80GB")) == asked


@pytest.mark.parametrize(
    ("gpu", "expected"), [("T4", 40 * 1024), ("RTX-4090", 128 * 1536), ("A100-80GB", 108 * 2048), ("24GiB", 132 * 2048)]
)
def test_resident_threads_are_those_of_the_gpu(gpu: str, expected: int) -> None:
    assert threads(gpu) == expected


def test_workspace_is_allocated_on_a_gpu_alone() -> None:
    """For ViT's biases: part of what a GPU allocates, of no size where the number of threads is unknown."""
    profile, tape, plan = job(
        "google/vit-base-patch16-224", "zero3", "fsdp2", gpus=8, micro_batch_size=8, seq_len=197,
        attention="flash_attention_2", activation_checkpointing="full",
    )  # fmt: skip
    resident = threads("H100-80GB")
    largest = reduction_workspace_bytes(8 * 197, 3072, resident)
    without, on_gpu = (operations_of(profile, tape, plan, resident_threads=n) for n in (0, resident))
    assert largest in on_gpu.requests and largest not in without.requests
    requested = [simulate_allocator(operations).requested_peak_bytes for operations in (without, on_gpu)]
    assert 0 < requested[1] - requested[0] <= largest
