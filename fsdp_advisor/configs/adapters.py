"""Sets the options of adapters and quantized bases, which every reader translates from its consumer's names.

Source: PEFT 0.21, tuners/lora/config.py (`LoraConfig`); transformers 5.23, utils/quantization_config.py (`BitsAndBytesConfig`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from fsdp_advisor.configs.collect import Collector, active, brief, truth
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.adaptation import LORA_LISTS, LORA_OPTIONS, LORA_USUAL

_FLAGS = ("use_dora", "use_rslora")
_ASIDE = ("task_type", "inference_mode", "base_model_name_or_path", "revision")
"""Keywords that change no tensor."""
METHODS = {
    "LoraConfig": "LORA", "AdaLoraConfig": "ADALORA", "AdamssConfig": "ADAMSS", "AdaptionPromptConfig": "ADAPTION_PROMPT",
    "BeftConfig": "BEFT", "BOFTConfig": "BOFT", "C3AConfig": "C3A", "CartridgeConfig": "CARTRIDGE", "CPTConfig": "CPT",
    "DeftConfig": "DEFT", "DeloraConfig": "DELORA", "FourierFTConfig": "FOURIERFT", "FrodConfig": "FROD",
    "GloraConfig": "GLORA", "GraloraConfig": "GRALORA", "HiraConfig": "HIRA", "HRAConfig": "HRA", "IA3Config": "IA3",
    "LilyConfig": "LILY", "LNTuningConfig": "LN_TUNING", "LoHaConfig": "LOHA", "LoKrConfig": "LOKR", "MissConfig": "MISS",
    "OFTConfig": "OFT", "ShiraConfig": "SHIRA", "PromptTuningConfig": "PROMPT_TUNING",
    "MultitaskPromptTuningConfig": "MULTITASK_PROMPT_TUNING", "OSFConfig": "OSF", "PromptEncoderConfig": "P_TUNING",
    "PeanutConfig": "PEANUT", "PolyConfig": "POLY", "PrefixTuningConfig": "PREFIX_TUNING", "PsoftConfig": "PSOFT",
    "PveraConfig": "PVERA", "RandLoraConfig": "RANDLORA", "RoadConfig": "ROAD", "ShadowConfig": "SHADOW",
    "SupertuningConfig": "SUPERTUNING", "TinyLoraConfig": "TINYLORA", "TrainableTokensConfig": "TRAINABLE_TOKENS",
    "UniLoraConfig": "UNILORA", "VBLoRAConfig": "VBLORA", "VeraConfig": "VERA", "WaveFTConfig": "WAVEFT",
    "XLoraConfig": "XLORA",
}  # fmt: skip
"""Class of a PEFT configuration -> PEFT's name of the method."""
_EXPRESSION = re.compile(r"[*+?^$()\[\]|\\]")


def set_lora(found: Collector, config: Mapping[str, Any]) -> None:
    """Set the options of a LoRA adapter from keywords of LoraConfig. If no options can express the configuration, set `peft_config` to
    it.
    """
    values = {name: value for name, value in config.items() if value is not None and name not in _ASIDE}
    values = {name: value for name, value in values.items() if LORA_USUAL.get(name) != value}
    expression = isinstance(values.get("target_modules"), str) and _EXPRESSION.search(values["target_modules"])
    if expression or set(values) - set(LORA_OPTIONS):
        set_peft_config(found, "LORA", values)
        return
    found.options["use_peft"] = True
    for name, value in values.items():
        found.options[LORA_OPTIONS[name]] = (
            truth(value) if name in _FLAGS else _names(found, name, value) if name in LORA_LISTS else value
        )


def set_peft_config(found: Collector, method: str, values: Mapping[str, Any]) -> None:
    """Set `peft_config` to a configuration of any method."""
    kept = {name: value for name, value in values.items() if name not in _ASIDE and value is not None}
    found.options["peft_config"] = json.dumps({"peft_type": method, **kept}, default=list, sort_keys=True)


def _names(found: Collector, keyword: str, value: object) -> str:
    """The names in the value of a keyword of LoraConfig. Raises UsageError for another value."""
    if not isinstance(value, str | list | tuple):
        raise UsageError(f"{found.file}: {keyword} is {brief(value)}, not a list of names", hint="correct the file")
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


def set_adapted_constants(found: Collector, constants: Mapping[str, Any]) -> None:
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
