"""The options about what is trained: adapters, frozen parameters, and how the base is stored.

The names are those of TRL's ModelConfig, the meanings those of PEFT 0.21 and of transformers' BitsAndBytesConfig.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.fields import Rule

GROUP = "Adapters"
rule = partial(Rule, group=GROUP)
MAX_NAMES = 4096
MAX_CONFIG = 65_536
"""The largest accepted number of characters of an adapter_config.json."""

StoredDtype = Literal["auto", "float32", "bfloat16", "float16"]
QuantType = Literal["nf4", "fp4"]
QuantStorage = Literal["uint8", "bfloat16", "float16", "float32"]


LORA_KERNELS = ("mlp", "qkv", "o", "embedding")
"""The parts of a model for whose adapters axolotl has kernels."""


def read_lora_kernels(text: str) -> str | None:
    """The canonical text of `lora_kernels`; None if it names other parts.

    >>> read_lora_kernels("o, MLP"), read_lora_kernels("none"), read_lora_kernels("attention")
    ('mlp,o', 'none', None)
    """
    text = text.lower()
    if text in ("auto", "none"):
        return text
    parts = {part.strip() for part in text.split(",")}
    return ",".join(part for part in LORA_KERNELS if part in parts) if parts <= {*LORA_KERNELS} else None


def read_adapter_config(text: str) -> str | None:
    """The text of an adapter_config.json with sorted keys; None if `text` is not a JSON object.

    >>> read_adapter_config('{"r": 8, "peft_type": "LORA"}'), read_adapter_config("adapter_config.json")
    ('{"peft_type": "LORA", "r": 8}', None)
    """
    try:
        values = json.loads(text)
    except ValueError:
        return None
    if not isinstance(values, dict) or not isinstance(values.get("peft_type"), str):
        return None
    return json.dumps(values, sort_keys=True)


def with_files_read(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options with `peft_config` replaced by the text of the file (or directory) that it names. Raises UsageError.

    For the command line and Python. A server accepts only the text itself.
    """
    values = dict(given)
    config = values.get("peft_config")
    if isinstance(config, str | Path) and not str(config).lstrip().startswith("{"):
        path = Path(config)
        path = path / "adapter_config.json" if path.is_dir() else path
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"{config} cannot be read: {error}", hint="peft_config is an adapter_config.json"
            ) from error
        if read_adapter_config(text) is None:
            raise UsageError(f"{config} is not an adapter_config.json", hint="it is JSON with the key peft_type")
        values["peft_config"] = text
    return values


UsePeft = Annotated[bool, rule("train LoRA adapters on a frozen base model")]
LoraR = Annotated[int, rule("the rank of the adapters", ge=1, le=65_536)]
LoraAlpha = Annotated[int, rule("the scale of the adapters, for exported files; it changes no figure", ge=1, le=10**6)]
LoraDropout = Annotated[float, rule("the dropout rate in front of the adapters", ge=0, lt=1)]
LoraTargetModules = Annotated[
    str | None,
    rule(
        "the modules that get adapters: names separated by commas, or all-linear",
        metavar="NAMES",
        default="PEFT's for the architecture",
        max_length=MAX_NAMES,
    ),
]
LoraTargetParameters = Annotated[
    str | None,
    rule(
        "the parameters that get adapters directly, such as weights of experts: names separated by commas",
        metavar="NAMES",
        max_length=MAX_NAMES,
    ),
]
LoraModulesToSave = Annotated[
    str | None,
    rule(
        "the modules that are trained in full, as copies: names separated by commas",
        metavar="NAMES",
        max_length=MAX_NAMES,
    ),
]
UseDora = Annotated[bool, rule("train the magnitude and the direction of weights separately (DoRA)")]
UseRslora = Annotated[bool, rule("scale adapters by the root of their rank (rank-stabilized LoRA)")]
LoraKernels = Annotated[
    str,
    rule(
        "the parts of the model whose adapters run in axolotl's kernels: some of mlp, qkv, o and embedding, separated by commas; none; "
        "or auto, axolotl's choice: all, but none on a base in 8 bits",
        metavar="PARTS",
        max_length=32,
        word=read_lora_kernels,
        example="auto, none, or parts such as mlp,qkv,o",
    ),
]
PeftConfig = Annotated[
    str | None,
    rule(
        "a file adapter_config.json of any PEFT method, instead of the options of LoRA",
        metavar="FILE",
        max_length=MAX_CONFIG,
        word=read_adapter_config,
        json=True,
        example="the text of an adapter_config.json",
    ),
]
Freeze = Annotated[
    tuple[str, ...],
    rule(
        "the parameters that are not trained, by patterns of their names: model.embed_tokens, visual.*",
        metavar="PATTERN",
        min_length=1,
        max_length=256,
    ),
]
Dtype = Annotated[
    StoredDtype,
    rule(
        "the dtype in which the weights of the model are stored; auto follows precision and framework",
        group="Training",
        synonyms={"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"},
        not_modelled=("float8",),
    ),
]
LoadIn4bit = Annotated[bool, rule("keep the base model in 4 bits with bitsandbytes (QLoRA)")]
LoadIn8bit = Annotated[bool, rule("keep the base model in 8 bits with bitsandbytes")]
Bnb4bitQuantType = Annotated[QuantType, rule("the data type of a base in 4 bits")]
UseBnbNestedQuant = Annotated[bool, rule("quantize the scales of a base in 4 bits too")]
Bnb4bitQuantStorage = Annotated[
    QuantStorage, rule("the dtype that holds the packed weights; FSDP shards only floating-point ones")
]
QuantizeMoeExperts = Annotated[
    bool,
    rule("pack experts that are 3-D parameters in 4 bits too, as axolotl can; bitsandbytes packs linear layers alone"),
]
