"""Properties of estimates, and figures that documents state."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import examples, in_turn
from refusing import MIXTRAL, refusing_autocast

from fsdp_advisor import estimate
from fsdp_advisor.errors import UsageError
from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.memory.device import NON_TENSOR_PARTS
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.program.accounts import ACCOUNTS
from fsdp_advisor.render.explanation import components
from fsdp_advisor.step_figures import allocator_result
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.verdict import verdict_text

MODELS = st.sampled_from(
    ["meta-llama/Llama-2-7b-hf", "Qwen/Qwen2.5-0.5B", "openai-community/gpt2", "google-t5/t5-small"]
)
STRATEGIES = st.sampled_from(
    [("ddp", "ddp"), ("zero2", "fsdp2"), ("zero3", "fsdp2"), ("zero2", "fsdp1"), ("zero3", "fsdp1")]
)
PRECISIONS = st.sampled_from(["fp32", "bf16", "bf16-mixed"])


def one(**options: object) -> StrategyEstimate:
    (result,) = estimate(gpu="H100", explain=True, **options).estimates
    return result


@settings(deadline=None, max_examples=examples(60))
@given(
    model=MODELS,
    strategy=STRATEGIES,
    precision=PRECISIONS,
    gpus=st.integers(1, 512),
    micro_batch_size=st.integers(1, 16),
    seq_len=st.integers(1, 512),
    checkpointing=st.sampled_from(["none", "full"]),
    accumulation=st.integers(1, 4),
)
def test_the_live_set_sums_to_the_peak(
    model: str,
    strategy: tuple[str, str],
    precision: str,
    gpus: int,
    micro_batch_size: int,
    seq_len: int,
    checkpointing: str,
    accumulation: int,
) -> None:
    result = one(
        model=model,
        strategy=strategy[0],
        backend=strategy[1],
        precision=precision,
        gpus=gpus,
        micro_batch_size=micro_batch_size,
        seq_len=seq_len,
        activation_checkpointing=checkpointing,
        gradient_accumulation_steps=accumulation,
    )
    assert result.at_peak is not None and result.phase_peaks is not None
    assert tuple(result.at_peak) == tuple(ACCOUNTS)
    assert all(result.at_peak[kept] >= result.states[kept] for kept in ("parameters", "optimizer"))
    assert sum(result.at_peak.values()) == result.peak_tensor_bytes == max(result.phase_peaks.values())
    assert result.phase_peaks[result.peak_phase or ""] == result.peak_tensor_bytes
    assert result.fused_loss_peak_bytes is not None and result.fused_loss_peak_bytes <= result.peak_tensor_bytes
    lowest = min(point.live_bytes for point in result.timeline)
    assert lowest >= result.states["parameters"] + result.states["optimizer"]


def test_unpacked_weights_of_a_quantized_base_are_a_part_of_the_peak():
    job = {"model": "meta-llama/Llama-3.1-8B", "strategy": "ddp", "framework": "trl", "seq_len": 2048, "use_peft": True}
    (packed,) = estimate(**job, load_in_4bit=True).estimates
    (plain,) = estimate(**job).estimates
    assert packed.at_peak is not None and plain.at_peak is not None
    assert packed.at_peak["dequantization"] == 2 * 4096 * 14336  # the weight of one projection in bf16
    assert sum(packed.at_peak.values()) == packed.peak_tensor_bytes
    assert plain.at_peak["dequantization"] == 0
    assert "dequantization" in [each.name for each in components(packed.needed_breakdown or {})]
    assert "dequantization" not in [each.name for each in components(plain.needed_breakdown or {})]


@settings(deadline=None, max_examples=examples(40))
@given(model=MODELS, strategy=STRATEGIES, precision=PRECISIONS, gpus=st.integers(1, 300), more=st.integers(1, 50))
def test_more_shards_never_cost_more_state(
    model: str, strategy: tuple[str, str], precision: str, gpus: int, more: int
) -> None:
    def states(ranks: int) -> dict[str, int]:
        return one(
            model=model, strategy=strategy[0], backend=strategy[1], precision=precision, gpus=ranks, optim="adamw_torch"
        ).states

    few, many = states(gpus), states(gpus + more)
    for what in ("parameters", "gradients", "optimizer"):
        assert many[what] <= few[what]


@settings(deadline=None, max_examples=examples(40))
@given(
    model=MODELS,
    strategy=STRATEGIES,
    seq_len=st.integers(2, 256),
    longer=st.integers(1, 256),
    micro_batch_size=st.integers(2, 8),
    more=st.integers(1, 8),
)
def test_more_tokens_never_take_less_memory(
    model: str, strategy: tuple[str, str], seq_len: int, longer: int, micro_batch_size: int, more: int
) -> None:
    def peak(b: int, t: int) -> int:
        options = {"model": model, "strategy": strategy[0], "backend": strategy[1], "gpus": 4}
        return one(**options, micro_batch_size=b, seq_len=t).peak_tensor_bytes or 0

    least = peak(micro_batch_size, seq_len)
    assert least <= peak(micro_batch_size, seq_len + longer)
    assert least <= peak(micro_batch_size + more, seq_len)


TEXTBOOK = [
    # 7B parameters, AdamW, 4 GPUs, decimal GB. Source: arXiv:1910.02054 section 3: 4 + 4 + 8 bytes in fp32, 2 + 2 + 12 in mixed precision.
    ("ddp", "ddp", "fp32", "none", 112.0),
    ("zero1", "deepspeed", "fp32", "none", 28 + 28 + 56 / 4),
    ("zero2", "fsdp2", "fp32", "none", 28 + (28 + 56) / 4),
    ("zero2", "deepspeed", "fp32", "none", 28 + (28 + 56) / 4),
    ("zero3", "fsdp2", "fp32", "none", 28.0),
    ("zero3", "deepspeed", "fp32", "none", 28.0),
    ("zero3", "fsdp2", "fp32", "parameters", 0.0),
    ("zero1", "deepspeed", "bf16-mixed", "none", 14 + 14 + 84 / 4),
    ("zero2", "deepspeed", "bf16-mixed", "none", 14 + 98 / 4),
    ("zero2", "fsdp1", "bf16-mixed", "none", 14 + 98 / 4),
    ("zero3", "deepspeed", "bf16-mixed", "none", 112 / 4),
]


@pytest.mark.parametrize(("strategy", "backend", "precision", "offload", "gigabytes"), TEXTBOOK)
def test_a_bare_count_is_the_textbook(
    strategy: str, backend: str, precision: str, offload: str, gigabytes: float
) -> None:
    result = one(model="7e9", gpus=4, precision=precision, strategy=strategy, backend=backend, offload=offload)
    assert sum(result.states.values()) == gigabytes * 1e9
    assert result.peak_tensor_bytes is None and result.at_peak is None and result.phase_peaks is None
    assert result.fits is (False if gigabytes * 1e9 > 80 * 2**30 else None)
    assert any("bare parameter count" in reason for reason in result.not_modelled)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16", "fp32"])
@pytest.mark.parametrize(
    ("strategy", "backend"),
    [(s, b) for s in ("zero2", "zero3") for b in ("fsdp1", "fsdp2", "deepspeed")] + [("zero1", "deepspeed")],
)
def test_a_bare_count_keeps_what_a_model_of_that_size_keeps(strategy: str, backend: str, precision: str) -> None:
    """Without buckets. DeepSpeed's ZeRO-1 and 2 free gradients between steps, which a count has."""
    options = {"gpus": 8, "strategy": strategy, "backend": backend, "precision": precision}
    count, model = (one(model=name, **options) for name in ("8030261248", "meta-llama/Llama-3.1-8B"))
    kept = sum(model.states.get(part, 0) for part in ("parameters", "gradients", "optimizer"))
    freed = 0 if model.states.get("gradients") else count.states["gradients"]
    assert count.kept_bytes - freed == pytest.approx(kept, rel=1e-3)


