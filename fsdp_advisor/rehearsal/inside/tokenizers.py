"""A tokenizer for a model whose own tokenizer is not on this machine: one token per word, and the model's vocabulary size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|> ' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] | string }}{{ ' ' + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] | string }}{% endif %}{{ ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|> ' }}{% endif %}"
)
_DEFAULT_VOCABULARY = 32000


def word(index: int) -> str:
    """The text of the token with this number."""
    return f"w{index}"


def write_tokenizer(folder: Path, config: dict[str, Any]) -> None:
    """Write tokenizer.json and tokenizer_config.json for a configuration of transformers.

    Every word is one token, even if it is unknown. The words `w0`, `w1`, ... have tokens of their own.
    """
    text = config.get("text_config") or config
    size = int(text.get("vocab_size") or _DEFAULT_VOCABULARY)
    special = {
        "bos_token": ("<s>", _number(text.get("bos_token_id"), 1, size)),
        "eos_token": ("</s>", _number(text.get("eos_token_id"), 2, size)),
        "pad_token": ("<pad>", _number(text.get("pad_token_id"), -1, size)),
        "unk_token": ("<unk>", 0),
    }
    vocabulary = {word(i): i for i in range(size)}
    names: dict[str, str] = {}
    for role, (name, number) in special.items():
        if number < 0:
            names[role] = names["eos_token"]
            continue
        taken = next((each for each, at in vocabulary.items() if at == number), word(number))
        if taken in names.values():  # two roles share a token
            names[role] = taken
            continue
        del vocabulary[taken]
        vocabulary[name] = number
        names[role] = name
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(vocabulary, names)))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHAT_TEMPLATE, **names}
    settings |= {
        "model_max_length": int(text.get("max_position_embeddings") or 1 << 30),
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _number(given: Any, otherwise: int, size: int) -> int:
    first = given[0] if isinstance(given, list) and given else given
    return first if isinstance(first, int) and 0 <= first < size else otherwise


def _tokenizer(vocabulary: dict[str, int], names: dict[str, str]) -> dict[str, Any]:
    """A tokenizer.json. Source of its fields: what tokenizers' `Tokenizer.save` writes for a WordLevel model."""
    added = [
        {"id": vocabulary[name], "content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for name in sorted(set(names.values()), key=vocabulary.__getitem__)
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": names["unk_token"]},
    }  # fmt: skip
