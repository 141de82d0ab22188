"""Adapters and quantized bases, whose options each consumer names in its own way.

Source: PEFT 0.21, tuners/lora/config.py (`LoraConfig`); transformers 5.23, utils/quantization_config.py (`BitsAndBytesConfig`); TRL 1.16,
trainer/model_config.py; axolotl 0.19, utils/schemas/peft.py, loaders/{adapter,model}.py; LLaMA-Factory 0.9.5,
hparams/{finetuning,model}_args.py, model/adapter.py, model/model_utils/quantization.py; torchtune 0.6.1,
models/llama3_1/_component_builders.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fsdp_advisor.configs.collect import Collector, active, truth
from fsdp_advisor.job.adaptation import LORA_LISTS, LORA_OPTIONS, LORA_USUAL

_FLAGS = ("use_dora", "use_rslora")
_ASIDE = ("task_type", "inference_mode", "base_model_name_or_path", "revision")
"""Keywords that change no tensor."""
METHODS = {
    "LoraConfig": "LORA", "AdaLoraConfig": "ADALORA", "IA3Config": "IA3", "LoHaConfig": "LOHA", "LoKrConfig": "LOKR",
    "VeraConfig": "VERA", "OFTConfig": "OFT", "BOFTConfig": "BOFT", "LNTuningConfig": "LN_TUNING", "FourierFTConfig": "FOURIERFT",
    "RandLoraConfig": "RANDLORA", "PrefixTuningConfig": "PREFIX_TUNING", "PromptTuningConfig": "PROMPT_TUNING",
    "PromptEncoderConfig": "P_TUNING",
}  # fmt: skip
"""PEFT's name of a method, by the class of its configuration."""
_EXPRESSION = re.compile(r"[*+?^$()\[\]|\\]")
_MODULES_OF_TORCHTUNE = {"output_proj": "o_proj", "w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def set_lora(found: Collector, config: Mapping[str, Any]) -> None:
    """Set the options of a LoRA adapter from keywords of LoraConfig. A configuration that has no options becomes a `peft_config`."""
    values = {name: value for name, value in config.items() if value is not None and name not in _ASIDE}
    values = {name: value for name, value in values.items() if LORA_USUAL.get(name) != value}
    expression = isinstance(values.get("target_modules"), str) and _EXPRESSION.search(values["target_modules"])
    if expression or set(values) - set(LORA_OPTIONS):
        set_peft_config(found, "LORA", values)
        return
    found.options["use_peft"] = True
    for name, value in values.items():
        found.options[LORA_OPTIONS[name]] = (
            truth(value) if name in _FLAGS else _names(value) if name in LORA_LISTS else value
        )


def set_peft_config(found: Collector, method: str, values: Mapping[str, Any]) -> None:
    """Set `peft_config` to a configuration of any method."""
    kept = {name: value for name, value in values.items() if name not in _ASIDE and value is not None}
    found.options["peft_config"] = json.dumps({"peft_type": method, **kept}, default=list, sort_keys=True)


def _names(value: Sequence[str] | str) -> str:
    names = value.replace(",", " ").split() if isinstance(value, str) else [str(name) for name in value]
    return ",".join("all-linear" if name == "all" else name for name in names)


def set_quantization(found: Collector, config: Mapping[str, Any]) -> None:
    """Set the options of a base in 4 or 8 bits from keywords of BitsAndBytesConfig."""
    options = found.options
    if truth(config.get("load_in_8bit") or False):
        options["load_in_8bit"] = True
    elif truth(config.get("load_in_4bit") or False):
        options["load_in_4bit"] = True
        options["bnb_4bit_quant_type"] = config.get("bnb_4bit_quant_type") or "fp4"
        options["use_bnb_nested_quant"] = truth(config.get("bnb_4bit_use_double_quant") or False)
        storage = str(config.get("bnb_4bit_quant_storage") or "uint8").removeprefix("torch.")
        options["bnb_4bit_quant_storage"] = storage


def read_trl(found: Collector) -> None:
    """The options of TRL's ModelConfig, which are those of a request but for some defaults."""
    if found.flag("use_peft"):
        config = {
            name: found.take(key)
            for name, key in LORA_OPTIONS.items()
            if found.peek(key) not in (None, "None") or key == "lora_dropout"
        }
        if config["lora_dropout"] is None:
            config["lora_dropout"] = 0.05
            found.assume("dropout 0.05 in front of adapters, TRL's default of lora_dropout")
        set_lora(found, config)
    for key, keyword in (("load_in_4bit", "load_in_4bit"), ("load_in_8bit", "load_in_8bit")):
        if not found.flag(key):
            continue
        found.omits(
            "TRL keeps adapters on a quantized base in bf16 and does not store other weights in fp32, as estimated"
        )
        config = {keyword: True, "bnb_4bit_quant_type": found.take("bnb_4bit_quant_type") or "nf4"}
        config["bnb_4bit_use_double_quant"] = found.flag("use_bnb_nested_quant")
        config["bnb_4bit_quant_storage"] = found.take("bnb_4bit_quant_storage")
        set_quantization(found, config)


def read_axolotl(found: Collector) -> None:
    """`adapter` with the keys that begin with lora_ and peft_. axolotl nests the scales of 4 bits, which it stores as bf16."""
    adapter = found.peek("adapter")
    if adapter in (None, "", False):
        return
    if adapter not in ("lora", "qlora"):
        found.lacks("adapter", "an adapter that is not modelled; the estimate trains every parameter")
        return
    found.take("adapter")
    config = {
        "r": found.take("lora_r"),
        "lora_alpha": found.take("lora_alpha"),
        "lora_dropout": found.take("lora_dropout") or 0.0,
        "target_modules": found.take("lora_target_modules"),
        "target_parameters": found.take("lora_target_parameters") or None,
        "modules_to_save": found.take("lora_modules_to_save") or None,
        "use_dora": found.take("peft_use_dora"),
        "use_rslora": found.take("peft_use_rslora"),
        "layers_to_transform": found.take("peft_layers_to_transform"),
        "layers_pattern": found.take("peft_layers_pattern"),
        "exclude_modules": found.take("lora_exclude_modules"),
        "trainable_token_indices": found.take("peft_trainable_token_indices"),
        "rank_pattern": found.take("lora_rank_pattern"),
    }
    if found.flag("lora_target_linear"):
        config["target_modules"] = "all-linear"
    set_lora(found, config)
    if found.options.get("mixed") == "bf16" or "mixed" in found.defaults:
        found.options["dtype"] = "bfloat16"
    given = found.take("bnb_config_kwargs")
    config = {"load_in_4bit": found.flag("load_in_4bit"), "load_in_8bit": found.flag("load_in_8bit")}
    usual = {
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_quant_storage": "bfloat16",
    }
    set_quantization(found, {**config, **usual, **(given if isinstance(given, Mapping) else {})})


def read_llamafactory(found: Collector) -> None:
    """Read LLaMA-Factory's `finetuning_type`, and its keys of LoRA and quantization."""
    kind = found.peek("finetuning_type")
    if kind not in (None, "lora", "full"):
        found.lacks("finetuning_type", "which layers are trained depends on their number: name the others with freeze")
    elif kind == "full":
        found.take("finetuning_type")
    if kind not in (None, "lora"):
        return
    found.take("finetuning_type") if kind else found.assume("LoRA, LLaMA-Factory's default of finetuning_type")
    rank = found.number("lora_rank") or 8
    config = {
        "r": rank,
        "lora_alpha": found.take("lora_alpha") or 2 * rank,
        "lora_dropout": found.take("lora_dropout") or 0.0,
        "target_modules": found.take("lora_target") or "all",
        "modules_to_save": found.take("additional_target"),
        "use_dora": found.take("use_dora"),
        "use_rslora": found.take("use_rslora"),
    }
    if config["target_modules"] in ("all", ["all"]):
        config["target_modules"] = "all-linear"
    set_lora(found, config)
    if truth(found.peek("bf16") or False):
        found.options["dtype"] = "bfloat16"
    method = str(found.peek("quantization_method") or "bnb").lower()
    bits = found.peek("quantization_bit")
    if bits is None or method not in ("bnb", "bitsandbytes"):
        return
    found.take("quantization_method")
    found.number("quantization_bit")
    nested = found.peek("double_quantization")
    found.take("double_quantization")
    config = {
        f"load_in_{bits}bit": True,
        "bnb_4bit_quant_type": found.take("quantization_type") or "nf4",
        "bnb_4bit_use_double_quant": nested is None or truth(nested),
        "bnb_4bit_quant_storage": "bfloat16" if truth(found.peek("bf16") or False) else "float32",
    }
    set_quantization(found, config)


def read_torchtune(found: Collector, builder: str) -> None:
    """Read the LoRA options of a torchtune model builder, such as `lora_llama3_8b` or `qlora_llama3_8b`."""
    modules = found.take("model.lora_attn_modules") or ["q_proj", "v_proj"]
    names = [_MODULES_OF_TORCHTUNE.get(str(name), str(name)) for name in modules]
    if truth(found.take("model.apply_lora_to_mlp") or False):
        names += ["gate_proj", "down_proj", "up_proj"]
    if truth(found.take("model.apply_lora_to_output") or False):
        names.append("lm_head")
    config = {
        "r": found.number("model.lora_rank") or 8,
        "lora_alpha": found.take("model.lora_alpha") or 16,
        "lora_dropout": found.take("model.lora_dropout") or 0.0,
        "target_modules": names,
        "use_dora": truth(found.take("model.use_dora") or False) or "dora" in builder.split("_")[0],
    }
    set_lora(found, config)
    found.omits("torchtune stores adapters in dtype; the estimate has them in fp32, as PEFT")
    if builder.startswith("q") or truth(found.take("model.quantize_base") or False):
        set_quantization(found, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True})
        found.omits("torchao's NF4; the estimate has bitsandbytes' 4 bits")


