"""Configurations and scripts of other tools that are pasted into the page."""

from __future__ import annotations

from html import unescape

import pytest
from fastapi.testclient import TestClient

from fsdp_advisor.configs.nameless import file_name
from fsdp_advisor.errors import UsageError
from fsdp_advisor.server.pasted import with_pasted_file

LOOP = """
import torch
model = AutoModelForCausalLM.from_pretrained("openai-community/gpt2", dtype=torch.float32)
for layer in model.transformer.h:
    fully_shard(layer)
fully_shard(model)
loader = DataLoader(data, batch_size=2)
loss = model(**batch).loss
loss.backward()
"""
FORM = {"model": "meta-llama/Llama-3.1-8B", "gpus": "4", "gpu": "H100-80GB", "seq_len": "512"}


def test_the_settings_of_a_pasted_script_win_over_the_form_and_its_assumptions_do_not() -> None:
    options, lines = with_pasted_file(FORM | {"config": LOOP})
    expected = {
        "model": "openai-community/gpt2",
        "gpus": "4",
        "seq_len": "512",
        "precision": "fp32",
        "global_batch_size": "8",
    }
    assert options.items() >= expected.items() and "config" not in options
    assert lines[0] == "pasted.py (loop in PyTorch)"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("# python -m axolotl.cli.train this.yaml\nbase_model: gpt2", "pasted.yaml"),
        ("base_model: gpt2\nwandb_name: first deepspeed run", "pasted.yaml"),
        ("export N=8\nCUDA_VISIBLE_DEVICES=0 torchrun train.py", "pasted.sh"),
        ("srun --nodes 2 accelerate launch train.py", "pasted.sh"),
        (".venv/bin/python train.py", "pasted.sh"),
    ],
)
def test_a_launcher_in_a_comment_or_a_value_makes_no_script(text: str, name: str) -> None:
    assert file_name(text) == name


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("base_model: openai-community/gpt2\nsequence_len: 256\nmicro_batch_size: 2", "openai-community/gpt2"),
        ("NPROC_PER_NODE=2 swift sft --model openai-community/gpt2 --dataset a", "openai-community/gpt2"),
        ('{"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 2}', FORM["model"]),
    ],
)
def test_files_of_other_tools_can_be_pasted(text: str, model: str) -> None:
    assert with_pasted_file(FORM | {"config": text})[0]["model"] == model


@pytest.mark.parametrize("text", ["", '{"model_type": "llama"}', "{not json"])
def test_a_models_configuration_is_left_to_the_answer(text: str) -> None:
    given = FORM | ({"config": text} if text else {})
    assert with_pasted_file(given) == (given, ())


@pytest.mark.parametrize(
    "long",
    [
        {"config": "#" * 20_001},
        {"config": '{"model_type": "' + "\u3042" * 7_000},
        {"peft_config": '{"rank_pattern": ' + "{" * 20_000},
        {"config": "#" * 15_000, "peft_config": "{" * 5_000},
    ],
)
def test_a_form_that_is_too_long_for_an_address_is_refused_with_its_length(long: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"the form has 6[0-3],\d\d\d bytes in an address, and the page takes 60,000"):
        with_pasted_file(FORM | long)


def test_a_script_of_16000_characters_is_answered(client: TestClient) -> None:
    assert client.get("/", params=FORM | {"config": "#" * 16_001 + "\n" + LOOP}).status_code == 200


def test_a_file_that_names_another_one_is_refused() -> None:
    with pytest.raises(UsageError, match=r"names ds\.json, which was not found"):
        with_pasted_file(
            FORM | {"config": "model_name_or_path: gpt2\nper_device_train_batch_size: 1\ndeepspeed: ds.json"}
        )


@pytest.mark.slow
def test_the_page_answers_for_a_pasted_script_and_says_what_it_read(client: TestClient) -> None:
    page = unescape(client.get("/", params=FORM | {"config": LOOP}).text)
    assert "What was read from the pasted file" in page and "fully_shard (reshard_after_forward: True)" in page
    assert "openai-community/gpt2 (124M parameters)" in page
    answer = client.get("/.json", params=FORM | {"config": LOOP}).json()
    assert answer["model"]["name"] == "openai-community/gpt2"
    refused = client.get("/", params=FORM | {"config": "import torch"})
    assert refused.status_code == 422 and "no loop that trains a model it loads" in refused.text
