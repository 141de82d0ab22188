"""GRPO: its options, what is generated, scored and trained in a step, and vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jobs import row_of_trl
from matrix import in_turn, of_today
from tiny_llama import LLAMA, PARAMETERS

from fsdp_advisor import estimate, recommend
from fsdp_advisor.errors import UsageError
from fsdp_advisor.render.check_line import check_result
from fsdp_advisor.strategy_estimate import StrategyEstimate

pytestmark = pytest.mark.slow

FP32 = 4 * PARAMETERS


def row(model: str, **options: Any) -> StrategyEstimate:
    return row_of_trl(**{"model": model, "task": "grpo", "micro_batch_size": 8, "max_completion_length": 16, **options})


def flops_per_token(found: StrategyEstimate) -> float:
    """FLOPs of the model per token, relative to the GPU's rate."""
    assert found.step is not None
    return found.step.mfu / found.step.tokens_per_second_per_gpu


def phases(found: StrategyEstimate) -> set[str]:
    """The phases of the tape without gradients that the step visits."""
    return {p.where.split(" ")[0] for p in found.timeline if p.phase == "forward" and " " in p.where}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"framework": "trainer"}, "no task grpo"),
        ({"task": "sft", "num_generations": 4}, "num_generations is an option of --task grpo"),
        ({"max_completion_length": 64}, "leaves no room for a prompt"),
        ({"micro_batch_size": 3}, "3 x ranks 1 x micro-batches per generation 1 = 3, not a multiple of --num-generations 8"),
        ({"vllm_mode": "server"}, "--vllm-mode configures vLLM"),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_enable_sleep_mode": True}, "on the training GPUs"),
        ({"use_vllm": True, "vllm_tensor_parallel_size": 2}, "not divisible"),
        ({"use_vllm": True, "vllm_max_model_length": 32}, "64 tokens are longer than --vllm-max-model-length 32"),
        ({"use_vllm": True, "vllm_mode": "server", "vllm_max_model_length": 64}, "on the training GPUs"),
        ({"precompute_ref_log_probs": True}, "scores new completions"),
        ({"ignored_labels": 0.5}, "only the tokens of completions"),
    ],
)  # fmt: skip
def test_what_trl_refuses_is_refused(options: dict[str, Any], message: str, model: str) -> None:
    with pytest.raises(
        UsageError,
        match=message.replace("num_generations is", "--?num.generations is"),
    ):
        row(model, **options)


@pytest.mark.parametrize(
    ("options", "scored"),
    of_today(
        [
            ({}, {"prefill", "decode"}),
            ({"num_iterations": 2}, {"prefill", "decode", "policy"}),
            ({"steps_per_generation": 2}, {"prefill", "decode", "policy"}),
            ({"gradient_accumulation_steps": 2}, {"prefill", "decode"}),
            ({"beta": 0.1}, {"prefill", "decode", "reference"}),
            ({"beta": 0.1, "use_vllm": True}, {"policy", "reference"}),
            ({"use_vllm": True, "vllm_mode": "server"}, {"policy"}),
        ],
        days=3,
    ),
)
def test_completions_are_scored_when_trl_scores_them(options: dict[str, Any], scored: set[str], model: str) -> None:
    found = row(model, **options)
    assert phases(found) == scored
    assert ("score" in found.job_peaks.phases) == bool(scored & {"policy", "reference"})


@in_turn(1, of=3)
def test_a_reference_is_a_copy_only_without_adapters(model: str) -> None:
    assert row(model).states["parameters"] == FP32
    assert row(model, beta=0.1).states["parameters"] == 2 * FP32
    adapted = row(model, beta=0.1, use_peft=True)
    assert adapted.states["parameters"] < 1.2 * FP32 and "reference" in phases(adapted)


def test_the_phases_are_parts_of_the_step(model: str) -> None:
    found = row(model, beta=0.1, num_iterations=2)
    peaks = {name: phase.gpu_bytes for name, phase in found.job_peaks.phases.items()}
    assert peaks["steady_step"] == max(peaks["generate"], peaks["score"], peaks["train"]) == found.peak_tensor_bytes
    assert sum(found.at_peak.values()) == found.peak_tensor_bytes
    assert set(found.as_dict()["job_peaks"]) == set(found.job_peaks.phases)


