"""The allocations of Liger's kernels for norms, positions and feed-forward networks, for recording on a machine without a GPU.

The classes below allocate, save and free the same tensors as the autograd functions of liger-kernel 0.8.5, in the same order. Of the
kernels only the work is counted.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import PreTrainedModel

from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.model.liger import LIGER_KERNELS, LIGER_VERSION, LIGER_VISION, LigerKernels, LigerVision
from fsdp_advisor.recording.fused_kernels import empty, kernel
from fsdp_advisor.recording.liger_experts import experts

PROCESSORS = 132
"""Multiprocessors of an H100 or H200, which are assumed (an A100 has 108, a B200 148). In a norm's backward each has a row of partial
sums in fp32.
"""


def check_kernels(model: nn.Module, name: str) -> None:
    """Raise NotRecordable if Liger has no kernels for the model, or fails with its adapters."""
    causal = _causal_model(model, name)
    kernels = _kernels_of(causal, name)
    for routed in _routed_experts(_language_model(causal).layers, kernels):
        if not isinstance(getattr(routed, "gate_up_proj", None), nn.Parameter):
            raise NotRecordable(
                f"{name}: Liger {LIGER_VERSION} fails with adapters of routed experts",
                hint="leave --use-liger-kernel out, or name other --lora-target-modules",
            )


@contextlib.contextmanager
def with_liger_kernels(model: nn.Module, name: str) -> Iterator[None]:
    """Context in which the model's code calls Liger's functions. Modules that it replaces keep them afterwards. Raises NotRecordable if
    Liger has none for the model.

    Source: transformers/monkey_patch.py, the functions of MODEL_TYPE_TO_APPLY_LIGER_FN.
    """
    causal = _causal_model(model, name)
    kernels = _kernels_of(causal, name)
    base = _language_model(causal)
    layers = list(base.layers)
    for norm, in_place in _norms(base, layers, kernels):
        norm.forward = MethodType(_norm_in_place if in_place else _norm, norm)
    for mlp in _mlps(layers, kernels):
        if kernels.mlp == "relu squared":
            activation = mlp.get_submodule("act_fn")
            activation.forward = MethodType(_relu_squared, activation)
        else:
            mlp.forward = MethodType(_gate_up_mlp if kernels.mlp == "gate_up" else _mlp, mlp)
    for routed in _routed_experts(layers, kernels):
        routed.forward = MethodType(experts, routed)
    if base is not causal.base_model:
        _replace_in_vision(causal, base, LIGER_VISION[causal.config.model_type])
    code = sys.modules[type(base).__module__]
    with mock.patch.object(code, "apply_rotary_pos_emb", _rope) if kernels.rope else contextlib.nullcontext():
        yield


def _causal_model(model: nn.Module, name: str) -> PreTrainedModel:
    for inner in model.modules():
        if isinstance(inner, PreTrainedModel) and inner.get_output_embeddings() is not None:
            return inner
    raise NotRecordable(f"{name}: Liger's kernels are for causal language models", hint="leave --use-liger-kernel out")


def _language_model(causal: PreTrainedModel) -> Any:
    """The model with the decoder's layers, which is a part of a vision-language model."""
    base = causal.base_model
    return getattr(base, "language_model", None) or getattr(base, "text_model", base)


def _kernels_of(causal: PreTrainedModel, name: str) -> LigerKernels:
    config = causal.config
    vision = LIGER_VISION.get(config.model_type)
    of_text = config.get_text_config().model_type if vision else config.model_type
    kernels = vision.text if vision and vision.text else LIGER_KERNELS.get(of_text)
    tower = config.vision_config.model_type if vision else ""
    if kernels is None or tower == "pixtral":  # whose modules Liger replaces, too
        raise NotRecordable(
            f"{name}: Liger {LIGER_VERSION}'s kernels for models of type {tower if kernels else of_text} are not modelled",
            hint="leave --use-liger-kernel out; --loss liger has its loss alone, if it has one",
        )
    return kernels


