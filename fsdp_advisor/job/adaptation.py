"""The changes made to a model before it trains: adapters, frozen parameters, a quantized base, checkpointing of some layers, and a head
that scores sequences.

An adapted model has its own profile and its own tapes. `Adaptation` identifies it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.checkpointing import every_nth_layer
from fsdp_advisor.job.choices import Precision
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest

CONFIG_KEY = "fsdp_advisor_adaptation"
"""The key of a model's configuration under which its adaptation is kept."""

LORA_OPTIONS = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
    "use_dora": "use_dora",
    "use_rslora": "use_rslora",
}
"""Keyword of PEFT's LoraConfig -> option that sets it, with TRL's name. These options need `use_peft`."""
LORA_LISTS = ("target_modules", "target_parameters", "modules_to_save")
"""The keywords of LoraConfig that are lists of names."""
LORA_USUAL: Mapping[str, Any] = {"bias": "none", "fan_in_fan_out": False, "init_lora_weights": True}
"""Other keywords of LoraConfig with the only values that options can express."""
TASK_TYPES = {"causal-lm": "CAUSAL_LM", "seq2seq-lm": "SEQ_2_SEQ_LM", "sequence-classification": "SEQ_CLS"}
"""PEFT's name of a task, which chooses the class around the model. Other tasks have the class `PeftModel`."""
QUANTIZATION_OPTIONS = ("bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage", "quantize_moe_experts")
"""The options that describe how bitsandbytes stores a base in 4 bits."""

