"""Training code of published runs that allocates other tensors than the installed versions.

A `Variant` changes what happens between a model's hidden states and its loss; the layers are those of the installed versions.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from peft.tuners.lora.gptq import GPTQLoraLinear
from published_jobs import INSTALLED, Variant
from torch import nn
from torch.nn import functional as F
from transformers.loss import loss_utils

from fsdp_advisor.job.adaptation import CONFIG_KEY, Adaptation
from fsdp_advisor.model.profile import Unit
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.recording import Recorder, adapted
from fsdp_advisor.recording.adapted import source_of
from fsdp_advisor.recording.packed import GptqLinear
from fsdp_advisor.recording.source import Source, WrappedSource


class VariantSource(WrappedSource):
    """A source with the loss of a variant."""

    def __init__(self, base: Source, variant: Variant) -> None:
        super().__init__(base)
        self._variant = variant

    def loss(self, module: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        older = partial(shifted_loss, upcasts=not self._variant.logits_stay_half)
        functions = {"ForCausalLM": older} if self._variant.shifts_logits else {}
        with (
            mock.patch.dict(loss_utils.LOSS_MAPPING, functions),
            self._head_as_it_was(module),
            self._keys_and_values_kept(module),
        ):
            outputs = module(**batch)
        loss: torch.Tensor = outputs.loss
        if self._variant.keeps_outputs:
            loss.outputs = outputs.logits  # type: ignore[attr-defined]  # they live as long as the loss
        return loss

    @contextlib.contextmanager
    def _keys_and_values_kept(self, module: nn.Module) -> Iterator[None]:
        kept: list[torch.Tensor] = []
        names = ("c_attn",) if self._variant.keeps_keys_and_values else ()
        layers = [layer for name, layer in module.named_modules() if name.endswith(names)] if names else []
        with contextlib.ExitStack() as hooks:
            for layer in layers:
                hooks.enter_context(
                    layer.register_forward_hook(lambda _module, _inputs, output: kept.append(output.detach()))
                )
            yield
        kept.clear()

    def _head_as_it_was(self, module: nn.Module) -> contextlib.AbstractContextManager[Any]:
        head = self.root_modules(module).head
        if not self._variant.head_upcasts or head is None:
            return contextlib.nullcontext()
        return head.register_forward_hook(lambda _module, _inputs, logits: logits.float())

    def build(self, dtype: torch.dtype) -> nn.Module:
        model = self._built(dtype)
        if self._variant.adapters_in_half:
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(torch.bfloat16)
        return model

    def _built(self, dtype: torch.dtype) -> nn.Module:
        if self._variant.gptq_group_size is not None:
            return with_layers_of_2024(super().build(dtype))
        if not self._variant.keeps_dtypes:
            return super().build(dtype)
        with mock.patch.object(adapted, "prepare_for_training", lambda model: model.requires_grad_(False)):
            return super().build(dtype)


def with_layers_of_2024(model: nn.Module) -> nn.Module:
    """The model with the classes of fms-acceleration's plugin for GPTQ and of PEFT 0.13."""
    older: dict[type[nn.Module], type[nn.Module]] = {GptqLinear: OlderGptqLinear, GPTQLoraLinear: OlderGptqLora}
    for module in model.modules():
        module.__class__ = older.get(type(module), type(module))
    return model


class OlderGptqLinear(GptqLinear):
    """Source: fms-acceleration 876e2ed, fms_acceleration_peft/gptqmodel/nn_modules/qlinear/qlinear_tritonv2.py, of auto-gptq."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = _Product.apply(x.reshape(-1, x.shape[-1]), self.qweight, self.out_features)
        return product.reshape(*x.shape[:-1], self.out_features)


class _Product(torch.autograd.Function):
    """A product whose weight is dequantized in forward and again in backward, to the input's dtype."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, qweight: torch.Tensor, out_features: int) -> torch.Tensor:
        ctx.save_for_backward(qweight)
        ctx.in_features = x.shape[-1]
        return x @ x.new_empty(x.shape[-1], out_features)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return gradient @ gradient.new_empty(ctx.in_features, gradient.shape[-1]).t(), None, None


class OlderGptqLora(GPTQLoraLinear):
    """LoRA on a GPTQ layer as PEFT 0.13 ran it under autocast. Source: tuners/lora/gptq.py, `QuantLinear.forward`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.quant_linear_module(x)
        for name in self.active_adapters:
            output = self.lora_B[name](self.lora_A[name](self.lora_dropout[name](x)))
            output = output * self.scaling[name]
            result += output
        return result


def shifted_loss(
    logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, *, upcasts: bool = True, **_: Any
) -> torch.Tensor:
    """The loss of transformers 4.48: logits (in fp32 if `upcasts`), and a contiguous copy of them without the last token."""
    wide = logits.float() if upcasts else logits
    shifted = wide[..., :-1, :].contiguous()
    targets = labels[..., 1:].contiguous()
    return F.cross_entropy(shifted.view(-1, vocab_size), targets.view(-1), reduction="sum") / targets.numel()


def model_with(name: str, adaptation: Adaptation, variant: Variant) -> Resolved:
    """The model with the code of a published run. Its tapes are recorded when they are needed, and kept in this process."""
    if variant == INSTALLED:
        return resolve(name)
    return _recorded(name, json.dumps(adaptation.as_dict(), sort_keys=True), variant)


def _without_permutations(unit: Unit) -> Unit:
    return replace(unit, buffers=tuple(buffer for buffer in unit.buffers if not buffer.name.endswith("boft_P")))


@cache
def _recorded(name: str, adaptation: str, variant: Variant) -> Resolved:
    plain = resolve(name)
    assert plain.profile is not None
    packed: dict[str, Any] = {}
    if variant.gptq_group_size is not None:
        packed = {"quant_method": "gptq", "bits": 4, "group_size": variant.gptq_group_size}
    changed = Adaptation.from_dict(json.loads(adaptation)).on_checkpoint(packed)
    config = {**plain.profile.config, CONFIG_KEY: changed.as_dict()} if changed else plain.profile.config
    recorder = Recorder(VariantSource(source_of(config, name=name, task=plain.profile.task), variant))
    profile = recorder.profile
    if variant.permutations_on_host:
        profile = replace(
            profile,
            root=_without_permutations(profile.root),
            stacks=tuple(
                replace(stack, units=tuple(map(_without_permutations, stack.units))) for stack in profile.stacks
            ),
        )
    return Resolved(
        name=name,
        source="config",
        profile=profile,
        parameters=plain.parameters + profile.adapter_parameters,
        trainable_parameters=profile.trainable_parameters,
        recorder=recorder,
        adaptation=changed,
        packed=packed,
    )
