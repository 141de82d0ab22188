"""What Python code does to its model, whichever loop trains it: loading, adapters, checkpoints, the length of samples, its head."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_advisor.configs.adapters import (
    METHODS,
    has_adapters,
    is_quantized,
    set_lora,
    set_peft_config,
    set_quantization,
)
from fsdp_advisor.configs.checkpointing import set_reentrant
from fsdp_advisor.configs.collect import Collector
from fsdp_advisor.configs.python_literals import is_none, keywords_of, known_keywords


def _loading(call: ast.Call, variables: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `from_pretrained`, with the checkpoint's dtype if none is given. Source: transformers 5.23."""
    names = {keyword.arg for keyword in call.keywords}
    return ({} if names & {"dtype", "torch_dtype", None} else {"dtype": "auto"}) | keywords_of(call, variables)


def _loads_a_model(call: ast.Call) -> bool:
    """Whether a call of `from_pretrained` loads a model, and not a tokenizer, a processor or an adapter."""
    name = ast.unparse(call.func)
    return not any(word in name for word in ("Tokenizer", "Processor", "Config.", "FeatureExtractor", "Peft"))


def _model(nodes: Mapping[str, Sequence[ast.Call]], variables: Mapping[str, Any]) -> str | None:
    """The name of the model that the code loads, or that it passes to a TRL trainer."""
    loads = [call for call in nodes.get("from_pretrained", ()) if _loads_a_model(call)]
    candidates = [call.args[0] for call in loads if call.args]
    candidates += [keyword.value for call in loads for keyword in call.keywords if keyword.arg in _MODEL_KEYWORDS]
    trainers = [call for name, calls in nodes.items() if name.endswith("Trainer") for call in calls]
    candidates += [keyword.value for call in trainers for keyword in call.keywords if keyword.arg == "model"]
    candidates += [call.args[0] for call in trainers if call.args]
    if "from_config" in nodes:
        loads = [call for call in nodes.get("from_pretrained", ()) if "Config." in ast.unparse(call.func)]
        candidates += [call.args[0] for call in loads if call.args]
    for node in candidates:
        is_variable = isinstance(node, ast.Name | ast.Attribute)
        value = variables.get(ast.unparse(node)) if is_variable else getattr(node, "value", None)
        if isinstance(value, str):
            return value
    return None


_MODEL_KEYWORDS = ("pretrained_model_name_or_path", "model_name")
"""Arguments of `from_pretrained` that name the model."""

LOADING = ("dtype", "torch_dtype", "attn_implementation", "experts_implementation")
"""Arguments of `from_pretrained` that a reader of the Trainer's arguments knows."""


def model_keys(nodes: Mapping[str, Sequence[ast.Call]], variables: Mapping[str, Any]) -> dict[str, Any]:
    """The model that the code loads and the configuration of its adapters, as keys of a configuration file."""
    loads = [_loading(call, variables) for call in nodes.get("from_pretrained", ()) if _loads_a_model(call)]
    keys = {key: value for key, value in (loads[0] if loads else {}).items() if key in LOADING}
    if (model := _model(nodes, variables)) is not None:
        keys["model_name_or_path"] = model
    if (method := _method(nodes)) is not None:
        shown = keywords_of(nodes[method][0], variables)
        keys[method] = {key: value for key, value in shown.items() if key not in ("bias", "task_type")}
    return keys


def _method(nodes: Mapping[str, Sequence[ast.Call]]) -> str | None:
    """The class of a PEFT configuration that the code creates."""
    return next((name for name in METHODS if name in nodes), None)


def read_model(
    found: Collector, tree: ast.Module, nodes: Mapping[str, Sequence[ast.Call]], variables: Mapping[str, Any]
) -> None:
    """Set the options of what the code does to its model, and report what is not known. `found` has the keys of `model_keys`."""
    calls = {name: keywords_of(each[0], variables) for name, each in nodes.items()}
    method = _method(nodes)
    if method is not None:
        found.take(method)
    _set_adapters(found, calls, method)
    _read_unsloth(found, nodes, variables)
    _set_checkpoints(found, tree, nodes, variables)
    _assume_length(found, nodes, variables)
    _report_head(found, nodes)
    if not has_adapters(found.options) and (text := _unread_adapters(nodes)) is not None:
        found.omits(f"{text} (the code has no configuration of a known PEFT method; the estimate has no adapters)")
    if "parse_args" in nodes and any("." in name for name in variables):
        found.assume("defaults of the script's own arguments, which a command line may change")
    for name in (method, "BitsAndBytesConfig"):
        if name is not None and name in nodes:
            report_computed(found, f" of {name}", nodes[name][0], variables)


def report_computed(found: Collector, of: str, call: ast.Call, variables: Mapping[str, Any]) -> None:
    """Report the keywords of a call whose values are not known. `of`: words for the call."""
    names = [k.arg or f"**{ast.unparse(k.value)}" for k in call.keywords if not known_keywords([k], variables)]
    if names:
        found.omits(f"arguments{of} that the code computes: {', '.join(names)}")


def _set_adapters(found: Collector, calls: Mapping[str, Mapping[str, Any]], method: str | None) -> None:
    """Set options from configurations of PEFT and bitsandbytes that the code creates. `calls`: class -> the literal keywords of its
    call. `method`: the class of the PEFT configuration.
    """
    if method == "LoraConfig":
        set_lora(found, {"r": 8, "lora_alpha": 8, **calls[method]})
    elif method is not None:
        set_peft_config(found, METHODS[method], calls[method])
    if calls.get("get_peft_model", {}).get("autocast_adapter_dtype") is False:
        found.omits("autocast_adapter_dtype=False (adapters in the base's dtype; the estimate has them in fp32)")
    if "BitsAndBytesConfig" in calls:
        set_quantization(found, calls["BitsAndBytesConfig"])