def test_the_cache_grows_with_what_is_generated_at_once(model: str) -> None:
    """Keys and values of one layer, in fp32 and bf16 under autocast, of every token but the last."""
    few, many = (row(model, steps_per_generation=n).job_peaks.phases["generate"].gpu_bytes for n in (2, 32))
    head = LLAMA["hidden_size"] // LLAMA["num_attention_heads"]
    cache = 8 * 63 * LLAMA["num_key_value_heads"] * head * 4
    assert many - few > 30 * cache


def test_completions_are_generated_before_the_gradients_of_a_step(model: str) -> None:
    """Where they are not, fewer of them are kept too."""
    usual = {"gradient_accumulation_steps": 4, "beta": 0.1}
    once, each = row(model, **usual), row(model, **usual, steps_per_generation=1)
    difference = each.job_peaks.phases["score"].gpu_bytes - once.job_peaks.phases["score"].gpu_bytes
    assert difference == pytest.approx(FP32, rel=0.1)
    assert once.step.seconds == pytest.approx(each.step.seconds, rel=0.1)


@pytest.mark.parametrize("gpu", ["H100-80GB", "MI300X", "Gaudi-3", "TPU-v6e", "Trainium2"])
def test_colocated_vllm_takes_its_share_in_every_phase_unless_it_sleeps(gpu: str, model: str) -> None:
    """The GPUs have the five runtimes."""
    alone = row(model, gpu=gpu, use_vllm=True, vllm_mode="server")
    shared = row(model, gpu=gpu, use_vllm=True)
    sleeping = row(model, gpu=gpu, use_vllm=True, vllm_enable_sleep_mode=True)
    share = shared.needed_bytes - alone.needed_bytes
    assert share == pytest.approx(0.3 * (shared.needed_bytes + shared.headroom_bytes), abs=2**20)
    assert share == shared.needed_breakdown["vllm"]
    assert sleeping.peak_device_bytes == alone.peak_device_bytes < sleeping.needed_bytes < shared.needed_bytes
    assert sum(sleeping.needed_breakdown.values()) == sleeping.needed_bytes
    assert "vllm" not in alone.needed_breakdown


def test_a_share_that_leaves_too_little_does_not_fit(model: str) -> None:
    found = row(model, use_vllm=True, vllm_gpu_memory_utilization=1.0)
    assert found.fits is False and found.headroom_bytes < 0


LONG = {"use_vllm": True, "vllm_gpu_memory_utilization": 0.05}
"""Options with which vLLM's share, 3.96 GiB, does not hold the keys and values of the longest sequence of `long_model`, 8 GiB."""


@pytest.fixture(scope="module")
def long_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("long") / "config.json"
    path.write_text(json.dumps(LLAMA | {"num_hidden_layers": 2, "max_position_embeddings": 2**25}))
    return str(path)


@in_turn(0, of=4)
def test_a_share_in_which_vllm_does_not_start_does_not_fit(long_model: str) -> None:
    found = row(long_model, **LONG)
    assert (found.fits, found.fails_in) == (False, "generate") and found.headroom_bytes > 0
    assert found.vllm_missing_bytes > 4 * 2**30
    (warning,) = (text for text in found.warnings if "vLLM does not start" in text)
    assert "--vllm-max-model-length 64, or --vllm-gpu-memory-utilization 0.15" in warning
    assert row(long_model, **LONG, vllm_enable_sleep_mode=True).fits is False  # it sleeps only once it has started
    shorter = row(long_model, **LONG, vllm_max_model_length=64)
    assert shorter.fits and shorter.needed_bytes == found.needed_bytes


