"""The source of a transformers model with adapters, frozen parameters or a quantized base. PEFT's own code changes the model."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import nn

from fsdp_advisor.errors import ADAPTERS_EXTRA, MissingExtra, NotRecordable, UsageError
from fsdp_advisor.job.adaptation import CONFIG_KEY, TASK_TYPES, Adaptation
from fsdp_advisor.model.freezing import check_patterns, matching
from fsdp_advisor.model.multimodal import is_tower
from fsdp_advisor.model.quantization import Quantization, is_packed_checkpoint
from fsdp_advisor.recording.adapter_entries import (
    NEEDS_VALUES,
    NOT_RECORDABLE,
    NOT_RECORDABLE_LORA,
    entries_without_values,
)
from fsdp_advisor.recording.boft import layers_without_values
from fsdp_advisor.recording.checkpointing import arguments
from fsdp_advisor.recording.packed import adapter_layers, pack
from fsdp_advisor.recording.quantized import nothing_compiled, prepare_for_training, quantize
from fsdp_advisor.recording.source import LayerStack, Source, WrappedSource
from fsdp_advisor.recording.transformers_models import TransformersSource


def source_of(config: Mapping[str, Any], *, name: str, task: str | None = None) -> Source:
    """The source of a configuration, which may contain an adaptation."""
    values = dict(config)
    adaptation = values.pop(CONFIG_KEY, None)
    labels = 1 if adaptation is not None and adaptation.get("reward_head") else None
    plain = TransformersSource(values, name=name, task=task, labels=labels)
    if adaptation is None:
        return plain
    if adaptation.get("own_model"):
        from fsdp_advisor.recording.torchtitan_models import TorchtitanSource

        return TorchtitanSource(plain, adaptation)
    return AdaptedSource(plain, adaptation)


class AdaptedSource(WrappedSource):
    """A transformers model after an adaptation. Adapters keep their own dtypes, whatever the dtype of the base."""

    def __init__(self, base: TransformersSource, adaptation: Mapping[str, Any]) -> None:
        """`adaptation`: the values of an `Adaptation`, and under `versions` those of the packages that adapt the model."""
        super().__init__(base)
        self._adaptation = Adaptation.from_dict(adaptation)
        self._packed = is_packed_checkpoint(self._adaptation.quantization)
        has_usual_dtype = self._adaptation.prepared and not self._packed
        self.inventory_dtype = torch.bfloat16 if has_usual_dtype else torch.float64
        """The dtype with which the model is built to list its parameters. A parameter that then has another dtype (an adapter's fp32
        weight, for example) has that dtype at every precision. No weight is ever in float64.
        """
        self._recorded_as = dict(adaptation)
        self.needs_values = base.needs_values or self._adaptation.method in NEEDS_VALUES

    def config(self) -> dict[str, object]:
        return {**self._base.config(), CONFIG_KEY: self._recorded_as}

    def stacks(self, module: nn.Module) -> list[LayerStack]:
        """The stacks of layers; none if the compiler makes one graph of the model, because its layers then belong to the root."""
        return [] if self._adaptation.in_one_graph else self._base.stacks(module)

    def keep_layers(self, module: nn.Module, kept: Mapping[str, list[int]]) -> None:
        if not self._adaptation.in_one_graph:
            self._base.keep_layers(module, kept)

    def build(self, dtype: torch.dtype) -> nn.Module:
        """The adapted model. A base that bitsandbytes quantizes is loaded in its compute dtype, and its other weights are then in fp32. A
        GPTQ or AWQ checkpoint is loaded in 16 bits.

        If only some layers are checkpointed, they get a different setting, so they are recorded as a separate kind of layer.
        """
        model = self._changed(dtype)
        if self._adaptation.checkpoint_every:
            every = {"every_n_layers": self._adaptation.checkpoint_every}
            model.activation_checkpointing_enable(arguments("every", ""), **every)  # type: ignore[operator]  # of transformers'
        return model

    def _changed(self, dtype: torch.dtype) -> nn.Module:
        """The model with its adapters, frozen parameters and quantized base."""
        quantization = self._adaptation.quantization
        if quantization:
            if self._packed:
                model = self._base.build(torch.bfloat16)
                pack(model, self._base.stacks(model), quantization)
            else:
                settings = Quantization.from_keywords(quantization)
                model = self._base.build(getattr(torch, settings.compute_dtype))
                quantize(model, settings)
            if self._adaptation.prepared:
                prepare_for_training(model)
            else:
                model.requires_grad_(False)
        else:
            model = self._base.build(dtype)
        if self._adaptation.freeze:
            freeze(model, self._adaptation.freeze, self.name)
        if not self._adaptation.peft:
            return model
        model = self._with_adapters(model)
        if not self._adaptation.prepared and not self._adaptation.fp32_adapters and not self._packed:
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and "lora_magnitude_vector" not in name:
                    parameter.data = parameter.data.to(torch.bfloat16)
        return model

    def is_added(self, parameter: str) -> bool:
        """Whether the parameter of this name belongs to an adapter or is a trained copy of one of the base's."""
        return bool(self._adaptation.peft) and (".default" in parameter or parameter.startswith("prompt_encoder."))

    def _with_adapters(self, model: nn.Module) -> nn.Module:
        """The model inside a PeftModel. Raises UsageError if PEFT refuses the configuration, MissingExtra without PEFT."""
        logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns that an optional CPU package is missing
        try:
            with nothing_compiled():  # it imports bitsandbytes
                import peft
        except ImportError as error:
            raise MissingExtra(f"{self.name}: recording adapters needs peft", extra=ADAPTERS_EXTRA) from error
        values, linear = dict(self._adaptation.peft), _linear_names(model)
        if (reason := NOT_RECORDABLE.get(self._adaptation.method or "")) is not None:
            raise NotRecordable(f"{self.name}: {self._adaptation.method} {reason}", hint=_RECORDED)
        for key, reason in NOT_RECORDABLE_LORA.items() if self._adaptation.method == "LORA" else ():
            if key in values:
                raise NotRecordable(f"{self.name}: LoRA with {key} {reason}", hint=f"leave {key} out; {_RECORDED}")
        try:
            kind = peft.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(str(values.pop("peft_type")).upper())]
            values = _known(kind, values)
            config = kind(task_type=TASK_TYPES.get(self.task), **{k: v for k, v in values.items() if k != "task_type"})
            if self._packed and isinstance(config, peft.LoraConfig):
                config._register_custom_module(adapter_layers())
            is_boft = isinstance(config, peft.BOFTConfig)
            building = layers_without_values(config.boft_n_butterfly_factor) if is_boft else contextlib.nullcontext()
            with torch.device("meta"), warnings.catch_warnings(), building, entries_without_values():
                warnings.simplefilter("ignore")
                adapted: nn.Module = peft.get_peft_model(model, config, low_cpu_mem_usage=True)
        except Exception as error:  # PEFT raises many types for a configuration that does not fit the model
            if isinstance(error, NotImplementedError) or "meta tensor" in str(error).lower():
                method = self._adaptation.peft["peft_type"]
                raise NotRecordable(
                    f"{self.name}: PEFT makes {method} adapters from values of tensors, which a recording does not have",
                    hint=_RECORDED,
                ) from error
            raise UsageError(
                f"{self.name}: PEFT {peft.__version__} refuses the adapter: {str(error)[:300]}",
                hint=_hint(str(error), linear),
            ) from error
        apply_every_module(adapted)
        return adapted.train()