def test_the_whole_parameters_that_fsdp_gathers_decide_whether_a_count_fits() -> None:
    """40B in bf16-mixed on 8 GPUs of 80 GiB: 80 GB of shards and 80 GB of whole parameters in bf16."""
    zero2, zero3 = (one(model="40B", gpus=8, strategy=s, backend="fsdp2") for s in ("zero2", "zero3"))
    assert zero2.kept_bytes == zero3.kept_bytes == 80e9
    assert zero2.fits is False
    assert zero3.fits is None


def test_the_json_has_the_contracts_keys() -> None:
    report = estimate(model="meta-llama/Llama-2-7b-hf", gpus=4, gpu="A100-40GB").as_dict()
    assert {"schema_version", "model", "request", "gpu", "estimates", "recommendation"} <= set(report)
    assert set(report["model"]) >= {"name", "source", "parameters", "trainable_parameters"}
    assert report["model"]["parameters"] == 6_738_415_616
    assert [(e["strategy"], e["offload"]) for e in report["estimates"]] == [
        ("ddp", "none"),
        ("zero1", "none"),
        ("zero2", "none"),
        ("zero3", "none"),
        ("zero2", "optimizer"),
        ("zero3", "optimizer"),
        ("zero3", "parameters"),
    ]
    for row in report["estimates"]:
        assert {
            "strategy", "backend", "offload", "fits", "peak_tensor_bytes", "peak_allocated_bytes",
            "peak_reserved_bytes", "peak_device_bytes", "peak_phase", "phase_peaks", "states", "at_peak",
            "host_bytes_per_node", "tokens_per_second_per_gpu", "step_seconds", "not_modelled",
        } <= set(row)  # fmt: skip
        assert row["needed_bytes"] == sum(row["needed_breakdown"].values())
        assert row["headroom_bytes"] == report["gpu"]["memory_bytes"] - row["needed_bytes"]
        assert row["fits"] is (row["headroom_bytes"] >= 0)
        assert row["step_seconds"] == pytest.approx(sum(row["step_breakdown"].values()), rel=1e-5)
        assert set(row["at_peak"]) == set(ACCOUNTS)
        assert set(row["needed_breakdown"]) == {*ACCOUNTS, *NON_TENSOR_PARTS} - {"vllm", "evaluation"}