_OF_A_FILE = (
    "base_model_name_or_path", "revision", "auto_mapping", "inference_mode", "peft_version", "runtime_config", "autocast_adapter_dtype",
)  # fmt: skip
"""Keys of an adapter_config.json that describe a saved adapter, not its training, and two that PEFT ignores in a file: `runtime_config`
and `autocast_adapter_dtype`. Source: peft 0.21, config.py, `from_peft_type`; mapping_func.py, `get_peft_model`.
"""
_WITHOUT_EFFECT = (*_OF_A_FILE, "lora_alpha", "alpha_pattern")
"""Keys that change no tensor of a training step."""
_INITIALIZATIONS = ("init_lora_weights", "loftq_config", "eva_config", "corda_config", "lora_ga_config")
"""Keys that choose the first values of adapters. Some of these need the values of the weights, which a recording lacks."""


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """The changes made to a model."""

    peft: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The values of PEFT's adapter_config.json; empty for a model without adapters."""
    freeze: tuple[str, ...] = ()
    """Patterns of the names of parameters that are not trained."""
    quantization: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """The keywords of transformers' BitsAndBytesConfig, and axolotl's `quantize_moe_experts`; or those of the GPTQConfig or AwqConfig of a
    packed checkpoint. Empty for a base in its own dtype.
    """
    prepared: bool = True
    """Whether PEFT's `prepare_model_for_kbit_training` stores the rest of a quantized model in fp32. Without it the rest keeps its
    dtype, and all adapter parameters except DoRA's magnitudes are in bf16. Source: trl 1.16, trainer/sft_trainer.py, `__init__`.
    """
    fp32_adapters: bool = False
    """Whether adapters stay in fp32 although the base is not prepared."""
    checkpoint_every: int = 0
    """N if one of N layers is checkpointed, which is then a separate kind of layer; 0 if all or none are."""
    own_model: str = ""
    """The framework that trains its own model class instead of transformers'; empty for transformers'."""
    reward_head: bool = False
    """Whether the model returns one number per sequence instead of logits: sequence classification with one label."""
    in_one_graph: bool = False
    """Whether the compiler makes one graph of the whole model, so that layers cannot be recorded separately."""

    def __bool__(self) -> bool:
        return self != UNCHANGED

    @property
    def method(self) -> str | None:
        """PEFT's name of the method, such as LORA; None without adapters."""
        return str(self.peft["peft_type"]).upper() if self.peft else None

    @property
    def names_modules(self) -> bool:
        """Whether the settings of the adapters name the modules or parameters that get them."""
        return bool({"target_modules", "target_parameters"} & set(self.peft))

    @property
    def text(self) -> str:
        """The adaptation in words, empty if there is none.

        >>> Adaptation(peft={"peft_type": "LORA", "r": 8}, quantization={"load_in_8bit": True}).text
        'LoRA r=8 on an 8-bit base'
        >>> Adaptation(peft={"peft_type": "LORA", "r": 8, "modules_to_save": ["embed_tokens", "lm_head"]}).text
        'LoRA r=8, and embed_tokens, lm_head in full'
        """
        words = []
        if self.method is not None:
            name = {"LORA": "DoRA" if self.peft.get("use_dora") else "LoRA"}.get(self.method, self.method)
            words.append(name + (f" r={self.peft['r']}" if "r" in self.peft else ""))
        if self.quantization:
            bits = 8 if "load_in_8bit" in self.quantization else self.quantization.get("bits", 4)
            words.append(
                f"on {'an' if bits == 8 else 'a'} {bits}-bit {self.packed_by + ' ' if self.packed_by else ''}base"
            )
        if self.freeze:
            words.append(f"without training {', '.join(self.freeze)}")
        in_full = ", ".join(self.peft.get("modules_to_save") or ())
        return " ".join(words) + (f", and {in_full} in full" if in_full else "")

    @property
    def packed_by(self) -> str:
        """`GPTQ` or `AWQ` if the base is a checkpoint of that format, else empty."""
        return str(self.quantization.get("quant_method", "")).upper()

    def on_checkpoint(self, packed: Mapping[str, Any]) -> Adaptation:
        """The adaptation with the quantization of a GPTQ or AWQ checkpoint, if there are adapters and nothing else quantizes the base."""
        return replace(self, quantization=packed) if packed and self.peft and not self.quantization else self

    def as_dict(self) -> dict[str, Any]:
        """The values as a JSON object."""
        values = {
            f.name: value
            for f in fields(self)
            if (value := getattr(self, f.name)) != f.default or f.name in _ALWAYS_WRITTEN
        }
        as_json: dict[str, Any] = json.loads(json.dumps(values, sort_keys=True))
        return as_json

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Adaptation:
        """The inverse of `as_dict`. Other keys are ignored."""
        known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
        return cls(**{**known, "freeze": tuple(values["freeze"])})


_ALWAYS_WRITTEN = ("peft", "freeze", "quantization")
"""The fields that `as_dict` has even with their defaults. The others came later, so older recordings lack them."""
UNCHANGED = Adaptation()


def adaptation_of(request: EstimateRequest) -> Adaptation:
    """The adaptation that a request describes, empty if it trains the whole model. Raises UsageError if options contradict."""
    peft = _peft_config(request)
    quantization = _quantization(request)
    if quantization and not peft:
        raise UsageError(
            "weights in 4 or 8 bits cannot be trained themselves", hint="train adapters on them: add --use-peft"
        )
    if peft and request.freeze:
        raise UsageError("PEFT freezes the whole base model, so --freeze has no effect", hint="leave --freeze out")
    facts = FRAMEWORKS[request.framework]
    prepared = not (quantization and facts.keeps_quantized_dtypes)
    if facts.own_models:
        if peft or request.freeze:
            raise UsageError(
                f"adapters and frozen parameters are not modelled with {request.framework}",
                hint="--framework torch, trainer or trl have them",
            )
        return Adaptation(own_model=request.framework)
    return Adaptation(
        peft=peft,
        freeze=tuple(sorted(set(request.freeze))),
        quantization=quantization,
        prepared=prepared,
        fp32_adapters=not prepared and facts.keeps_adapter_dtypes,
        checkpoint_every=every_nth_layer(request.activation_checkpointing),
        reward_head=request.task == "reward",
        in_one_graph=_makes_one_graph(request),
    )


