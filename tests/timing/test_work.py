"""The work of a tape's segments."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from jobs import job, program_of
from matrix import of_today

from fsdp_advisor.assumptions import settled
from fsdp_advisor.engines.registry import step_program
from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.choices import Compile
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.tape import ROOT, Segment, Tape, value_at
from fsdp_advisor.tapes import recorded_gpu_tape
from fsdp_advisor.timing.achieved import (
    CHECKPOINT_BACKWARD_S,
    CHECKPOINT_FORWARD_S,
    DISABLED_ADAPTER_S,
    KERNEL_GAP_S,
    LAUNCH_S,
    SINKS_SLOWDOWN,
)
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
    forwards = {(s.stack, s.layer): s.operators for s in tape.segments if s.phase == "forward"}

    def of_checkpoints(segment: Segment) -> float:
        if checkpointing == "none" or segment.stack == ROOT:
            return 0.0
        seconds = CHECKPOINT_FORWARD_S if segment.phase == "forward" else CHECKPOINT_BACKWARD_S
        return seconds * forwards[segment.stack, segment.layer]

    for segment, work in zip(tape.segments, found.by_segment, strict=True):
        moved = value_at(segment.traffic_bytes, b, t) / device.memory_bytes_per_s
        gaps = segment.operators * KERNEL_GAP_S
        assert work.cpu == pytest.approx(segment.operators * LAUNCH_S + of_checkpoints(segment))
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


def attention_by_layer(profile: Profile, tape: Tape, t: int, options: WorkOptions) -> list[float]:
    """The seconds of attention on an H200 in the forward of each layer of the language model, divided by its FLOPs."""
    device = device_of(find_gpu("H200"), "bf16")
    assert device is not None
    found = tape_work(profile, tape, 1, t, device, options).by_segment
    stack = len(profile.stacks) - 1
    seconds = {
        s.layer: work.attention / value_at(s.attention_flops, 1, t)
        for s, work in zip(tape.segments, found, strict=True)
        if s.phase == "forward" and s.stack == stack
    }
    return [seconds[layer] for layer in profile.stacks[stack].recorded_order]


@pytest.mark.parametrize("open_key", [None, "sliding_window_pattern"])
def test_layers_whose_window_is_filled_get_a_mask(open_key: str | None) -> None:
    profile, tape, _ = job("google/gemma-3-1b-pt", "ddp", "ddp", precision="bf16", attention="flash_attention_2")
    profile = replace(profile, config={key: value for key, value in profile.config.items() if key != open_key})
    free = attention_by_layer(profile, tape, 2048, WorkOptions())
    filled = attention_by_layer(profile, tape, 2048, WorkOptions(window_filled=True))
    slower = [round(b / a, 2) for a, b in zip(free, filled, strict=True)]
    assert slower[:7] == [3.23] * 5 + [1.0, 3.23], (
        "every sixth layer has no window; a mask halves the work that is skipped"
    )


def test_reward_models_skip_the_causal_half_as_their_decoders_do() -> None:
    profile, tape, _ = job("meta-llama/Llama-3.2-1B", "ddp", "ddp", precision="bf16", attention="flash_attention_2")
    rewards = replace(profile, task="sequence-classification")
    decoder, reward = (attention_by_layer(each, tape, 2048, WorkOptions()) for each in (profile, rewards))
    assert reward == decoder


def test_heads_wider_than_flash_attention_supports_are_slow() -> None:
    profile, tape, _ = job("google/gemma-4-31B", "ddp", "ddp", precision="bf16")
    per_flop = attention_by_layer(profile, tape, 512, WorkOptions())
    assert per_flop[5] > 2.5 * per_flop[4] and per_flop[:5] == [per_flop[0]] * 5, "every sixth layer has heads of 512"


def test_rows_with_a_sink_slow_operators_down() -> None:
    profile, tape, _ = job("openai/gpt-oss-20b", "ddp", "ddp", precision="bf16", attention="eager")
    device = device_of(find_gpu("H200"), "bf16")
    assert device is not None
    found = tape_work(profile, tape, 1, 512, device, WorkOptions()).by_segment
    for segment, work in zip(tape.segments, found, strict=True):
        if segment.stack != ROOT:
            usual = (
                value_at(segment.traffic_bytes, 1, 512) / device.eager_bytes_per_s + segment.operators * KERNEL_GAP_S
            )
            assert work.pointwise == pytest.approx(SINKS_SLOWDOWN * usual)


@pytest.mark.parametrize(
    ("task", "options"),
    of_today([("dpo", {}), ("kto", {}), ("grpo", {"gradient_accumulation_steps": 8, "beta": 0.1})], days=3),
)
def test_adapters_are_switched_off_once_for_the_reference(task: str, options: dict[str, Any]) -> None:
    job_of_task: dict[str, Any] = {
        "model": "meta-llama/Llama-3.2-1B", "gpus": 1, "gpu": "H200", "strategy": "ddp", "framework": "trl", "task": task,
        "micro_batch_size": 8, "seq_len": 1024, "use_peft": True, **options,
    }  # fmt: skip
    request = settled(make_request(job_of_task))
    (plan,) = plans(request, seq_len=1024)
    device, model = device_of(find_gpu("H200"), "bf16"), resolve(request.model).adapted(adaptation_of(request))
    assert device is not None and model.profile is not None
    profile = model.profile
    program = step_program(profile, recorded_gpu_tape(model, plan, find_gpu("H200")), plan)

    def cpu_s(plan: Plan) -> float:
        work = work_of(profile, program, plan, device, find_gpu("H200")).by_segment
        return sum(
            micro_batch.times * work[visit.segment].cpu
            for micro_batch in program.micro_batches
            for visit in micro_batch.visits
            if visit.segment is not None
        )

    layers = profile.lora_layers
    assert layers == 32
    assert cpu_s(plan) - cpu_s(replace(plan, reference="copy")) == pytest.approx(layers * DISABLED_ADAPTER_S)


def test_reentrant_checkpoints_have_no_hooks() -> None:
    profile, tape, _ = job(
        "meta-llama/Llama-2-7b-hf", "ddp", "ddp", activation_checkpointing="full", attention="flash_attention_2"
    )
    device = device_of(find_gpu("A100-80GB"), "bf16")
    assert device is not None
    found = tape_work(profile, tape, 1, 256, device, WorkOptions(checkpointing=True, checkpoint_hooks=False)).by_segment
    assert [work.cpu for work in found] == pytest.approx([segment.operators * LAUNCH_S for segment in tape.segments])
