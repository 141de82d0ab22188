"""What sums over rows stage, as PyTorch 2.13 asked its allocator for it (tests/cuda_without_kernels), and in a step."""

from __future__ import annotations

import pytest

from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.allocator import AllocatorConf, CachingAllocator, traced
from fsdp_advisor.memory.ledger import SCRATCH
from fsdp_advisor.memory.score import score_of, sized
from fsdp_advisor.memory.staging import staging_bytes
from fsdp_advisor.memory.step import replayed
from fsdp_advisor.model.catalog import find
from fsdp_advisor.model.catalog import profile as catalogued
from fsdp_advisor.model.profile import Staging
from fsdp_advisor.model.tape_key import TapeKey

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
"""By (rows, columns): bytes on an H100 and on an A100, alike in fp32 and in bf16."""


def threads(gpu: str) -> int:
    return find_gpu(gpu).resident_threads


@pytest.mark.parametrize(("shape", "asked"), ASKED.items(), ids=str)
def test_it_is_what_pytorch_asks_for(shape: tuple[int, int], asked: tuple[int, int]) -> None:
    assert tuple(staging_bytes(*shape, threads(gpu)) for gpu in ("H100-80GB", "A100-80GB")) == asked


@pytest.mark.parametrize(
    ("gpu", "expected"), [("T4", 40 * 1024), ("RTX-4090", 128 * 1536), ("A100-80GB", 108 * 2048), ("24GiB", 132 * 2048)]
)
def test_resident_threads(gpu: str, expected: int) -> None:
    assert threads(gpu) == expected


def test_a_step_stages_on_a_gpu_alone() -> None:
    """ViT's biases: alive at the highest, in the walk as in the ledger, and of no size where there is no GPU."""
    entry = find("google/vit-base-patch16-224")
    assert entry is not None
    profile = catalogued(entry)
    tape = profile.tapes[TapeKey("fsdp2", "bf16-mixed", "flash_attention_2", "full", device="gpu").name]
    plan = Plan(
        strategy="zero3", backend="fsdp2", shard_degree=8, seq_len=197, micro_batch_size=8,
        attention="flash_attention_2", activation_checkpointing="full",
    )  # fmt: skip
    on = threads("H100-80GB")
    largest = staging_bytes(8 * 197, 3072, on)
    bare, staged = (replayed(profile, tape, plan, scratch_on=n) for n in (0, on))
    assert staged.at_peak[SCRATCH] == largest and bare.peak < staged.peak
    for n, followed in ((0, bare), (on, staged)):
        steps = traced(profile, tape, plan, resident_threads=n)
        assert (largest in steps.requests) == (n == on)
        allocator = CachingAllocator(steps.requests, AllocatorConf(), gpu_keeps_up=True)
        for operations in (steps.setup, steps.first):
            allocator.run(operations)
        allocator.begin_step()
        for born, known in steps.handed_on:
            allocator.address[known] = allocator.address[born]
        allocator.requested_peak = 0
        allocator.run(steps.following)
        assert allocator.requested_peak == followed.peak
    score = score_of(profile, tape, scratch=True)
    assert score.stagings and all(isinstance(size, Staging) for _, size in score.stagings)
    assert not score_of(profile, tape).stagings
    assert sized(score, 8, 197, on).high != sized(score, 8, 197).high