@pytest.mark.parametrize(
    "job",
    [
        {"model": "meta-llama/Llama-2-7b-hf", "gpus": 4, "gpu": "A100-40GB"},
        {"model": "google-t5/t5-large", "gpus": 2, "gpu": "RTX-4090", "precision": "fp32"},
        {"model": "openai-community/gpt2", "gpu": "24GiB", "micro_batch_size": 8},
    ],
    ids=lambda job: job["model"],
)
def test_what_is_needed_adds_up(job: dict[str, Any]) -> None:
    for row in estimate(**job).estimates:
        parts = row.needed_breakdown
        assert parts is not None and sum(parts.values()) == row.needed_bytes
        assert min(parts.values()) >= 0
        low, high = row.peak_device_bytes_range or (0, 0)
        assert low < (row.peak_device_bytes or 0) < high
        assert (row.needed_bytes or 0) >= (row.peak_device_bytes or 0)


def test_the_allocators_settings_change_what_is_reserved() -> None:
    job = {"model": "meta-llama/Llama-2-7b-hf", "gpus": 4, "gpu": "H100", "strategy": "zero2", "offload": "optimizer"}
    (plain,), (expandable,) = (
        estimate(**job, **conf).estimates for conf in ({}, {"allocator_conf": "expandable_segments:True"})
    )
    assert (expandable.peak_reserved_bytes or 0) < (plain.peak_reserved_bytes or 0)
    with pytest.raises(UsageError):
        estimate(**job, allocator_conf="expandable_segment:True")


