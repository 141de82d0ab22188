"""The work of a tape's segments."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
from jobs import job, program_of

from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.job.choices import Compile
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.tape import ROOT, value_at
from fsdp_advisor.timing.achieved import KERNEL_GAP_S, LAUNCH_S
from fsdp_advisor.timing.operators import device_of
from fsdp_advisor.timing.step import work_of
from fsdp_advisor.timing.work import WorkOptions, tape_work


@pytest.mark.parametrize("model", ["meta-llama/Llama-2-7b-hf", "google/gemma-3-4b-pt", "openai/whisper-small"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_work_covers_the_traffic_and_launches_of_each_segment(model: str, checkpointing: str) -> None:
    device = device_of(find_gpu("A100-80GB"), "bf16")
    assert device is not None
    profile, tape, _ = job(
        model, "zero3", "fsdp2", micro_batch_size=3, activation_checkpointing=checkpointing,
        attention="flash_attention_2",
    )  # fmt: skip
    b, t = 3, 640
    found = tape_work(profile, tape, b, t, device, WorkOptions(checkpointing=checkpointing == "full"))
    flops = 0
    for segment, work in zip(tape.segments, found.by_segment, strict=True):
        moved = value_at(segment.traffic_bytes, b, t) / device.memory_bytes_per_s
        gaps = segment.operators * KERNEL_GAP_S
        assert work.cpu == pytest.approx(segment.operators * LAUNCH_S)
        assert work.pointwise + work.loss + work.recomputation >= moved + gaps - 1e-12
        assert work.gpu >= moved
        repeats = checkpointing == "full" and segment.phase == "backward" and segment.stack != ROOT
        assert (work.recomputation > 0) == repeats
        if segment.phase == "forward":
            layers = 1 if segment.stack == ROOT else profile.stacks[segment.stack].counts[segment.layer]
            flops += layers * (value_at(segment.matmul_flops, b, t) + value_at(segment.attention_flops, b, t))
    assert found.trained_flops == pytest.approx(3 * flops, rel=1e-12)


def test_only_attention_with_a_mask_computes_the_masked_half() -> None:
    gpu = find_gpu("A100-80GB")
    device = device_of(gpu, "bf16")
    assert device is not None
    profile, tape, plan = job("meta-llama/Llama-2-7b-hf", "ddp", "ddp", precision="bf16")
    program = program_of(profile, tape, plan)

    def attention_s(plan: Plan) -> float:
        return sum(work.attention for work in work_of(profile, program, plan, device, gpu).by_segment)

    eager, *compiled = (attention_s(replace(plan, compile=part)) for part in get_args(Compile))
    assert eager > 0 and compiled == pytest.approx([eager, 2 * eager]), "a whole compiled model makes a mask"