def read_constants(found: Collector, constants: Mapping[str, Any]) -> None:
    """The adapter, the quantized base and the frozen parameters of an exported script, which are constants."""
    for name in ("ADAPTER", "QUANTIZATION", "FREEZE"):
        found.take(name)
    adapter = constants.get("ADAPTER")
    if isinstance(adapter, Mapping):
        values = {name: value for name, value in adapter.items() if name != "peft_type"}
        if adapter.get("peft_type") == "LORA":
            set_lora(found, {"r": 8, "lora_alpha": 8, **values})
        else:
            set_peft_config(found, str(adapter.get("peft_type")), values)
    if isinstance(constants.get("QUANTIZATION"), Mapping):
        set_quantization(found, constants["QUANTIZATION"])
    if isinstance(constants.get("FREEZE"), list):
        found.options["freeze"] = tuple(map(str, constants["FREEZE"]))


def read_calls(found: Collector, calls: Mapping[str, Mapping[str, Any]]) -> None:
    """The configurations that Python code makes of PEFT and bitsandbytes. `calls` are literal keywords by the name of the class."""
    name = next((name for name in METHODS if name in calls), None)
    if name == "LoraConfig":
        set_lora(found, {"r": 8, "lora_alpha": 8, **calls[name]})
    elif name is not None:
        set_peft_config(found, METHODS[name], calls[name])
    if "BitsAndBytesConfig" in calls:
        set_quantization(found, calls["BitsAndBytesConfig"])


def has_adapters(options: Mapping[str, Any]) -> bool:
    """Whether options describe adapters."""
    return active(options.get("use_peft")) or bool(options.get("peft_config"))


def is_quantized(options: Mapping[str, Any]) -> bool:
    """Whether options describe a base in 4 or 8 bits."""
    return any(active(options.get(name)) for name in ("load_in_4bit", "load_in_8bit"))


def is_adapter_config(keys: Mapping[str, Any]) -> bool:
    return isinstance(keys.get("peft_type"), str)


def read(file: str, keys: Mapping[str, Any]) -> Collector:
    """The settings of an adapter_config.json."""
    found = Collector(file, "PEFT", keys)
    values = {name: found.take(name) for name in keys if name != "peft_type"}
    set_peft_config(found, str(found.take("peft_type")), values)
    return found