def _unread_adapters(nodes: Mapping[str, Sequence[ast.Call]]) -> str | None:
    """The first call that gives the model adapters, or the argument for a trainer that does; None if there is none."""
    for call in (*nodes.get("get_peft_model", ()), *nodes.get("from_pretrained", ())):
        name = ast.unparse(call.func)
        if name.endswith("get_peft_model") or ("Peft" in name and keywords_of(call, {}).get("is_trainable")):
            return f"{name}(...)"
    keywords = [k for calls in nodes.values() for call in calls for k in call.keywords if k.arg == "peft_config"]
    return next((f"peft_config={ast.unparse(k.value)}" for k in keywords if not is_none(k.value)), None)


_CHECKPOINTS = ("activation_checkpointing_enable", "gradient_checkpointing_enable", "prepare_model_for_kbit_training")
"""Functions that switch on the checkpoints of a model."""


def _set_checkpoints(
    found: Collector, tree: ast.Module, nodes: Mapping[str, Sequence[ast.Call]], variables: Mapping[str, Any]
) -> None:
    """Set the checkpointing that the code itself switches on. That of the Trainer's arguments, which comes later, replaces it.

    PEFT's `prepare_model_for_kbit_training` switches it on for a quantized base, and gives no `use_reentrant`, which is true in torch 2.13.
    Source: transformers 5.23, modeling_utils.py, `_activation_checkpointing_enable`; peft 0.21, utils/other.py.
    """
    if "Trainer" in found.checkpoints:
        return
    branches = [
        node for node in ast.walk(tree) if isinstance(node, ast.If) and "checkpointing" in ast.unparse(node.test)
    ]
    of_arguments = {id(node) for branch in branches for node in ast.walk(branch)}  # the arguments decide
    calls = [
        (call.lineno, name, keywords_of(call, variables))
        for name in _CHECKPOINTS
        for call in nodes.get(name, ())
        if id(call) not in of_arguments
    ]
    prepares = "prepare_model_for_kbit_training"
    if not is_quantized(found.options):
        calls = [call for call in calls if call[1] != prepares]
    calls = [call for call in calls if call[2].get("use_gradient_checkpointing") is not False]
    if not calls:
        return
    _, name, keywords = max(calls, key=lambda call: call[0])
    every = keywords.get("every_n_layers", 1)
    found.options["activation_checkpointing"] = "full" if every == 1 else f"every-{every}"
    given = next((value for key, value in keywords.items() if key.endswith("checkpointing_kwargs")), None)
    if (given or ({} if name == prepares else {"use_reentrant": False})).get("use_reentrant", True):
        set_reentrant(found)
    found.assume(f"activation checkpointing, because the code calls {name}")


def _assume_length(found: Collector, nodes: Mapping[str, Sequence[ast.Call]], variables: Mapping[str, Any]) -> None:
    """Assume the length to which the code's tokenizer cuts samples, unless the arguments have a length."""
    calls = [keywords_of(call, variables) for named in nodes.values() for call in named]
    lengths = {keys["max_length"] for keys in calls if keys.get("truncation") and type(keys.get("max_length")) is int}
    if len(lengths) == 1:
        length = lengths.pop()
        found.default("seq_len", length, f"{length} tokens, to which the code's tokenizer cuts samples")


_HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")
"""Ends of the names of classes whose heads are not those of the models that the catalog has."""


def _report_head(found: Collector, nodes: Mapping[str, Sequence[ast.Call]]) -> None:
    """Report a class with another head than the catalog's, or without one. TRL's reward trainer is estimated with its own."""
    classes = [ast.unparse(call.func).split(".")[-2:][0] for call in nodes.get("from_pretrained", ())]
    if "AutoModel" in classes:
        found.omits(
            "AutoModel, a model without a head: the estimate has the head of the model's usual class and its loss, which can need much"
            " more; rehearse runs the code's own loss"
        )
    named = next((name for name in classes if name.endswith(_HEADS)), None)
    if named is not None and found.options.get("task") != "reward":
        found.omits(
            f"{named}: the estimate has the head and the loss of the model's usual class, whose logits are of the whole vocabulary;"
            " a directory whose config.json names such a class in architectures is estimated with its head"
        )


_OF_UNSLOTH = ("FastLanguageModel", "FastModel", "FastVisionModel")
_LORA_OF_UNSLOTH = ("r", "target_modules", "lora_alpha", "lora_dropout", "use_rslora", "modules_to_save")


def _read_unsloth(found: Collector, nodes: Mapping[str, Sequence[ast.Call]], variables: Mapping[str, Any]) -> None:
    """Set what Unsloth's loader states: the length, the base in 4 bits, the adapters. Source: unsloth, models/llama.py."""
    loads = [call for call in nodes.get("from_pretrained", ()) if ast.unparse(call.func).split(".")[0] in _OF_UNSLOTH]
    if not loads:
        return
    loading = keywords_of(loads[0], variables)
    if type(loading.get("max_seq_length")) is int:
        found.options.setdefault("seq_len", loading["max_seq_length"])
    if loading.get("load_in_8bit"):
        set_quantization(found, {"load_in_8bit": True})
    elif loading.get("load_in_4bit", True) and not loading.get("full_finetuning"):
        set_quantization(found, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True})
    for call in nodes.get("get_peft_model", ()):
        adapters = keywords_of(call, variables)
        set_lora(found, {"r": 16, **{key: adapters[key] for key in _LORA_OF_UNSLOTH if key in adapters}})
    found.omits("Unsloth's kernels, loss and checkpointing; the estimate is of transformers' code")
