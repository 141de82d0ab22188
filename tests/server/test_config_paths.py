"""Pasted configurations may not name files."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from fsdp_advisor.errors import UnreadableConfig
from fsdp_advisor.server.config_paths import refuse_adapter_paths, refuse_paths

CONFIG = {"model_type": "gpt2", "n_embd": 32}


@pytest.mark.parametrize(
    "value", ["/etc/passwd", "~/model", "../x", "C:\\model", "file:x", "https://example.org/x", "a/../../b"]
)
@pytest.mark.parametrize("wrap", [lambda value: {"backbone": value}, lambda value: {"parts": [{"weights": value}]}])
def test_paths_are_refused_at_every_depth(value: str, wrap: Callable[[str], dict[str, Any]]) -> None:
    with pytest.raises(UnreadableConfig, match="is a path or an address"):
        refuse_paths({**CONFIG, **wrap(value)}, "it")


@pytest.mark.parametrize("key", ["_name_or_path", "auto_map"])
def test_keys_that_name_the_origin_may_hold_paths(key: str) -> None:
    refuse_paths({**CONFIG, key: "/home/me/model"}, "it")


def test_a_name_with_a_slash_is_not_taken_for_a_path() -> None:
    refuse_paths(
        {**CONFIG, "architectures": ["GPT2LMHeadModel"], "torch_dtype": "float16", "rope": {"type": "x/y"}}, "it"
    )


@pytest.mark.parametrize("key", ["tokenizer_name_or_path", "adapters", "some_file"])
def test_an_adapter_config_that_loads_files_is_refused(key: str) -> None:
    with pytest.raises(UnreadableConfig):
        refuse_adapter_paths({"peft_config": json.dumps({"peft_type": "PROMPT_TUNING", key: "/etc/passwd"})})


def test_an_adapter_config_may_have_regular_expressions_and_the_path_of_its_base() -> None:
    config = {"peft_type": "LORA", "target_modules": r".*\..*proj", "base_model_name_or_path": "/home/me/base"}
    refuse_adapter_paths({"peft_config": json.dumps(config)})
