"""A step's compute: what layers of a kind have in common is computed once, and stands for each of them."""

from __future__ import annotations

import pytest

from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model import catalog
from fsdp_advisor.model.profile import ROOT, evaluate
from fsdp_advisor.tapes import tape_key_of
from fsdp_advisor.timing.achieved import KERNEL_GAP_S, LAUNCH_S
from fsdp_advisor.timing.operators import device_of
from fsdp_advisor.timing.work import Work, compute_of


@pytest.mark.parametrize("model", ["meta-llama/Llama-2-7b-hf", "google/gemma-3-4b-pt", "openai/whisper-small"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_every_real_layer_has_the_work_of_the_one_recorded_for_it(model: str, checkpointing: str) -> None:
    entry = catalog.find(model)
    device = device_of(find_gpu("A100-80GB"), "bf16")
    assert entry is not None and device is not None
    profile, b, t = catalog.profile(entry), 3, 640
    plan = Plan(strategy="zero3", backend="fsdp2", shard_degree=8, micro_batch_size=b, seq_len=t, activation_checkpointing=checkpointing, attention="flash_attention_2")  # fmt: skip
    tape = profile.tapes[tape_key_of(plan).name]
    compute = compute_of(profile, tape, b, t, device, checkpointing == "full")
    done: dict[str, list[tuple[int, Work]]] = {"forward": [], "backward": []}
    for phase, stretches in (("forward", compute.forward), ("backward", compute.backward)):
        for stretch in stretches:
            described = [stretch.work[n] for run in stretch.runs for _ in range(run.repeats) for n in run.pattern]
            assert len(described) == sum(stretch.counts.values())
            done[phase] += [(stretch.stack, work) for work in described]
    flops = 0
    real = {
        stack: [n for run in profile.stacks[stack].runs for _ in range(run.repeats) for n in run.pattern]
        for stack in range(len(profile.stacks))
    }
    for phase, found in done.items():
        segments = [s for s in tape.segments if s.phase == phase]
        for stack, layers in real.items():
            works = [work for s, work in found if s == stack]
            recorded = {s.layer: s for s in segments if s.stack == stack}
            for layer, work in zip(layers if phase == "forward" else reversed(layers), works, strict=True):
                moved = evaluate(recorded[layer].traffic_bytes, b, t) / device.memory_bytes_per_s
                gaps = recorded[layer].operators * KERNEL_GAP_S
                again = work.recomputation if checkpointing == "full" else 0.0
                assert work.cpu == pytest.approx(recorded[layer].operators * LAUNCH_S)
                assert work.pointwise + again >= moved + gaps - 1e-12 and work.gpu >= moved
        assert len([s for s in segments if s.stack == ROOT]) == len([work for s, work in found if s == ROOT])
    for segment in tape.segments:
        if segment.phase == "forward":
            times = 1 if segment.stack == ROOT else profile.stacks[segment.stack].counts[segment.layer]
            flops += times * (evaluate(segment.matmul_flops, b, t) + evaluate(segment.attention_flops, b, t))
    assert compute.model_flops == pytest.approx(3 * flops, rel=1e-12)


def test_plans_that_differ_in_the_batch_share_what_does_not() -> None:
    one = Plan(strategy="zero3", backend="fsdp2", shard_degree=8, micro_batch_size=3, seq_len=640)
    other = Plan(strategy="zero3", backend="fsdp2", shard_degree=8, micro_batch_size=4, seq_len=1024)
    assert one.any_batch is other.any_batch and one.any_step is other.any_step
    assert one.any_batch == Plan(strategy="zero3", backend="fsdp2", shard_degree=8, seq_len=1)
