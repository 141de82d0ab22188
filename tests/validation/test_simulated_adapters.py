"""Predicted peaks of models with adapters, frozen parameters or a quantized base against PyTorch's engines around PEFT's model.

Each is one steady step on rank 0 under fake tensors, equal to the byte in each phase.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from adapter_cases import CONFIGS, ENGINES, FEW, MORE, SHARING
from adapter_peaks import read
from matrix import in_turn, taken
from small_models import Case, name_of, options_of

pytest.importorskip("torch")
pytest.importorskip("peft")

from compared_peaks import predicted_and_simulated, predicted_peaks

from fsdp_advisor.engines.registry import model_refusal
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.recording import source_of
from fsdp_advisor.validation.simulate import simulate

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", taken(FEW, MORE, days=10), ids=name_of)
def test_predicted_peaks_equal_pytorch_with_an_adapted_model(case: Case, tmp_path: Path) -> None:
    predicted, simulated = predicted_and_simulated(make_request(options_of(CONFIGS, case, tmp_path)))
    assert predicted == simulated


@in_turn(2, of=3)
def test_fsdp1_gathers_a_layer_without_a_backward_again_for_the_next_micro_batch(tmp_path: Path) -> None:
    """It was prefetched for a backward that it does not have, because nothing below the second layer trains."""
    adapter = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "layers_to_transform": [1]}
    case = {
        "model": "llama", "strategy": "zero3", "backend": "fsdp1", "gpus": "4", "precision": "fp32", "seq_len": "32",
        "gradient_accumulation_steps": "2", "peft_config": json.dumps(adapter),
    }  # fmt: skip
    predicted, simulated = predicted_and_simulated(make_request(options_of(CONFIGS, case, tmp_path)))
    assert predicted == simulated


KEPT = read()
"""By name of the case."""
SAMPLE = list(KEPT)[:: max(1, len(KEPT) // 3)]


def test_kept_peaks_are_of_at_least_80_cases_and_eight_architectures_that_all_agree() -> None:
    cases = {name_of(case): case for case in [*FEW, *MORE]}
    assert set(KEPT) <= set(cases)
    assert len(KEPT) >= 80 and all(line.predicted == line.simulated for line in KEPT.values())
    assert len({cases[name]["model"] for name in KEPT}) >= 8
    assert {"1", "64"} <= {cases[name]["gpus"] for name in KEPT}


@pytest.mark.parametrize("name", taken(SAMPLE, [name for name in KEPT if name not in SAMPLE], days=5))
def test_predictions_equal_the_kept_peaks_of_pytorch(name: str, tmp_path: Path) -> None:
    (case,) = (case for case in [*FEW, *MORE] if name_of(case) == name)
    assert predicted_peaks(make_request(options_of(CONFIGS, case, tmp_path))) == KEPT[name].simulated


def test_matrices_that_layers_share_count_once(tmp_path: Path) -> None:
    case: Case = {"model": "llama", **ENGINES[0], "peft_config": json.dumps(SHARING[1])}
    request = make_request(options_of(CONFIGS, case, tmp_path))
    profile = resolve(request.model).adapted(adaptation_of(request)).profile
    assert profile is not None
    source = source_of(profile.config, name=request.model, task=profile.task)
    trained = sum(p.numel() for p in source.build(source.inventory_dtype).parameters() if p.requires_grad)
    assert profile.trainable_parameters == trained and profile.shares_between_layers
    sharded = make_request({**options_of(CONFIGS, case, tmp_path), "strategy": "zero3"})
    (plan,) = plans(sharded, seq_len=128)
    refused = model_refusal(profile, plan)
    assert refused is not None and "share" in refused.message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({**ENGINES[2]}, "FSDP2 reshards after forward"),
        ({**ENGINES[2], "strategy": "zero2"}, None),
        ({**ENGINES[4]}, "FSDP1 reshards after forward"),
        ({"strategy": "zero3", "backend": "deepspeed", "gpus": "4"}, "ZeRO-3 reshards after forward"),
        ({**ENGINES[1], "activation_checkpointing": "reentrant"}, "twice in a backward, which is refused by DDP"),
        ({**ENGINES[0], "activation_checkpointing": "reentrant"}, None),
    ],
)
def test_adalora_is_refused_where_it_cannot_train(options: Case, message: str | None, tmp_path: Path) -> None:
    """PEFT reads the matrices again after the forward. The errors are those of PEFT, DDP and DeepSpeed over gloo."""
    case: Case = {"model": "llama", **options, "peft_config": json.dumps({"peft_type": "ADALORA", "total_step": 100})}
    request = make_request(options_of(CONFIGS, case, tmp_path))
    profile = resolve(request.model).adapted(adaptation_of(request)).profile
    assert profile is not None
    (plan,) = plans(request, seq_len=128)
    refused = model_refusal(profile, plan)
    assert refused is None if message is None else refused is not None and message in refused.message


@pytest.mark.parametrize(
    ("method", "options", "refused"),
    [
        ({"peft_type": "VERA", "r": 16}, {**ENGINES[2]}, True),
        ({"peft_type": "VERA", "r": 16}, {**ENGINES[2], "precision": "fp32"}, False),
        ({"peft_type": "VERA", "r": 16}, {**ENGINES[4]}, False),
        ({"peft_type": "VERA", "r": 16}, {"strategy": "zero3", "backend": "deepspeed", "gpus": "4", "precision": "bf16"}, True),
        (SHARING[-2], {"strategy": "zero2", "backend": "deepspeed", "gpus": "4"}, True),
        (SHARING[-2], {**ENGINES[1]}, False),
    ],
)  # fmt: skip
def test_fixed_matrices_in_fp32_are_refused_where_an_engine_casts_adapters(
    method: dict[str, object], options: Case, refused: bool, tmp_path: Path
) -> None:
    """The error is that of FSDP2 on the CPU and of DeepSpeed in a rehearsal. Fake tensors do not compare dtypes."""
    found = _refusal({"model": "llama", **options, "peft_config": json.dumps(method)}, tmp_path)
    assert (found is not None and "fixed matrices" in found.message) == refused


FSDP1_QLORA: Case = {"backend": "fsdp1", "framework": "trainer", "load_in_4bit": "true"}


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"precision": "bf16", "lora_modules_to_save": "input_layernorm"},
            "FSDP expects uniform original parameter dtype",
            "one unit trains weights of two dtypes",
        ),
        (
            {
                "model": "qwen3",
                "lora_modules_to_save": "lm_head",
                "lora_target_modules": "q_proj",
                "framework": "accelerate",
            },
            "is shared with a parameter already managed by another FSDP group",
            "share a weight",
        ),
        (
            {"backend": "fsdp1", "use_orig_params": "false"},
            "has both parameters with requires_grad=True and False",
            "trains all parameters of a unit or none",
        ),
        (
            {"backend": "fsdp1", "framework": "trainer", "use_dora": "true"},
            "tuple index out of range",
            "DoRA reads the shape of an adapter's weight outside its unit",
        ),
        ({**FSDP1_QLORA}, "Cannot flatten integer dtype tensors", "packed weights of an integer dtype"),
        (
            {**FSDP1_QLORA, "bnb_4bit_quant_storage": "bfloat16"},
            "Must flatten tensors with uniform dtype",
            "base_layer.weight is in 16 bits, input_layernorm.weight in fp32",
        ),
    ],
)
def test_what_fsdp_cannot_train_is_refused(options: Case, error: str, message: str, tmp_path: Path) -> None:
    case: Case = {"model": "llama", **ENGINES[2], "use_peft": "true", **options}
    request = make_request(options_of(CONFIGS, case, tmp_path))
    profile = resolve(request.model).adapted(adaptation_of(request)).profile
    assert profile is not None
    (plan,) = plans(request, seq_len=128)
    refused = model_refusal(profile, plan)
    assert refused is not None and message in refused.message
    with pytest.raises((AssertionError, ValueError, IndexError), match=error):
        simulate(source_of(profile.config, name=request.model, task=profile.task), plan)


def _refusal(case: Case, folder: Path) -> UsageError | None:
    request = make_request(options_of(CONFIGS, case, folder))
    profile = resolve(request.model).adapted(adaptation_of(request)).profile
    assert profile is not None
    (plan,) = plans(request, seq_len=128)
    return model_refusal(profile, plan)


@pytest.mark.parametrize(("precision", "refused"), [("bf16-mixed", True), ("fp32", False)])
def test_dora_with_flat_parameters_in_mixed_precision_is_refused(precision: str, refused: bool, tmp_path: Path) -> None:
    """The error is that of AdamW over gloo: expected dtype float for `end` but got dtype c10::BFloat16."""
    options = {"backend": "fsdp1", "framework": "trainer", "use_orig_params": "false", "precision": precision}
    case: Case = {"model": "llama", **ENGINES[2], "use_peft": "true", "use_dora": "true", **options}
    found = _refusal(case, tmp_path)
    assert (found is not None and "does not reduce the gradients" in found.message) == refused


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        ({"bnb_4bit_quant_storage": "float32"}, True),
        ({"bnb_4bit_quant_storage": "float32", "backend": "fsdp1"}, True),
        ({"bnb_4bit_quant_storage": "bfloat16"}, False),
        ({"bnb_4bit_quant_storage": "float32", "precision": "fp32"}, False),
        ({"bnb_4bit_quant_storage": "float32", "strategy": "ddp", "backend": "ddp"}, False),
    ],
)
def test_packed_weights_that_mixed_precision_would_convert_are_refused(
    options: Case, refused: bool, tmp_path: Path
) -> None:
    case: Case = {"model": "llama", **ENGINES[2], "use_peft": "true", "load_in_4bit": "true", **options}
    found = _refusal(case, tmp_path)
    assert (found is not None and "destroys their values" in found.message) == refused
