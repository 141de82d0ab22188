"""Recognizes a configuration that equals a catalog model's in all shapes, so that the model need not be recorded (which needs torch)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fsdp_advisor.model import catalog

_ARCHITECTURES = {
    "causal-lm": ("ForCausalLM", "LMHeadModel"),
    "masked-lm": ("ForMaskedLM",),
    "seq2seq-lm": ("ForConditionalGeneration",),
    "speech-seq2seq": ("ForConditionalGeneration",),
    "image-classification": ("ForImageClassification",),
    "image-text-to-text": ("ForConditionalGeneration",),
}
"""By task, the endings of the names of the classes that train it."""
_NO_SHAPES = re.compile(
    r".*_token_id|.*_eps|rope_theta|initializer_range|initializer_factor|architectures|pretraining_tp|use_cache|unsloth_.*|mtp_.*"
    r"|num_nextn_predict_layers|_name_or_path|torch_dtype|dtype|transformers_version|auto_map|quantization_config|task_specific_params"
    r"|time_step_(?:limit|min|max|floor)|num_logits_to_keep"
)
"""Keys whose values change no shape and no operation of training."""


def entry_of(config: Mapping[str, Any]) -> catalog.Entry | None:
    """The catalog model that a configuration describes; None if there is none, or if a value cannot be compared.

    Two configurations describe one model if all their values are equal, apart from special tokens, rotary constants and the like.
    """
    known = catalog.configurations()
    configs, defaults = known["configs"], known["defaults"]
    wanted = _plain(config, defaults)
    for entry in catalog.entries():
        same_type = entry.model_type == config.get("model_type") and entry.id in configs
        if same_type and _trains(config, entry.task) and _plain(configs[entry.id], defaults) == wanted:
            return entry
    return None


def _trains(config: Mapping[str, Any], task: str) -> bool:
    """Whether the configuration's classes train the task. A configuration without `architectures` is taken for a causal language model."""
    names = config.get("architectures") or ()
    return all(name.endswith(_ARCHITECTURES[task]) for name in names) if names else task == "causal-lm"


def _plain(config: Mapping[str, Any], defaults: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The values that affect shapes, defaults included."""
    values = {**defaults.get(config.get("model_type", ""), {}), **config}
    values = {key: value for key, value in values.items() if not _NO_SHAPES.fullmatch(key)}
    if values.get("use_sliding_window") is False:
        values |= {"sliding_window": None, "max_window_layers": None}
    heads = values.get("num_attention_heads")
    if heads and values.get("hidden_size"):
        values["head_dim"] = values.get("head_dim") or values["hidden_size"] // heads
        values["num_key_value_heads"] = values.get("num_key_value_heads") or heads
    if set(values.get("layer_types") or ()) == {"full_attention"}:
        values["layer_types"] = None
    for key in ("rope_scaling", "rope_parameters"):
        values[key] = _rope(values.get(key))
    plain = {key: _plain(value, defaults) if isinstance(value, dict) else value for key, value in values.items()}
    return {key: value for key, value in plain.items() if value is not None and value != {}}


def _rope(value: Any) -> Any:
    """Rotary settings without the base; None if they are the default ones."""
    if not isinstance(value, dict):
        return value
    kind = value.get("rope_type", value.get("type", "default"))
    rest = {k: v for k, v in value.items() if k not in ("rope_theta", "type", "rope_type")}
    return None if kind == "default" and not rest else {"rope_type": kind, **rest}