REFUSED = [
    ({"strategy": "ddp", "offload": "parameters"}, "strategy ddp cannot offload parameters"),
    ({"strategy": "zero1", "backend": "fsdp2"}, "backend fsdp2 has no strategy zero1"),
    ({"strategy": "zero3", "offload": "optimizer", "backend": "fsdp1"}, "backend fsdp1 has no strategy zero3 with offload optimizer"),
    ({"gpus": 6, "nnodes": 4}, "gpus 6 is not divisible by nnodes 4"),
    ({"gpus": 0}, "gpus must be at least 1, not 0"),
    ({"micro_batch_size": -1}, "micro_batch_size must be at least 1, not -1"),
    ({"precision": "fp32", "dtype": "bfloat16"},
     "precision fp32 has no autocast, so weights in bfloat16 also compute in bfloat16, which is precision bf16"),
    ({"precision": "fp32", "dtype": "bfloat16", "use_peft": True, "backend": "deepspeed"},
     "precision fp32 has no autocast, so weights in bfloat16 also compute in bfloat16, which is precision bf16"),
    ({"precision": "bf16", "dtype": "float32"}, "precision bf16 has all weights in bfloat16, not in float32"),
    ({"precision": "fp4"}, "precision fp4 is not modelled yet"),
    ({"precision": "fp8"}, "precision must be fp32, bf16, bf16-mixed or fp16-mixed, not fp8"),
    ({"colour": "red"}, "no such option: colour"),
    ({"gpu": "H9000"}, "unknown GPU 'H9000'"),
    ({"strategy": "zero3", "backend": "fsdp2", "offload": "parameters", "offload_device": "nvme"}, "backend fsdp2 cannot offload to nvme"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda x: str(x)[:40])
def test_what_cannot_be_is_refused_in_one_line(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError) as error:
        estimate(model="meta-llama/Llama-2-7b-hf", **options)
    assert error.value.message == message
    assert error.value.hint and "\n" not in error.value.message + error.value.hint


def test_no_shard_of_fsdp1_is_refused_with_what_is_modelled() -> None:
    with pytest.raises(UsageError, match="backend fsdp1 has no strategy ddp") as error:
        estimate(model="meta-llama/Llama-2-7b-hf", gpus=4, strategy="no_shard", backend="fsdp1")
    assert error.value.hint is not None and "FSDP1's NO_SHARD is modelled on one GPU" in error.value.hint


def test_a_sequence_past_the_training_length_of_rotary_positions_is_noted() -> None:
    report = estimate(model="EleutherAI/pythia-70m", seq_len=4096, gpu="T4", strategy="ddp")
    assert "seq_len 4096 is past the model's maximum of 2048 tokens" in report.notes


@pytest.mark.parametrize(
    ("model", "limit"),
    [
        ("openai-community/gpt2", 1024), ("google-bert/bert-base-uncased", 512), ("openai/whisper-large-v3", 448),
        ("facebook/opt-1.3b", 2048), ("EleutherAI/gpt-j-6b", 2048),
    ],
)  # fmt: skip
def test_a_sequence_past_a_table_of_positions_is_refused(model: str, limit: int) -> None:
    with pytest.raises(UsageError, match=f"table of {limit} positions") as error:
        estimate(model=model, seq_len=limit + 1, gpu="H100", strategy="ddp")
    assert error.value.hint == f"--seq-len {limit} or less"
    assert estimate(model=model, seq_len=limit, gpu="H100", strategy="ddp").estimates


def test_fsdp2_padding_is_named() -> None:
    """A fused tensor of 8 experts over 64 ranks: every rank keeps one expert in eight instead of one in 64."""
    result = one(model="mistralai/Mixtral-8x7B-v0.1", gpus=64, strategy="zero3")
    assert any("experts" in w and "8.0 times an even share" in w for w in result.warnings)
    assert not one(model="mistralai/Mixtral-8x7B-v0.1", gpus=8, strategy="zero3").warnings


def test_a_path_that_a_models_code_refuses_costs_that_row_alone() -> None:
    request = make_request({"model": MIXTRAL, "gpus": 8, "gpu": "H100"})
    report = estimate_resolved(request, refusing_autocast())
    peaks = {(e.plan.strategy, e.plan.offload): e.peak_tensor_bytes for e in report.estimates}
    assert peaks["ddp", "none"] is None and peaks["zero3", "none"] is not None
    ddp = report.estimates[0]
    assert ddp.fits is False
    assert any(reason.startswith("the peak, ") for reason in ddp.not_modelled)


def test_a_small_host_refuses_what_it_cannot_hold() -> None:
    """Offload is refused by the host's memory alone; what leaves it alone is not."""
    asked = {"model": "meta-llama/Llama-2-7b-hf", "gpus": 4, "gpu": "A100-40GB"}
    free = {e.label: e for e in estimate(**asked).estimates}
    limited = estimate(**asked, host_memory="100GiB")
    for row in limited.estimates:
        host = row.host_bytes_per_node
        assert row.fits == (free[row.label].fits and (host is None or host <= 100 * 2**30)), row.label
    refused = [e for e in limited.estimates if free[e.label].fits and not e.fits]
    assert refused and all(verdict_text(limited, e).startswith("host lacks ") for e in refused)
    assert all(e.fits == free[e.label].fits for e in estimate(**asked, host_memory="2TiB").estimates)


def test_in_fp32_a_gpu_makes_the_scores_of_grouped_heads() -> None:
    """Llama 3.1 8B keeps 32 layers of (B, 32, T, T) in fp32: PyTorch 2.13 has no fused kernel for them."""
    options = {"model": "meta-llama/Llama-3.1-8B", "gpus": 8, "strategy": "zero3", "precision": "fp32", "seq_len": 1024}
    result = one(**options)
    assert result.simulated_peak_bytes is not None and result.peak_tensor_bytes is not None
    scores = 32 * 32 * 1024**2 * 4
    assert scores * 0.9 < result.peak_tensor_bytes - result.simulated_peak_bytes < scores * 1.1
    assert not any("attention kernel" in what for what in result.not_modelled)


def test_in_fp32_a_gpu_needs_no_mask_for_heads_that_share_nothing() -> None:
    result = one(
        model="meta-llama/Llama-2-7b-hf", gpus=8, strategy="zero3", precision="fp32", micro_batch_size=4, seq_len=4096
    )
    assert result.simulated_peak_bytes is not None and result.peak_tensor_bytes is not None
    masks = 32 * 4 * 4096**2 * 4
    assert masks * 0.9 < result.simulated_peak_bytes - result.peak_tensor_bytes < masks * 1.1


def test_in_fp32_a_filled_window_takes_a_mask_per_layer() -> None:
    """Phi-3 mini looks 2047 tokens back: one more makes a mask of each layer, of 4 bytes per pair of tokens."""
    job = {"model": "microsoft/Phi-3-mini-4k-instruct", "gpus": 8, "strategy": "zero3", "precision": "fp32"}
    short, long = (one(**job, seq_len=t).peak_tensor_bytes for t in (2046, 2048))
    assert short is not None and long is not None
    assert long - short > 32 * 2048**2 * 4


def test_a_filled_window_takes_a_mask_per_layer_in_half_precision_too() -> None:
    """The flash kernel takes no mask: of 26 layers Gemma 3 1B has 22 with a window of 512."""
    job = {"model": "google/gemma-3-1b-pt", "gpus": 8, "strategy": "zero3", "precision": "bf16", "seq_len": 8192}
    sdpa, flash = (one(**job, attention=attention).peak_tensor_bytes for attention in ("sdpa", "flash_attention_2"))
    assert sdpa is not None and flash is not None
    assert sdpa - flash == 22 * 8192**2 * 2


def test_the_allocator_is_simulated_once_for_a_plan_with_the_same_settings_and_gpu() -> None:
    job: dict[str, Any] = {
        "model": "openai-community/gpt2",
        "strategy": "zero3",
        "gpus": 2,
        "gpu": "H100",
        "seq_len": 777,
    }
    first = estimate(**job)
    simulated = allocator_result.cache_info().misses
    assert estimate(**job).as_dict() == first.as_dict()
    assert allocator_result.cache_info().misses == simulated
    for changed in (
        {"allocator_conf": "expandable_segments:True"},
        {"gpu": "T4"},
        {"gpus": 4},
        {"micro_batch_size": 2},
    ):
        estimate(**job | changed)
        assert allocator_result.cache_info().misses > simulated, changed
        simulated = allocator_result.cache_info().misses


@in_turn(1, of=2)
def test_axolotl_trains_bf16_weights_and_notes_what_it_keeps_in_fp32() -> None:
    job = {"model": "meta-llama/Llama-3.1-8B", "framework": "axolotl", "precision": "bf16-mixed", "seq_len": 1024}
    sharded, usual = (one(**{**job, "framework": by}, gpus=8, strategy="zero3") for by in ("axolotl", "trainer"))
    for states in ("parameters", "gradients", "optimizer"):
        assert sharded.states[states] == pytest.approx(usual.states[states] / 2, rel=0.001), states
    notes = {at: one(**job, strategy="ddp", attention=at).not_modelled for at in ("sdpa", "flash_attention_2")}
    assert any("fp32 norms, embeddings and head" in note and "3.92 GiB" in note for note in notes["sdpa"])
    assert not any("fp32 norms" in note for note in notes["flash_attention_2"])


def test_refused_options_are_refused_before_the_adapted_model_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    def recorded(*_: object) -> None:
        raise AssertionError("the adapted model was asked for")

    monkeypatch.setattr(Resolved, "adapted", recorded)
    with pytest.raises(UsageError, match="--compile layer is not modelled with --activation-checkpointing every-2"):
        estimate(model="meta-llama/Llama-3.1-8B", compile="layer", activation_checkpointing="every-2")


@pytest.mark.parametrize("model", ["google/gemma-4-E2B", "google/gemma-4-E4B"])
def test_zero3_of_deepspeed_gathers_no_layers_of_towers_that_do_not_run(model: str) -> None:
    """A step on text has neither the vision tower before the language model nor the audio tower after it."""
    (row,) = estimate(model=model, gpus=64, strategy="zero3", offload="optimizer").estimates
    assert row.backend == "deepspeed"
    assert row.needed_bytes and row.peak_tensor_bytes