def _makes_one_graph(request: EstimateRequest) -> bool:
    """Whether the compiler makes one graph of the model. It does under DDP; FSDP2's hooks break the graph at each unit. `--strategy all`
    of such a job has only DDP.
    """
    return (
        request.compile == "model"
        and request.strategy in ("ddp", "zero1", "all")
        and request.backend in ("auto", "ddp")
    )


def may_adapt(request: EstimateRequest) -> bool:
    """Whether the answer may need an adapted model: the request adapts it, or its search compares methods that do."""
    compares = isinstance(request, RecommendRequest) and request.method == "any"
    return compares or bool(replace(adaptation_of(request), in_one_graph=False))


def launched(request: EstimateRequest) -> Adaptation:
    """As `adaptation_of`, plus values that change no tensor, such as the adapters' scale. Exported files need them."""
    found = adaptation_of(request)
    if request.peft_config is not None:
        values = json.loads(request.peft_config)
        return replace(found, peft={k: v for k, v in values.items() if k not in _OF_A_FILE and v is not None})
    return replace(found, peft={**found.peft, "lora_alpha": request.lora_alpha}) if found.peft else found


def _peft_config(request: EstimateRequest) -> dict[str, Any]:
    described = _changed(request, LORA_OPTIONS.values())
    if request.peft_config is not None:
        if described:
            raise UsageError(
                f"both --peft-config and {described[0]} describe the adapter",
                hint="change the value in the configuration file",
            )
        values = json.loads(request.peft_config)
        if values.get("autocast_adapter_dtype") is False:
            raise UsageError(
                "autocast_adapter_dtype is no key of an adapter_config.json but an argument of get_peft_model: PEFT leaves it out with a "
                "warning, and adapters stay in fp32. Adapters in the base's dtype are not modelled",
                hint="leave it out; PEFT then keeps adapters in fp32, as the estimate does",
            )
        dropped = (*_WITHOUT_EFFECT, *_INITIALIZATIONS)
        return {k: v for k, v in values.items() if k not in dropped and v is not None}
    if not request.use_peft:
        if described:
            raise UsageError(f"{described[0]} needs adapters", hint="add --use-peft")
        return {}
    config = {"peft_type": "LORA"} | {keyword: getattr(request, option) for keyword, option in LORA_OPTIONS.items()}
    config |= {keyword: names(config[keyword]) for keyword in LORA_LISTS}
    return {k: v for k, v in config.items() if v and k not in _WITHOUT_EFFECT}


def _changed(request: EstimateRequest, options: Iterable[str]) -> list[str]:
    """Those of `options` that the user gave, without those at their default if a client may have sent a whole request back, so that every
    option counts as given.
    """
    sent_whole = {"use_peft", "load_in_4bit"} <= request.given
    changed = request.changed_among(options)
    return [name for name in options if name in request.given and (name in changed or not sent_whole)]


def names(text: str | None) -> list[str] | str | None:
    """Names separated by commas as a list for PEFT; `all-linear` and patterns stay text.

    >>> names("q_proj, v_proj"), names("all-linear"), names(None)
    (['q_proj', 'v_proj'], 'all-linear', None)
    """
    if text is None or text == "all-linear":
        return text
    return sorted({name.strip() for name in text.split(",")} - {""})


def _quantization(request: EstimateRequest) -> dict[str, Any]:
    if request.load_in_4bit and request.load_in_8bit:
        raise UsageError(
            "the base is quantized to 4 or to 8 bits, not both", hint="leave out load_in_4bit or load_in_8bit"
        )
    described = _changed(request, QUANTIZATION_OPTIONS)
    if described and not request.load_in_4bit:
        raise UsageError(f"{described[0]} describes a base in 4 bits", hint="add --load-in-4bit")
    if request.load_in_8bit:
        return {"load_in_8bit": True}
    if not request.load_in_4bit:
        return {}
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": request.bnb_4bit_quant_type,
        "bnb_4bit_use_double_quant": request.use_bnb_nested_quant,
        "bnb_4bit_quant_storage": request.bnb_4bit_quant_storage,
        "bnb_4bit_compute_dtype": "float32" if request.precision == "fp32" else "bfloat16",
        **({"quantize_moe_experts": True} if _packs_experts(request) else {}),
    }


