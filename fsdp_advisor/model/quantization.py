"""How bitsandbytes stores the frozen weights of a base model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fsdp_advisor.job.adapter_fields import QuantStorage, QuantType

QuantizationMethod = Literal["bnb_4bit", "bnb_8bit"]
ComputeDtype = Literal["bfloat16", "float16", "float32"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The settings of a quantized base. Only `method` applies to 8 bits.

    `nested`: whether the scales of the blocks are quantized too (`bnb_4bit_use_double_quant`). `storage_dtype`: the dtype of the
    tensors that contain the packed weights (`bnb_4bit_quant_storage`). `compute_dtype`: the dtype of a layer's input and of its
    weight in a matrix product.
    """

    method: QuantizationMethod
    quant_type: QuantType = "nf4"
    nested: bool = False
    storage_dtype: QuantStorage = "uint8"
    compute_dtype: ComputeDtype = "bfloat16"

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
        }
        return cls(method="bnb_4bit", **{name: keywords[key] for key, name in names.items() if key in keywords})
