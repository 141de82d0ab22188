"""When axolotl's kernels for adapters run, and which jobs are refused or not modelled with them."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.adaptation import CONFIG_KEY, adaptation_of
from fsdp_advisor.job.adapter_fields import LORA_KERNELS
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.lora_kernels import chosen_kernels, kernels_not_modelled, kernels_text, modelled_kernels
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.model.lora_kernels import kernels_of_model, lora_kernel_notes, lora_kernels_failure
from fsdp_advisor.model.tape_key import TapeKey

JOB = {"model": "gpt2", "framework": "axolotl", "strategy": "ddp", "use_peft": True, "gpus": 2}


def kernels(**options: Any) -> tuple[tuple[str, ...], tuple[str, ...], str | None]:
    """The kernels that axolotl runs, those of the estimate, and what is not modelled with them."""
    request = make_request({**JOB, **options})
    (plan,), adaptation = plans(request, seq_len=64), adaptation_of(request)
    return chosen_kernels(plan, adaptation), modelled_kernels(plan, adaptation), kernels_not_modelled(plan, adaptation)


@pytest.mark.parametrize(
    "options",
    [{}, {"load_in_4bit": True}, {"lora_dropout": 0.1}, {"strategy": "zero3"}, {"precision": "fp32"}],
    ids=str,
)
def test_axolotl_runs_its_kernels_by_default(options: dict[str, Any]) -> None:
    assert kernels(**options) == (LORA_KERNELS, LORA_KERNELS, None)


@pytest.mark.parametrize(
    "options",
    [
        {"framework": "trl"},
        {"use_peft": False},
        {"load_in_8bit": True},
        {"lora_kernels": "none"},
        {"strategy": "zero3", "backend": "fsdp1"},
        {"use_peft": False, "peft_config": '{"peft_type": "IA3"}'},
    ],
    ids=str,
)
def test_other_jobs_have_pefts_code(options: dict[str, Any]) -> None:
    assert kernels(**options) == ((), (), None)


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"strategy": "zero3", "backend": "deepspeed"}, "DeepSpeed ZeRO-3"),
        ({"dtype": "float32"}, "weights in fp32 under autocast"),
        ({"use_peft": False, "peft_config": '{"peft_type": "LORA", "lora_bias": true}'}, "biases of adapters"),
    ],
    ids=str,
)
def test_a_job_that_is_not_modelled_with_the_kernels_has_pefts_code(options: dict[str, Any], missing: str) -> None:
    assert kernels(**options) == (LORA_KERNELS, (), missing)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lora_kernels": "mlp", "framework": "trl"}, "asks for axolotl's kernels"),
        ({"lora_kernels": "mlp", "use_peft": False}, "asks for axolotl's kernels"),
        ({"lora_kernels": "mlp", "load_in_8bit": True}, "do not unpack weights in 8 bits"),
        ({"lora_kernels": "mlp", "use_dora": True}, "not modelled with DoRA"),
        ({"lora_kernels": "mlp", "strategy": "zero3", "backend": "fsdp1"}, "not compatible with FSDP1"),
        ({"tiled_mlp": "auto", "gpus": 1}, "not modelled with --tiled-mlp"),
    ],
    ids=str,
)
def test_jobs_that_cannot_have_the_kernels_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        kernels(**options)


GATED = tuple(f"mlp.{name}_proj.lora_A.default.weight" for name in ("gate", "up", "down"))
FUSED = ("mlp.gate_up_proj.lora_A.default.weight", "mlp.down_proj.lora_A.default.weight")


@pytest.mark.parametrize(
    ("model_type", "parameters", "options", "kernels", "told"),
    [
        ("olmo2", GATED, {}, ("mlp",), True),
        ("phi3", FUSED, {}, (), True),
        ("olmo2", GATED, {"use_dora": True}, (), True),
        ("olmo2", GATED, {"lora_kernels": "none"}, (), False),
        ("olmo2", GATED, {"load_in_8bit": True}, (), False),
        ("gemma4", GATED, {}, LORA_KERNELS, False),
        ("llama", GATED, {}, LORA_KERNELS, False),
    ],
)
def test_where_axolotls_choice_stops_the_estimate_has_what_works(
    model_type: str, parameters: tuple[str, ...], options: dict[str, Any], kernels: tuple[str, ...], told: bool
) -> None:
    request = make_request({**JOB, **options})
    (plan,) = plans(request, seq_len=64)
    config = {"model_type": model_type, CONFIG_KEY: adaptation_of(request).as_dict()}
    assert kernels_of_model(plan, config, parameters) == kernels
    notes = lora_kernel_notes(config, parameters, [plan])
    assert any("stops for models of type" in note for note in notes) is told
    assert lora_kernels_failure(config, plan) is None


ATTENTION = (
    "self_attn.q_proj.lora_A.w",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.lora_A.w",
    "self_attn.o_proj.lora_A.w",
)


@pytest.mark.parametrize(
    ("parameters", "kernels", "told"),
    [
        (
            (*ATTENTION, *FUSED),
            "auto",
            "mlp (the model has no mlp.gate_proj, mlp.up_proj); qkv (no adapter on self_attn.k_proj)",
        ),
        ((*ATTENTION, *GATED), "mlp,o", None),
        ((*ATTENTION, "mlp.gate_proj.weight", *GATED[1:]), "mlp", "mlp (no adapter on mlp.gate_proj)"),
        ((*ATTENTION, *FUSED), "none", None),
    ],
)
def test_kernels_without_effect_are_named(parameters: tuple[str, ...], kernels: str, told: str | None) -> None:
    request = make_request({**JOB, "lora_kernels": kernels})
    (plan,) = plans(request, seq_len=64)
    config = {"model_type": "llama", CONFIG_KEY: adaptation_of(request).as_dict()}
    expected = [] if told is None else [f"axolotl's kernels for adapters without effect: {told}"]
    assert lora_kernel_notes(config, parameters, [plan]) == expected


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"use_peft": False}, "leave it out, or add --use-peft"),
        ({"framework": "trl"}, "leave it out, or add --framework axolotl"),
        ({"framework": "trl", "use_peft": False}, "leave it out, or add --framework axolotl --use-peft"),
    ],
)
def test_a_refusal_of_kernels_names_what_is_missing(options: dict[str, Any], hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        kernels(lora_kernels="mlp", **options)
    assert refused.value.hint == hint


@pytest.mark.parametrize(
    ("kernels", "words"),
    [
        (LORA_KERNELS, ""),
        (("mlp",), "axolotl's kernels for adapters: mlp"),
        ((), "axolotl's kernels for adapters: none"),
    ],
)
def test_words_on_kernels_are_those_of_the_estimate(kernels: tuple[str, ...], words: str) -> None:
    assert kernels_text("axolotl", adaptation_of(make_request(JOB)), kernels) == words


@pytest.mark.parametrize(("kernels", "refused"), [("qkv", True), ("mlp,o", True), ("mlp", False), ("none", False)])
def test_kernels_of_an_attention_that_axolotl_does_not_replace_are_refused(kernels: str, refused: bool) -> None:
    request = make_request({**JOB, "lora_kernels": kernels})
    (plan,) = plans(request, seq_len=64)
    failure = lora_kernels_failure({"model_type": "olmo2", CONFIG_KEY: adaptation_of(request).as_dict()}, plan)
    assert (failure is not None) is refused


def test_parts_are_read_in_any_order() -> None:
    assert make_request({**JOB, "lora_kernels": "o, MLP"}).lora_kernels == "mlp,o"


def test_a_key_of_a_tape_names_the_kernels() -> None:
    key = TapeKey("plain", "bf16", "sdpa", "none", lora_kernels="mlp,o")
    assert key.name.endswith("|lora=mlp,o") and TapeKey.from_name(key.name) == key
