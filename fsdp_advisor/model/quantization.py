"""How a frozen base model stores its weights: bitsandbytes' settings, or those of a GPTQ or AWQ checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_advisor.job.adapter_fields import QuantStorage, QuantType

QuantizationMethod = Literal["bnb_4bit", "bnb_8bit"]
PACKED_NOTE = "training uses unquantized weights; --use-peft trains adapters on the packed weights of this checkpoint"
IGNORED_NOTE = (
    "the format of this checkpoint's weights is ignored: training uses unquantized weights, and QLoRA (--use-peft --load-in-4bit)"
    " quantizes them itself"
)
ComputeDtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The settings of a base that bitsandbytes quantizes while it is loaded. In 8 bits only `method` applies. (`packed_checkpoint` returns
    those of GPTQ and AWQ.)

    `nested`: whether the scales of the blocks are quantized too (`bnb_4bit_use_double_quant`). `storage_dtype`: the dtype of the
    tensors that contain the packed weights (`bnb_4bit_quant_storage`). `compute_dtype`: the dtype of a layer's input and of its
    weight in a matrix product. `experts`: whether experts that are 3-D parameters are packed too.
    """

    method: QuantizationMethod
    quant_type: QuantType = "nf4"
    nested: bool = False
    storage_dtype: QuantStorage = "uint8"
    compute_dtype: ComputeDtype = "bfloat16"
    experts: bool = False

    @classmethod
    def from_keywords(cls, keywords: Mapping[str, Any]) -> Quantization:
        """The settings in the keywords of transformers' BitsAndBytesConfig. Keywords that are not given have this class's defaults.

        >>> Quantization.from_keywords({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}).nested
        True
        """
        if keywords.get("load_in_8bit"):
            return cls(method="bnb_8bit")
        names = {
            "bnb_4bit_quant_type": "quant_type",
            "bnb_4bit_use_double_quant": "nested",
            "bnb_4bit_quant_storage": "storage_dtype",
            "bnb_4bit_compute_dtype": "compute_dtype",
            "quantize_moe_experts": "experts",
        }
        return cls(method="bnb_4bit", **{name: keywords[key] for key, name in names.items() if key in keywords})


def packed_checkpoint(config: object) -> dict[str, Any] | None:
    """The settings of a `quantization_config` that decide memory, for a GPTQ or AWQ checkpoint that can be trained with adapters; None
    for other checkpoints.

    Its keys are those of transformers' GPTQConfig and AwqConfig. Only AWQ's format `gemm` trains.

    >>> packed_checkpoint({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True})
    {'quant_method': 'gptq', 'bits': 4, 'group_size': 128}
    """
    if not isinstance(config, Mapping):
        return None
    method, bits, group = config.get("quant_method"), config.get("bits", 4), config.get("group_size", 128)
    known = {"gptq": (2, 3, 4, 8), "awq": (4,)}.get(str(method), ())
    has_format = method == "gptq" or str(config.get("version", "gemm")).lower() == "gemm"
    if bits not in known or not isinstance(group, int) or not (group == -1 or group >= 16) or not has_format:
        return None
    lists = ("modules_in_block_to_quantize", "modules_to_not_convert")
    named = {key: value for key in lists if isinstance(value := config.get(key), list)}
    return {"quant_method": method, "bits": bits, "group_size": group, **named}


def is_packed_checkpoint(keywords: Mapping[str, Any]) -> bool:
    """Whether the keywords of a quantized base are those of `packed_checkpoint`."""
    return "quant_method" in keywords