def _replace_in_vision(causal: PreTrainedModel, text: nn.Module, replaced: LigerVision) -> None:
    """Let the modules outside of the language model call Liger's functions."""
    of_text = set(text.modules())
    for path, module in causal.base_model.named_modules():
        forward = None if module in of_text else _forward_in_vision(path.rpartition(".")[2], module, replaced)
        if forward is not None:
            module.forward = MethodType(forward, module)


def _forward_in_vision(name: str, module: nn.Module, replaced: LigerVision) -> Callable[..., torch.Tensor] | None:
    """Liger's forward of a module outside of the language model; None if Liger leaves it as it is."""
    if name in replaced.mlps:
        return _mlp
    if isinstance(module, nn.LayerNorm):
        return _layer_norm if name in replaced.layer_norms else None
    if not hasattr(module, "weight") or list(module.children()):  # an identity, or PEFT's wrapper around a trained norm
        return None
    if name in replaced.norms:
        return _norm_in_place
    return _norm if name in replaced.copying_norms else None


def _norms(base: nn.Module, layers: list[nn.Module], kernels: LigerKernels) -> Iterator[tuple[nn.Module, bool]]:
    """Each norm that Liger replaces, and whether its backward writes the input's gradient over the output's."""
    places = [base, *layers, *(layer.self_attn for layer in layers if hasattr(layer, "self_attn"))]
    for names, in_place in ((kernels.norms, True), (kernels.copying_norms, False)):
        for place in places:
            for name in names:
                found = getattr(place, name, None)
                for norm in found.modules() if found is not None else ():
                    if not list(norm.children()):  # not PEFT's wrapper around a trained norm
                        yield norm, in_place


def _routed_experts(layers: Iterable[nn.Module], kernels: LigerKernels) -> Iterator[nn.Module]:
    for layer in layers if kernels.experts else ():
        if isinstance(routed := getattr(layer.get_submodule("mlp"), "experts", None), nn.Module):
            yield routed


def _mlps(layers: Iterable[nn.Module], kernels: LigerKernels) -> Iterator[nn.Module]:
    """The feed-forward networks of layers. In a layer with routed experts this is the shared expert."""
    for layer in layers:
        if kernels.mlp == "none":
            continue
        mlp = layer.get_submodule("mlp")
        if not hasattr(mlp, "experts"):
            yield mlp
        for name in ("shared_expert", "shared_experts"):
            if isinstance(shared := getattr(mlp, name, None), nn.Module):
                yield shared


# RMSNorm