@in_turn(0, of=4)
def test_check_and_estimate_say_why_vllm_does_not_start(long_model: str) -> None:
    job = {"gpu": "H100-80GB", "framework": "trl", "strategy": "ddp", "seq_len": 64, "micro_batch_size": 8}
    report = estimate(model=long_model, task="grpo", max_completion_length=16, **job, **LONG)
    line = check_result(report)["line"]
    assert line.startswith("does not fit") and "vLLM lacks 4.04 GiB; vLLM does not start: its share of each GPU" in line
    assert "Nothing fits, because vLLM does not start" in " ".join(str(report).split())


SEARCH = {
    "gpu": "H100-80GB", "framework": "trl", "task": "grpo", "strategy": "ddp", "seq_len": 64, "micro_batch_size": 8,
    "max_completion_length": 16, "activation_checkpointing": "none",
}  # fmt: skip


@in_turn(2, of=4)
def test_a_search_chooses_settings_with_which_vllm_starts(long_model: str) -> None:
    advice = recommend(model=long_model, **SEARCH, **LONG)
    plan = advice.recommendation.winner.plan
    assert (plan.generation.max_length, plan.generation.memory_utilization) == (64, 0.05)
    assert "--vllm-max-model-length 64 is chosen: otherwise vLLM does not start" in advice.report.notes
    assert "--vllm-max-model-length 64" in str(advice)


@in_turn(2, of=4)
def test_a_search_keeps_settings_that_are_given_and_names_those_with_which_vllm_starts(long_model: str) -> None:
    found = recommend(model=long_model, **SEARCH, **LONG, vllm_max_model_length=2**24).recommendation
    assert found.winner is None and "vLLM's share of the GPU lacks" in found.rejected[0].reason
    assert [dict(remedy.options) for remedy in found.remedies] == [
        {"vllm_max_model_length": 64},
        {"vllm_gpu_memory_utilization": 0.1},
    ]


SWEPT = {
    "gpu": "H100-80GB",
    "gpus": 8,
    "framework": "trl",
    "task": "grpo",
    "strategy": "ddp",
    "max_completion_length": 16,
}


@pytest.mark.parametrize(
    ("options", "answer"),
    [
        pytest.param({"micro_batch_size": 2}, 4, marks=in_turn(1, of=3)),
        ({"micro_batch_size": 8, "use_vllm": True, "vllm_tensor_parallel_size": 2}, 2),
        pytest.param(
            {"micro_batch_size": 8, "eval_strategy": "steps", "per_device_eval_batch_size": 1},
            8,
            marks=in_turn(2, of=6),
        ),
    ],
)
def test_the_fewest_gpus_have_whole_groups_of_completions(options: dict[str, Any], answer: int, model: str) -> None:
    found = recommend(model=model, find="gpus", seq_len=64, activation_checkpointing="none", **SWEPT, **options)
    assert found.recommendation.sweep.answer == answer


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        pytest.param({"gpus": 2, "global_batch_size": 16}, {(1, 8), (2, 4), (4, 2), (8, 1)}, marks=in_turn(1, of=12)),
        ({"gpus": 2, "global_batch_size": 16, "micro_batch_size": 1}, {(1, 8)}),
        ({"gpus": 1, "micro_batch_size": 1, "find": "gpus"}, {(1, 1)}),
    ],
)
def test_a_search_takes_the_batches_that_estimate_accepts(
    options: dict[str, Any], batches: set[tuple[int, int]], model: str
) -> None:
    job = {**SWEPT, **options, "model": model, "seq_len": 64, "activation_checkpointing": "none"}
    found = recommend(**job).recommendation
    assert found.winner is not None
    plan = found.winner.plan
    assert (plan.micro_batch_size, plan.gradient_accumulation_steps) in batches
    assert plan.micro_batch_size * plan.gradient_accumulation_steps * plan.world_size % 8 == 0


@in_turn(7, of=8)
def test_the_longest_sequence_is_one_that_vllm_accepts(model: str) -> None:
    options = {"find": "sequence", "use_vllm": True, "vllm_max_model_length": 100, "micro_batch_size": 1}
    found = recommend(model=model, seq_len=64, activation_checkpointing="none", **SWEPT, **options).recommendation
    assert found.sweep.answer == 100


