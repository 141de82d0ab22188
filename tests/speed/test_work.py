"""A step's compute: what layers of a kind have in common is computed once, and stands for each of them."""

from __future__ import annotations

import pytest

from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.models import catalog
from fsdp_advisor.models.profile import ROOT, evaluate
from fsdp_advisor.plan import Plan
from fsdp_advisor.speed.operators import device_of
from fsdp_advisor.speed.work import compute_of
from fsdp_advisor.tapes import variant_of


@pytest.mark.parametrize("model", ["meta-llama/Llama-2-7b-hf", "google/gemma-3-4b-pt", "openai/whisper-small"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_every_recorded_layer_has_its_own_work(model: str, checkpointing: str) -> None:
    entry = catalog.find(model)
    device = device_of(find_gpu("A100-80GB"), "bf16")
    assert entry is not None and device is not None
    profile, b, t = catalog.profile(entry), 3, 640
    plan = Plan(strategy="zero3", backend="fsdp2", shard_degree=8, micro_batch_size=b, seq_len=t, activation_checkpointing=checkpointing, attention="flash_attention_2")  # fmt: skip
    tape = profile.tapes[variant_of(plan).key]
    compute = compute_of(profile, tape, b, t, device, checkpointing == "full")
    done = {
        phase: {(s.stack, n): work for s in stretches if s.stack != ROOT for n, work in s.work.items()}
        for phase, stretches in (("forward", compute.forward), ("backward", compute.backward))
    }
    flops = 0
    for segment in tape.segments:
        if segment.stack != ROOT:
            work = done[segment.phase].pop((segment.stack, segment.layer))
            moved = evaluate(segment.traffic_bytes, b, t) / device.memory_bytes_per_s
            assert work.pointwise + work.recomputation > 0 and work.gpu >= moved
        if segment.phase == "forward":
            times = 1 if segment.stack == ROOT else profile.stacks[segment.stack].counts[segment.layer]
            flops += times * (evaluate(segment.matmul_flops, b, t) + evaluate(segment.attention_flops, b, t))
    assert not any(done.values())
    assert compute.model_flops == pytest.approx(3 * flops, rel=1e-12)


def test_plans_that_differ_in_the_batch_share_what_does_not() -> None:
    one = Plan(strategy="zero3", backend="fsdp2", shard_degree=8, micro_batch_size=3, seq_len=640)
    other = Plan(strategy="zero3", backend="fsdp2", shard_degree=8, micro_batch_size=4, seq_len=1024)
    assert one.any_batch is other.any_batch and one.any_step is other.any_step
    assert one.any_batch == Plan(strategy="zero3", backend="fsdp2", shard_degree=8, seq_len=1)