def _norm(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _RmsNorm.apply(hidden_states, self.weight, False)  # type: ignore[no-untyped-call]  # torch's
    return out


def _norm_in_place(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _RmsNorm.apply(hidden_states, self.weight, True)  # type: ignore[no-untyped-call]  # torch's
    return out


class _RmsNorm(torch.autograd.Function):
    """Liger's RMSNorm. Source: ops/rms_norm.py, `LigerRMSNormFunction`. Both casting modes keep the inverse norm in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, in_place: bool) -> torch.Tensor:
        shape = x.shape
        x = x.contiguous().view(-1, shape[-1])
        y = empty(x.shape, x)
        inverse = empty(x.shape[:1], x, torch.float32)
        kernel([x, weight], [y, inverse])
        ctx.in_place = in_place
        ctx.save_for_backward(x, weight, inverse)
        return y.view(*shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        shape = grads[0].shape
        dy = grads[0].contiguous().view(-1, shape[-1])
        trains = ctx.needs_input_grad[1]
        parts = empty((PROCESSORS, shape[-1]), weight, torch.float32) if trains else None
        dx = dy if ctx.in_place else torch.zeros_like(dy)
        kernel([dy, x, weight, inverse], [dx, *([] if parts is None else [parts])])
        dweight = None if parts is None else parts.sum(dim=0).to(weight.dtype)
        return dx.view(*shape), dweight, None


# LayerNorm


def _layer_norm(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _LayerNorm.apply(hidden_states, self.weight, self.bias)  # type: ignore[no-untyped-call]  # torch's
    return out


class _LayerNorm(torch.autograd.Function):
    """Liger's LayerNorm. Source: ops/layer_norm.py, `LigerLayerNormFunction`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        shape = x.shape
        x = x.contiguous().view(-1, shape[-1])
        y = empty(x.shape, x)
        mean, inverse = (empty(x.shape[:1], x, torch.float32) for _ in range(2))
        kernel([x, weight, bias], [y, mean, inverse])
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        return y.view(*shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, mean, inverse = ctx.saved_tensors
        dy = grads[0].contiguous()
        parts = [
            empty((PROCESSORS, x.shape[1]), weight, torch.float32) if needed else None
            for needed in ctx.needs_input_grad[1:]
        ]
        dx = empty(x.shape, x)
        kernel([dy, x, weight, mean, inverse], [dx, *(part for part in parts if part is not None)])
        of_parameters = [
            None if part is None else part.sum(dim=0).to(parameter.dtype)
            for part, parameter in zip(parts, (weight, bias), strict=True)
        ]
        return dx.view(*grads[0].shape), *of_parameters


# Positions


def _rope(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k of shape (B, heads, T, D), rotated in place."""
    rotated: tuple[torch.Tensor, torch.Tensor] = _Rope.apply(q, k, cos, sin)  # type: ignore[no-untyped-call]  # torch's
    return rotated


class _Rope(torch.autograd.Function):
    """The allocations of `LigerRopeFunction` (ops/rope.py). Queries and keys that are parts of one tensor are copied first."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = q.transpose(1, 2).contiguous(), k.transpose(1, 2).contiguous()
        cos, sin = cos.contiguous(), sin.contiguous()
        kernel([q, k, cos, sin], [q, k])
        ctx.save_for_backward(cos, sin)
        return q.transpose(1, 2), k.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        dq, dk = (grad.transpose(1, 2).contiguous() for grad in grads)
        kernel([dq, dk, cos, sin], [dq, dk])
        return dq.transpose(1, 2), dk.transpose(1, 2), None, None


# Feed-forward networks


def _mlp(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The forward of `LigerSwiGLUMLP` (transformers/swiglu.py) and `LigerGEGLUMLP` (transformers/geglu.py)."""
    return _call(self.down_proj, _gated(_call(self.gate_proj, x), _call(self.up_proj, x)))


def _gate_up_mlp(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The forward of `LigerPhi3SwiGLUMLP` (transformers/swiglu.py)."""
    up = _call(self.gate_up_proj, x)
    gate, up = up.chunk(2, dim=-1)
    return _call(self.down_proj, _gated(gate, up))


def _call(module: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = module(x)
    return out


def _gated(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _GatedActivation.apply(gate, up)  # type: ignore[no-untyped-call]  # torch's
    return out


class _GatedActivation(torch.autograd.Function):
    """Liger's SwiGLU or GEGLU in one kernel. Backward writes to the saved tensors.

    Source: ops/swiglu.py, `LigerSiLUMulFunction`; ops/geglu.py, `LigerGELUMulFunction`.
    """

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        shape = gate.shape
        gate, up = (x.contiguous().view(-1, shape[-1]) for x in (gate, up))
        out = empty(gate.shape, gate)
        kernel([gate, up], [out])
        ctx.save_for_backward(gate, up)
        return out.view(*shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        shape = grads[0].shape
        grad = grads[0].contiguous()
        kernel([grad, gate, up], [gate, up])
        return gate.view(*shape), up.view(*shape)


def _relu_squared(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = _ReluSquared.apply(x)  # type: ignore[no-untyped-call]  # torch's
    return out


class _ReluSquared(torch.autograd.Function):
    """The allocations of `LigerReLUSquaredFunction` (ops/relu_squared.py)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        out = empty(x.shape, x)
        kernel([x], [out])
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        out = empty(grad.shape, grad)
        kernel([x, grad], [out])
        return out
