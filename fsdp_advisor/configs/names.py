"""Names that consumers give to optimizers, attention implementations and precisions, as options of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from fsdp_advisor.configs.collect import Collector
from fsdp_advisor.job.request import Attention, OptimizerName

_OPTIMIZERS: dict[str, OptimizerName] = {
    **{name: name for name in get_args(OptimizerName)},
    "adamw": "adamw_torch",
    "adamw_hf": "adamw_torch",
    "adam": "adamw_torch",
    "torch_adam": "adamw_torch",
    "adamw_8bit": "adamw_bnb_8bit",
    "adamw8bit": "adamw_bnb_8bit",
}
"""`adamw_8bit` is the Trainer's other name of `adamw_bnb_8bit`. Source: transformers/training_args.py, OptimizerNames (5.23)."""

_ATTENTION: dict[str, Attention] = {
    **{name: name for name in get_args(Attention)},
    "fa2": "flash_attention_2",
    "flash_attention": "flash_attention_2",
    "disabled": "eager",
    "auto": "sdpa",
}


_OWNERS = {
    "llama-": "meta-llama", "meta-llama-": "meta-llama", "qwen": "Qwen", "mistral": "mistralai", "mixtral": "mistralai",
    "gemma": "google", "phi-": "microsoft", "deepseek": "deepseek-ai", "codellama": "codellama",
}  # fmt: skip
"""Owners of models on the Hugging Face hub, by the beginning of the model's name in lower case."""


def hub_name(folder: str) -> str:
    """The hub's name of a model whose checkpoint is in a folder of that name; the folder's name if its owner is unknown.

    >>> hub_name("Llama-3.1-8B"), hub_name("my-model")
    ('meta-llama/Llama-3.1-8B', 'my-model')
    """
    owner = next((owner for start, owner in _OWNERS.items() if folder.lower().startswith(start)), None)
    return folder if owner is None else f"{owner}/{folder}"


def set_optimizer(found: Collector, key: str, arguments: Mapping[str, Any] | str | None = None) -> None:
    """Set `optim` from a key of the file. `arguments` are the optimizer's: SGD may have a momentum."""
    name = found.peek(key)
    if not isinstance(name, str):
        return
    plain = name.rsplit(".", 1)[-1].lower()
    optim = _OPTIMIZERS.get(plain)
    if optim is None:
        found.lacks(key, "the optimizer is not modelled; the estimate assumes adamw_torch_fused")
        return
    found.take(key)
    if optim == "sgd" and _has_momentum(arguments):
        optim = "sgd_momentum"
    if plain == "adamw" and isinstance(arguments, Mapping) and arguments.get("fused") in (True, "True"):
        optim = "adamw_torch_fused"
    found.options["optim"] = optim


def _has_momentum(arguments: Mapping[str, Any] | str | None) -> bool:
    if isinstance(arguments, str):
        arguments = dict(part.strip().partition("=")[::2] for part in arguments.split(","))
    return bool(arguments) and float((arguments or {}).get("momentum") or 0) > 0


def set_attention(found: Collector, key: str) -> None:
    """Set `attention` from a key of the file."""
    name = found.peek(key)
    if not isinstance(name, str):
        return
    known = _ATTENTION.get(name.lower())
    if known is None:
        found.lacks(key, "the attention implementation is not modelled; the estimate assumes sdpa")
        return
    found.take(key)
    found.options["attention"] = known
