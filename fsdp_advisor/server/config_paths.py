"""Checks configurations that strangers paste: they may not name a file or an address."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fsdp_advisor.errors import UnreadableConfig

_PATH = re.compile(
    r"[/~\\]|\.{1,2}(?:[/\\]|$)|[a-z][a-z0-9+.-]*:[/\\]|file:|.*[/\\]\.\.(?:[/\\]|$)", re.DOTALL | re.IGNORECASE
)
_ORIGIN_KEYS = frozenset({"_name_or_path", "auto_map"})
"""Keys that say where a configuration comes from. They are dropped before the model is built."""


_LOADING_KEYS = ("tokenizer_name_or_path", "adapters")
"""Keys of an adapter_config.json under which PEFT loads files."""
_PATTERN_KEYS = frozenset(
    {"target_modules", "exclude_modules", "layers_pattern", "rank_pattern", "base_model_name_or_path", "revision"}
)
"""Keys of an adapter_config.json that are not checked: regular expressions, which may look like paths, and keys that an estimate
ignores.
"""


def refuse_adapter_paths(options: Mapping[str, Any]) -> None:
    """Raise UnreadableConfig if the `peft_config` of these options names a file or an address to load."""
    if not options.get("peft_config"):
        return
    values = json.loads(options["peft_config"])
    for key in _LOADING_KEYS:
        if values.get(key):
            raise UnreadableConfig(f"peft_config: {key} names files", hint="a server reads no files; leave it out")
    refuse_paths({key: value for key, value in values.items() if key not in _PATTERN_KEYS}, "peft_config")


def refuse_paths(config: Any, name: str, key: str = "") -> None:
    """Raise UnreadableConfig if a value anywhere in `config` is a path or an address: a model's shapes need none.

    `name` is the model's name, for the message.

    >>> refuse_paths({"model_type": "llama", "text_config": {"_name_or_path": "/home/me", "hidden_act": "silu"}}, "it")
    """
    if isinstance(config, dict):
        for inner, value in config.items():
            if inner not in _ORIGIN_KEYS:
                refuse_paths(value, name, inner)
    elif isinstance(config, list):
        for value in config:
            refuse_paths(value, name, key)
    elif isinstance(config, str) and _PATH.match(config):
        shown = key[:40] if key.isprintable() else "a key"
        raise UnreadableConfig(f"{name}: {shown} is a path or an address", hint="a server reads no files; leave it out")