@in_turn(1, of=4)
def test_a_search_takes_completions_almost_as_long_as_the_models_longest_sequence(model: str) -> None:
    """No sequence may be recorded that lacks a prompt."""
    job = {"gpu": "H100-80GB", "gpus": 8, "framework": "trl", "task": "grpo", "max_completion_length": 250}
    assert (
        recommend(model=model, find="sequence", **job, strategy="ddp").recommendation.sweep.answer
        == LLAMA["max_position_embeddings"]
    )


@in_turn(3, of=8)
def test_a_search_for_a_shorter_sequence_keeps_room_for_the_completion() -> None:
    """Shorter sequences than a completion have a negative number of tokens in the prompt."""
    job = {
        "model": "meta-llama/Llama-3.1-8B",
        "gpus": 8,
        "gpu": "24GiB",
        "strategy": "zero3",
        "offload": "none",
        "micro_batch_size": 8,
    }
    found = recommend(**job, framework="trl", task="grpo", max_completion_length=1024).recommendation
    assert {"seq_len": 1792} in [dict(remedy.options) for remedy in found.remedies]


@pytest.mark.parametrize(
    ("strategy", "backend", "handed"),
    of_today([
        ("ddp", "ddp", 0), ("zero3", "fsdp2", 4 * LLAMA["vocab_size"] * LLAMA["hidden_size"]),
        ("zero3", "deepspeed", 2 * LLAMA["vocab_size"] * LLAMA["hidden_size"]),
    ], days=3),
)  # fmt: skip
def test_weights_are_gathered_one_by_one_for_vllm(strategy: str, backend: str, handed: int, model: str) -> None:
    found = row(model, strategy=strategy, backend=backend, gpus=4, use_vllm=True, vllm_mode="server")
    kept = found.job_peaks.phases["save"].gpu_bytes
    assert found.job_peaks.phases["generate"].gpu_bytes <= kept + handed
    assert found.job_peaks.phases["generate"].gpu_bytes >= handed


@in_turn(0, of=2)
def test_zero3_gathers_the_whole_model_to_generate(model: str) -> None:
    """Once: the modules gather nothing in addition, so generation needs what it does where every GPU has the whole model."""
    alone = row(model, precision="bf16")
    sharded = row(model, precision="bf16", strategy="zero3", backend="deepspeed", gpus=4)
    more = [found.job_peaks.phases["generate"].gpu_bytes - _between_steps(found) for found in (alone, sharded)]
    assert more[1] - more[0] == pytest.approx(2 * PARAMETERS, rel=0.02)
    assert any("time of generation" in note for note in sharded.not_modelled)


def _between_steps(found: StrategyEstimate) -> int:
    return sum(found.states.values()) - (0 if found.strategy == "zero3" else found.states["gradients"])


def test_the_job_line_names_the_completions(model: str) -> None:
    job = {"gpu": "H100-80GB", "framework": "trl", "strategy": "ddp", "seq_len": 64, "micro_batch_size": 8}
    text = str(estimate(model=model, task="grpo", max_completion_length=16, use_vllm=True, **job))
    assert "8 completions of 16 tokens per prompt from vLLM" in " ".join(text.split())


def test_an_optimizer_step_of_one_prompt_is_warned_of(model: str) -> None:
    one, two = (row(model, gradient_accumulation_steps=steps) for steps in (1, 2))
    (warning,) = (text for text in one.warnings if "completions of one prompt" in text)
    assert "--gradient-accumulation-steps N takes N prompts" in warning
    assert not any("one prompt" in text for text in two.warnings)


@pytest.mark.parametrize("options", of_today([{}, {"num_iterations": 2}, {"steps_per_generation": 2}], days=3))
def test_a_token_has_the_same_flops_with_any_accumulation(options: dict[str, Any], model: str) -> None:
    one, four = (row(model, beta=0.1, gradient_accumulation_steps=n, **options) for n in (2, 8))
    assert flops_per_token(four) == pytest.approx(flops_per_token(one), rel=1e-6)
