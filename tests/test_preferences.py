"""Training on preferences: its options, and what the reference model adds to states, the step and loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import row_of_trl
from matrix import in_turn, of_today, taken
from tiny_llama import LLAMA, PARAMETERS, write

from fsdp_advisor import estimate, recommend
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.render.view import report_view
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.units import format_bytes

pytestmark = pytest.mark.slow

FP32, HALF = 4 * PARAMETERS, 2 * PARAMETERS
HEAD = LLAMA["vocab_size"] * LLAMA["hidden_size"]
ROUNDING = 64 * 512
"""More than the storages' rounding to 512 bytes can add."""


def row(model: str, **options: Any) -> StrategyEstimate:
    return row_of_trl(**{"model": model, "task": "dpo", "micro_batch_size": 2, **options})


def test_a_bare_parameter_count_has_no_reference_model() -> None:
    with pytest.raises(UsageError, match="no task dpo"):
        row("8B")


def test_the_job_line_names_the_task(model: str) -> None:
    job = {"gpu": "H100-80GB", "framework": "trl", "strategy": "ddp", "seq_len": 64, "micro_batch_size": 2}
    assert "framework trl, task dpo" in " ".join(str(estimate(model=model, task="dpo", **job)).split())
    assert "task" not in str(estimate(model=model, **job))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"framework": "trainer"}, "framework trainer has no task dpo"),
        ({"loss": "liger"}, "liger"),
        ({"task": "sft", "precompute_ref_log_probs": True}, "no reference model"),
        ({"task": "reward", "precompute_ref_log_probs": True}, "no reference model"),
        ({"task": "reward", "ignored_labels": 0.5}, "no labels"),
        ({"task": "reward", "model": "google/flan-t5-small"}, "made of a causal language model"),
        ({"model": "google-bert/bert-base-uncased"}, "not of masked-lm models"),
        ({"framework": "llamafactory", "task": "reward"}, "framework llamafactory has no task reward"),
        ({"framework": "llamafactory", "loss": "chunked"}, "has its own loss"),
        ({"framework": "llamafactory", "precompute_ref_log_probs": True}, "in each step"),
        ({"framework": "llamafactory", "compile": "model"}, "--task dpo --framework llamafactory"),
        ({"framework": "llamafactory", "gpus": 2, "strategy": "zero3"}, "LLaMA-Factory's copy of the model"),
    ],
)
def test_impossible_tasks_are_refused(options: dict[str, Any], message: str, model: str) -> None:
    with pytest.raises(UsageError, match=message):
        row(**{"model": model, **options})


@pytest.mark.parametrize("task", ["dpo", "kto"])
def test_fsdp_cannot_precompute_the_reference_of_adapters(task: str) -> None:
    """TRL runs the model before FSDP moves it to the GPU."""
    options: dict[str, Any] = {
        "task": task, "framework": "trl", "use_peft": True, "precompute_ref_log_probs": True, "gpus": 4,
    }  # fmt: skip
    for strategy, backend in (("zero3", "fsdp2"), ("zero3", "fsdp1")):
        with pytest.raises(UsageError, match="before FSDP moves it") as refusal:
            estimate(model="meta-llama/Llama-3.1-8B", gpu="H100", strategy=strategy, backend=backend, **options)
        assert "--backend ddp or deepspeed" in refusal.value.hint
    for strategy, backend in (("ddp", "ddp"), ("zero3", "deepspeed")):
        (plan,) = plans(
            make_request({"model": "gpt2", "strategy": strategy, "backend": backend, **options}), seq_len=512
        )
        assert plan.reference == "none"


@in_turn(2, of=4)
def test_llamafactorys_reference_runs_beside_the_trained_models_logits(model: str) -> None:
    options: dict[str, Any] = {"framework": "llamafactory", "precision": "bf16", "micro_batch_size": 4}
    short, long = row(model, seq_len=256, **options), row(model, seq_len=512, **options)
    logits = 2 * 4 * 256 * LLAMA["vocab_size"] * 4
    assert long.peak_tensor_bytes - short.peak_tensor_bytes > 4 * logits


@in_turn(1, of=4)
def test_a_recommendation_counts_both_sequences_of_a_pair(model: str) -> None:
    job = {
        "framework": "trl",
        "task": "dpo",
        "strategy": "ddp",
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 3,
    }
    document = recommend(model=model, gpu="H100-80GB", seq_len=64, **job).as_dict()["recommendation"]
    assert document["global_batch_size"] == 6
    for name in ("tokens_per_second_per_gpu", "samples_per_second_per_gpu"):
        assert document[name] == pytest.approx(document["estimate"][name], rel=1e-3)


