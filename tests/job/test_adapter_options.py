"""Options of adapters in every spelling: text, lists, files, command lines and query strings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.adapter_fields import with_files_read
from fsdp_advisor.job.fields import as_query, as_words
from fsdp_advisor.job.parsing import make_request

CONFIG = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"]}


@pytest.mark.parametrize(
    "given",
    ["visual.* embed_tokens", "visual.*,embed_tokens", ["visual.*", "embed_tokens"], ("visual.*, embed_tokens",)],
)
def test_patterns_are_read_from_text_and_lists(given: object) -> None:
    assert make_request({"model": "gpt2", "freeze": given}).freeze == ("visual.*", "embed_tokens")


@pytest.mark.parametrize("rank", [16, 8])
def test_a_rank_without_an_adapter_is_refused_also_at_its_default(rank: int) -> None:
    with pytest.raises(UsageError, match="lora_r needs adapters"):
        adaptation_of(make_request({"model": "gpt2", "lora_r": rank}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"framework": "trl"}, "only axolotl packs experts"),
        ({"load_in_4bit": False}, "describes a base in 4 bits"),
        ({"lora_target_modules": "all-linear"}, "lora_target_linear"),
        ({"lora_target_parameters": "mlp.experts.down_proj"}, "adapters on packed experts"),
    ],
)
def test_packed_experts_are_refused_where_axolotl_has_none(changes: dict[str, object], message: str) -> None:
    job = {
        "model": "mistralai/Mixtral-8x7B-v0.1", "framework": "axolotl", "use_peft": True, "load_in_4bit": True,
        "lora_target_modules": "q_proj,v_proj", "quantize_moe_experts": True,
    }  # fmt: skip
    assert adaptation_of(make_request(job)).quantization["quantize_moe_experts"]
    with pytest.raises(UsageError, match=message):
        adaptation_of(make_request({**job, **changes}))


def test_a_whole_request_may_be_sent_back() -> None:
    whole = {"model": "gpt2", "lora_r": 16, "use_peft": False, "load_in_4bit": False, "bnb_4bit_quant_type": "nf4"}
    assert adaptation_of(make_request(whole)).peft == {}


def test_a_request_survives_a_query_string() -> None:
    request = make_request({"model": "gpt2", "freeze": ["a", "b"], "load_in_4bit": True, "lora_dropout": 0.5})
    assert make_request(as_query(request.changed)) == request


def test_words_of_a_command_line_repeat_flags_and_lists() -> None:
    request = make_request({"model": "gpt2", "freeze": ["a", "b"], "use_dora": True})
    words = [word for name, value in request.changed.items() for word in as_words(name, value)]
    assert words == ["--model", "gpt2", "--use-dora", "--freeze", "a", "b"]


def test_a_peft_config_may_be_a_mapping_a_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "adapter_config.json"
    file.write_text(json.dumps(CONFIG))
    given = [CONFIG, json.dumps(CONFIG), file, str(file), tmp_path]
    read = {make_request(with_files_read({"model": "gpt2", "peft_config": each})).peft_config for each in given}
    assert read == {json.dumps(CONFIG, sort_keys=True)}


@pytest.mark.parametrize(("name", "text"), [("missing.json", None), ("other.json", "{}"), ("broken.json", "{")])
def test_a_file_that_is_no_adapter_config_is_refused(name: str, text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=name):
        with_files_read({"peft_config": str(tmp_path / name)})


def test_an_adapter_config_that_keeps_adapters_in_the_bases_dtype_is_refused() -> None:
    given = {"model": "gpt2", "peft_config": {**CONFIG, "autocast_adapter_dtype": False}}
    with pytest.raises(UsageError, match="argument of get_peft_model"):
        adaptation_of(make_request(given))
    usual = {**given, "peft_config": {**CONFIG, "autocast_adapter_dtype": True}}
    assert adaptation_of(make_request(usual)) == adaptation_of(make_request({**given, "peft_config": CONFIG}))