_RECORDED = "most other methods are recorded, such as LORA, LOHA, OFT, BOFT, VERA and IA3"


_REFUSED_WITH_MAMBA = ("out_proj", "conv1d")
"""Source: peft 0.21, tuners/tuners_utils.py, `_check_lora_target_modules_mamba`."""


def _hint(refusal: str, linear: list[str]) -> str:
    """What to change in the job if PEFT refuses its adapter with the message `refusal`. `linear`: names of the model's linear layers."""
    if "ParamWrapper" in refusal:  # of the weights of experts, which all-linear includes
        return "leave it out, or name modules other than the experts with --lora-target-modules"
    if "Mamba-based" in refusal:
        return f"--lora-target-modules {','.join(name for name in linear if name not in _REFUSED_WITH_MAMBA)}"
    if "target" in refusal.lower():
        return f"--lora-target-modules all-linear (all linear layers but the head), or some of {', '.join(linear)}"
    return "change the options of the adapter, or the values in its configuration"


def _linear_names(model: nn.Module) -> list[str]:
    """The last parts of the names of the model's linear layers but the head, those of towers last, in the order of the model."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    linear = [
        name
        for name, module in model.named_modules()
        if module is not head and (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
    ]
    return list(dict.fromkeys(name.rpartition(".")[2] for name in sorted(linear, key=is_tower)))


def _known(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without the keys that this version of PEFT lacks, as a newer one saves them, if they switch nothing on.

    PEFT itself leaves all of them out, with a warning. Raises ValueError for one that switches something on. Source: peft 0.21, config.py,
    `from_peft_type`.
    """
    unknown = values.keys() - {field.name for field in fields(kind)}
    if active := sorted(name for name in unknown if values[name]):
        raise ValueError(f"{kind.__name__} has no key {active[0]}, which a newer version may have saved")
    return {name: value for name, value in values.items() if name not in unknown}


class _NoDropout:
    """A probability for `module_dropout` that is below every random number, so that no module is left out."""

    def __lt__(self, _: object) -> bool:
        return True


def apply_every_module(adapted: nn.Module) -> None:
    """Make LoHa and LoKr apply all their modules. They draw a random number for each to decide whether to skip it, even if
    `module_dropout` is 0, and fake tensors have no values.

    Source: peft 0.21, tuners/loha/layer.py and tuners/lokr/layer.py, `forward`.
    """
    for module in adapted.modules():
        if isinstance(chances := getattr(module, "module_dropout", None), dict):
            chances.update(dict.fromkeys(chances, _NoDropout()))


def freeze(model: nn.Module, patterns: tuple[str, ...], name: str) -> None:
    """Freeze the parameters whose name, or the name of a module around them, matches a pattern. Raises UsageError if none does."""
    parameters = dict(model.named_parameters())
    check_patterns(patterns, parameters, name)
    for n in matching(parameters, patterns):
        parameters[n].requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError("all parameters are frozen", hint="leave a part of the model to train")