def test_a_copy_is_kept_and_a_precomputed_reference_is_not(model: str) -> None:
    copied, precomputed = row(model), row(model, precompute_ref_log_probs=True)
    assert (copied.states["parameters"], precomputed.states["parameters"]) == (2 * FP32, FP32)
    assert copied.job_peaks.phases["load"].gpu_bytes - precomputed.job_peaks.phases["load"].gpu_bytes == pytest.approx(
        FP32, abs=ROUNDING
    )
    assert copied.peak_tensor_bytes - precomputed.peak_tensor_bytes >= FP32
    assert copied.step.seconds > precomputed.step.seconds
    assert sum(copied.at_peak.values()) == copied.peak_tensor_bytes


@pytest.mark.parametrize("task", of_today(["dpo", "kto"], days=2))
def test_a_precomputed_reference_under_fsdp2_is_a_copy_before_training(model: str, task: str) -> None:
    """Shards, the all-gather's output and the parameters copied out of it."""
    job = {"task": task, "gpus": 2, "strategy": "zero3", "precompute_ref_log_probs": True}
    found, in_parts = row(model, backend="fsdp2", **job), row(model, backend="fsdp1", **job)
    assert found.whole_reference_bytes == pytest.approx(FP32 // 2 + 2 * HALF, abs=ROUNDING)
    assert found.job_peaks.phases["load"].gpu_bytes >= found.whole_reference_bytes
    assert in_parts.whole_reference_bytes is None


@pytest.mark.parametrize(
    ("model_name", "gpus", "named"),
    taken(
        [
            (
                "meta-llama/Llama-3.1-8B",
                8,
                ("deepspeed or fsdp1", "--precompute-ref-log-probs", "--offload parameters"),
            ),
            ("meta-llama/Llama-3.1-70B", 64, ("deepspeed or fsdp1",)),
        ],
        [],
        days=2,
    ),
)
def test_the_way_out_of_a_whole_reference_model_names_what_avoids_it(
    model_name: str, gpus: int, named: tuple[str, ...]
) -> None:
    """If the gathered reference model alone is larger than the GPU, neither offload nor gathering it before training helps."""
    job = {"gpu": "A100-40GB", "gpus": gpus, "strategy": "zero3", "framework": "trl", "task": "dpo"}
    line = report_view(estimate(model=model_name, **job)).way_out
    every = ("deepspeed or fsdp1", "--precompute-ref-log-probs", "--offload parameters")
    assert tuple(option for option in every if option in line) == named


def test_pairs_are_two_sequences_of_one_example(model: str) -> None:
    pairs, sequences = row(model, precompute_ref_log_probs=True), row(model, task="sft", micro_batch_size=4)
    assert pairs.step.tokens == sequences.step.tokens == 4 * 64
    assert pairs.at_peak["activations"] == pytest.approx(sequences.at_peak["activations"], rel=0.02)


@in_turn(1, of=2)
def test_a_reward_model_has_a_score_instead_of_the_head(model: str) -> None:
    score = LLAMA["hidden_size"]
    found = estimate(model=model, gpu="H100-80GB", framework="trl", task="reward", strategy="ddp", micro_batch_size=2)
    assert found.parameters == found.trainable_parameters == PARAMETERS - HEAD + score
    (reward,) = found.estimates
    assert reward.states["parameters"] == 4 * found.parameters
    assert reward.at_peak["loss"] < 4 * LLAMA["vocab_size"]


@in_turn(0, of=2)
def test_adapters_of_a_reward_model_train_the_score_too(model: str) -> None:
    found = estimate(
        model=model,
        gpu="H100-80GB",
        framework="trl",
        task="reward",
        strategy="ddp",
        use_peft=True,
        lora_r=1,
        lora_target_modules="q_proj",
    )
    q_proj = 2 * LLAMA["hidden_size"] * LLAMA["num_hidden_layers"]
    assert found.trainable_parameters == q_proj + LLAMA["hidden_size"]


@in_turn(2, of=3)
def test_adapters_need_no_copy_but_a_second_forward(model: str) -> None:
    adapted, precomputed = row(model, use_peft=True), row(model, use_peft=True, precompute_ref_log_probs=True)
    assert adapted.states == precomputed.states
    assert adapted.step.seconds > precomputed.step.seconds


@pytest.mark.parametrize(
    ("strategy", "backend", "kept"),
    of_today(
        [
            ("zero3", "fsdp2", 2 * FP32 / 4),
            ("zero1", "deepspeed", 2 * HALF),
            ("zero3", "deepspeed", 2 * HALF / 4 + HALF),
        ],
        days=2,
    ),
)
def test_engines_keep_the_copy_in_their_own_way(strategy: str, backend: str, kept: float, model: str) -> None:
    """ZeRO-3's copy has DeepSpeed's own threshold, below which all these parameters stay gathered."""
    found = row(model, strategy=strategy, backend=backend, gpus=4, micro_batch_size=1)
    assert found.states["parameters"] == pytest.approx(kept, rel=0.02)


@in_turn(0, of=2)
def test_kto_runs_both_models_on_mismatched_completions_too(model: str) -> None:
    found = row(model, task="kto")
    forwards = {
        point.where.split(" ")[0] for point in found.timeline if point.phase == "forward" and " " in point.where
    }
    assert forwards == {"mismatched", "reference_mismatched", "reference"}
    assert found.step.tokens == 2 * 64
    assert found.states == row(model).states
    alone = row(model, task="kto", precompute_ref_log_probs=True)
    assert alone.states["parameters"] == FP32 and alone.step.seconds < found.step.seconds


@in_turn(0, of=4)
def test_fsdp2_gathers_the_whole_copy_as_one_unit(model: str) -> None:
    """`prepare_fsdp` shards the model alone: the all-gather's output and the parameters copied out of it live together."""
    found = row(model, strategy="zero3", backend="fsdp2", gpus=4)
    copy = [point for point in found.timeline if point.where.startswith("reference")]
    before = next(point for point in reversed(found.timeline[: found.timeline.index(copy[0])]))
    assert copy[0].high_bytes - before.live_bytes >= 2 * HALF


@in_turn(1, of=4)
def test_a_copy_that_fsdp2_gathers_as_a_whole_is_warned_of(model: str) -> None:
    def warned(**options: Any) -> list[str]:
        return [text for text in row(model, gpus=4, **options).warnings if "whole reference model" in text]

    (resharded,), (kept,) = warned(strategy="zero3", backend="fsdp2"), warned(strategy="zero2", backend="fsdp2")
    assert f"gathers all {format_bytes(HALF)} of its weights" in resharded and "gathers and keeps all" in kept
    assert "--precompute-ref-log-probs" in resharded
    (precomputed,) = warned(strategy="zero3", backend="fsdp2", precompute_ref_log_probs=True)
    assert "of its weights before training" in precomputed and "--precompute-ref-log-probs" not in precomputed
    assert not warned(strategy="zero3", backend="deepspeed")


@in_turn(1, of=3)
def test_trl_gathers_the_head_of_a_model_with_adapters_by_itself(model: str) -> None:
    """FSDP2 has the head as a unit whose forward never runs: the loss gathers the weight, in fp32 as it is stored."""
    options = {"task": "sft", "strategy": "zero3", "backend": "fsdp2", "gpus": 2, "use_peft": True, "seq_len": 8}
    of_trl, of_trainer = (row(model, **options, framework=name, loss="auto") for name in ("trl", "trainer"))
    head = 4 * LLAMA["vocab_size"] * LLAMA["hidden_size"]
    assert of_trl.at_peak["unsharded_parameters"] >= head > of_trainer.at_peak["unsharded_parameters"]


@in_turn(0, of=3)
def test_zero3_gathers_for_the_forward_of_adapters_that_are_switched_off(model: str) -> None:
    """The reference's forward gathers too. It invalidates DeepSpeed's trace, so the step keeps no parameters for backward."""
    options = {"strategy": "zero3", "backend": "deepspeed", "gpus": 4, "use_peft": True}
    adapted, precomputed = row(model, **options), row(model, **options, precompute_ref_log_probs=True)
    assert 0 < adapted.phase_peaks["backward"] < precomputed.phase_peaks["backward"]
    assert adapted.step.communication_seconds > precomputed.step.communication_seconds > 0


@in_turn(3, of=4)
def test_a_precomputed_reference_of_adapters_leaves_out_fsdp_only() -> None:
    job: dict[str, Any] = {
        "model": "meta-llama/Llama-3.1-8B", "gpus": 4, "gpu": "H100", "framework": "trl", "task": "dpo", "use_peft": True,
        "precompute_ref_log_probs": True, "activation_checkpointing": "full",
    }  # fmt: skip
    report = estimate(**job)
    assert {row.backend for row in report.estimates} == {"ddp", "deepspeed"}
    (note,) = (text for text in report.notes if "cannot precompute the reference of adapters with FSDP" in text)
    assert note.startswith("ZeRO-2, ZeRO-3 and ZeRO-3 + parameter offload are left out")
    with pytest.raises(UsageError, match="cannot precompute the reference of adapters with FSDP"):
        estimate(**job, strategy="zero3")
    found = recommend(**job, strategy="zero3", offload="none", micro_batch_size=1).recommendation
    assert found.winner is not None and found.winner.plan.backend == "deepspeed"
    assert all(other.candidate.plan.backend == "deepspeed" for other in found.runners_up)


@in_turn(1, of=4)
def test_a_precomputed_reference_is_advised_if_the_steps_then_fit(tmp_path: Path) -> None:
    """With the reference 16.2 GiB are needed, without it 13.1, and 14.7 are available."""
    large = {**LLAMA, "vocab_size": 400_000, "hidden_size": 1024, "num_attention_heads": 8}
    job: dict[str, Any] = {
        "model": str(write(tmp_path / "config.json", large)), "gpu": "16GiB", "framework": "trl", "task": "dpo", "strategy": "ddp",
        "seq_len": 64, "micro_batch_size": 1, "activation_checkpointing": "full", "offload": "none",
    }  # fmt: skip
    found = recommend(**job).recommendation
    assert found.winner is None and dict(found.remedies[0].options) == {"precompute_ref_log_probs": True}
