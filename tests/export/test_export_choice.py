"""Which plan is exported, and which jobs are refused before anything is recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from matrix import in_turn

from fsdp_advisor.assumptions import settled
from fsdp_advisor.errors import UsageError
from fsdp_advisor.estimator import lazy_report
from fsdp_advisor.export import Job, choice, export
from fsdp_advisor.export.choice import report_for
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.report import Rows

LLAMA = {"model": "meta-llama/Llama-3.1-8B", "gpu": "H100-80GB"}
QLORA = {**LLAMA, "use_peft": True, "load_in_4bit": True}


def exported(target: str, **options: object) -> tuple[dict[str, object], str]:
    """The configuration, and the command's options in the plan that it states."""
    report = report_for(target, make_request(options))
    job = Job.of(report, report.estimates[0])
    return yaml.safe_load(export(target, job).text), " ".join(job.options)


@pytest.mark.parametrize(
    "strategy", [pytest.param("all", marks=in_turn(1, of=4)), pytest.param("ddp", marks=in_turn(3, of=4))]
)
def test_llamafactory_gets_qlora_with_pefts_modules_and_its_own_storage(strategy: str) -> None:
    found, options = exported("llamafactory", **QLORA, strategy=strategy)
    assert (found["lora_target"], found["quantization_bit"]) == ("q_proj,v_proj", 4)
    assert "--bnb-4bit-quant-storage bfloat16" in options


def test_axolotl_gets_pefts_modules() -> None:
    found, _ = exported("axolotl", **LLAMA, use_peft=True, strategy="ddp")
    assert found["lora_target_modules"] == ["q_proj", "v_proj"]


def test_trl_gets_a_reward_model_made_of_a_causal_language_model() -> None:
    found, options = exported("trl", model="openai-community/gpt2", gpu="H100", task="reward", strategy="ddp")
    assert "center_rewards_coefficient" in found and "--task reward" in options


def test_a_reward_model_of_another_model_is_refused() -> None:
    with pytest.raises(UsageError, match="made of a causal language model"):
        exported("trl", model="google/flan-t5-small", gpu="H100", task="reward", strategy="ddp")


def test_modules_are_those_of_pefts_mapping() -> None:
    """Source: PEFT 0.21.2, utils/constants.py, TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING."""
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as MAPPING

    report = report_for("ddp", make_request({**LLAMA, "use_peft": True, "strategy": "ddp"}))
    assert set(report.adapted_modules) == set(MAPPING["llama"])
    whole = report_for("ddp", make_request({**LLAMA, "strategy": "ddp", "gpu": "B200"}))
    assert whole.adapted_modules == ()


@pytest.mark.parametrize(
    ("target", "options", "reason"),
    [
        ("llamafactory", {"bnb_4bit_quant_storage": "uint8"}, "use --bnb-4bit-quant-storage bfloat16"),
        (
            "llamafactory",
            {"bnb_4bit_quant_storage": "uint8", "strategy": "ddp"},
            "use --bnb-4bit-quant-storage bfloat16",
        ),
        (
            "llamafactory",
            {"strategy": "zero3", "gpus": 8, "backend": "fsdp2"},
            "its configuration cannot describe FSDP",
        ),
        ("axolotl", {"backend": "fsdp1", "gpus": 8}, "it no longer supports FSDP1"),
    ],
)
def test_what_a_target_cannot_train_is_refused_before_it_is_recorded(
    target: str, options: dict[str, object], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recorded(*_: object) -> Resolved:
        raise AssertionError("the adapted model was asked for")

    model = resolve(LLAMA["model"])
    monkeypatch.setattr(Resolved, "adapted", recorded)
    with pytest.raises(UsageError, match=reason) as refused:
        report_for(target, make_request({**QLORA, **options}), model)
    assert refused.value.hint and "--attention" not in refused.value.hint


@pytest.mark.parametrize("framework", ["trl", "trainer", "axolotl"])
def test_the_framework_of_the_target_decides_open_options(framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "estimate_resolved", lazy_report)
    options = {**LLAMA, "gpus": 8, "strategy": "zero3"}
    own = report_for(framework, make_request(options))
    given = report_for(framework, make_request({**options, "framework": framework}))
    assert isinstance(own.estimates, Rows) and isinstance(given.estimates, Rows)
    assert own.estimates.plans == given.estimates.plans and own.request.assumed == given.request.assumed
    assert (own.estimates.plans[0].activation_checkpointing == "full") is (framework == "trl")


def test_llamafactory_stores_weights_in_4_bits_in_the_compute_dtype_of_the_gpu() -> None:
    made = report_for(
        "llamafactory", make_request({**QLORA, "strategy": "ddp", "gpu": "T4", "model": "openai-community/gpt2"})
    )
    assert made.request.bnb_4bit_quant_storage == "float16" and made.request.use_bnb_nested_quant


def test_options_that_were_assumed_are_assumed_anew() -> None:
    """A server settles a request before the target's framework is set."""
    lora = settled(make_request({**LLAMA, "use_peft": True}))
    assert (lora.dtype, lora.assumed) == ("bfloat16", {"dtype"})
    assert settled(lora) == lora and settled(lora).assumed == lora.assumed
    by_trl = settled(lora.but(framework="trl"))
    assert (by_trl.dtype, by_trl.activation_checkpointing, by_trl.assumed) == (
        "auto",
        "full",
        {"activation_checkpointing"},
    )


@pytest.mark.parametrize(
    ("named", "loaded"),
    [
        ("llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("meta-llama/llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("Meta-Llama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("someone/Llama-3.1-8B-FP8", "someone/Llama-3.1-8B"),
        ("gpt2", "openai-community/gpt2"),
    ],
)
def test_files_load_the_model_that_was_named_and_not_the_one_with_its_shapes(named: str, loaded: str) -> None:
    found, _ = exported("trl", model=named, gpu="H100-80GB", gpus=8, strategy="zero3")
    assert found["model_name_or_path"] == loaded


def test_files_load_the_directory_of_a_configuration_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = resolve("openai-community/gpt2").profile
    assert profile is not None
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(profile.config))
    monkeypatch.chdir(tmp_path)
    for named in ("mine/config.json", "./mine"):
        found, _ = exported("trl", model=named, gpu="H100-80GB", strategy="ddp")
        assert found["model_name_or_path"] == str(tmp_path / "mine")