def _packs_experts(request: EstimateRequest) -> bool:
    """Whether axolotl packs the experts of a base in 4 bits too. Raises UsageError for a job in which it does not, or is not modelled.

    Source: axolotl 0.19, utils/schemas/config.py, `check_quantize_moe_experts`.
    """
    if not request.quantize_moe_experts:
        return False
    if request.framework != "axolotl":
        raise UsageError("only axolotl packs experts in 4 bits", hint="--framework axolotl")
    if request.lora_target_modules == "all-linear":
        raise UsageError(
            "axolotl does not pack experts if adapters are on all linear layers (lora_target_linear)",
            hint="--lora-target-modules q_proj,k_proj,v_proj,o_proj",
        )
    if request.lora_target_parameters:
        raise UsageError(
            "adapters on packed experts are not modelled",
            hint="leave out --lora-target-parameters or --quantize-moe-experts",
        )
    return True


def may_store_half(adaptation: Adaptation, precision: Precision) -> bool:
    """Whether the base of adapters may be in 16 bits: not if PEFT also trains modules in full, in the base's dtype, and that is float16."""
    return precision != "fp16-mixed" or not adaptation.peft.get("modules_to_save")


def check_dtype(request: EstimateRequest) -> None:
    """Raises UsageError for weights in a dtype that the precision does not have, or that cannot be trained in it. Without autocast the
    dtype of the weights is that of the computation; adapters are in fp32 on a base in bfloat16 (`bf16`) too.

    Source: torch 2.13, amp/grad_scaler.py, `_unscale_grads_`: "Attempting to unscale FP16 gradients."
    """
    if request.dtype == "float16" and request.precision != "fp16-mixed":
        raise UsageError(
            "dtype float16 is for precision fp16-mixed", hint="--precision fp16-mixed, or --dtype bfloat16"
        )
    if (request.precision, request.dtype) == ("fp32", "bfloat16"):
        raise UsageError(
            "precision fp32 has no autocast, so weights in bfloat16 also compute in bfloat16, which is precision bf16",
            hint="--precision bf16, or --precision bf16-mixed for autocast; --dtype auto for weights in fp32",
        )
    if (request.precision, request.dtype) == ("bf16", "float32"):
        raise UsageError(
            "precision bf16 has all weights in bfloat16, not in float32",
            hint="--precision bf16-mixed for float32 weights and computation in bfloat16, or --precision fp32; --dtype auto for bf16",
        )
    if request.dtype == "float16" and not adaptation_of(request).peft:
        raise UsageError(
            "weights in float16 cannot be trained: the gradient scaler of fp16-mixed does not unscale their gradients",
            hint="--dtype float32; or train adapters, which are in fp32: --use-peft",
        )
    if request.dtype == "float16" and not may_store_half(adaptation_of(request), request.precision):
        raise UsageError(
            "modules that PEFT trains in full have the base's dtype, and the gradient scaler of fp16-mixed does not unscale gradients in "
            "float16",
            hint="--dtype float32, or leave --lora-modules-to-save out",
        )
    if (
        request.dtype == "bfloat16"
        and request.precision == "fp16-mixed"
        and not request.load_in_4bit
        and not request.load_in_8bit
    ):
        raise UsageError(
            "with precision fp16-mixed, autocast converts weights in bfloat16 in each product, which is not modelled",
            hint="--dtype float16 or float32, or --precision bf16-mixed",
        )
