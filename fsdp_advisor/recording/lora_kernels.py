"""axolotl's code for adapters: the projections of an attention's input, its output, and a whole feed-forward network are each one autograd
function, which saves less than PEFT's code and unpacks quantized weights itself.

Source: axolotl 0.19.0, kernels/{lora,quantize,swiglu,geglu}.py; monkeypatch/lora_kernels.py, `apply_lora_kernel_patches`. The functions
below allocate, save and free the same tensors in the same order; local variables live as long. Of the Triton kernels only the work is
counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.model.lora_kernels import PATCHED_TYPES, stops_in_attention
from fsdp_advisor.recording.fused_kernels import empty, kernel

_OF_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_OF_MLP = ("gate_proj", "up_proj", "down_proj")
_WITHOUT = "--lora-kernels none, with which exported files set lora_*_kernel: false"


def use_lora_kernels(model: nn.Module, kernels: Sequence[str], name: str) -> None:
    """Replace the forwards of modules in the decoder's layers for which axolotl has a function, if all their projections have adapters.

    Raises NotRecordable if axolotl fails with the model, or its code for the model is not modelled.
    """
    config: Any = next(inner.config for inner in model.modules() if hasattr(inner, "config"))
    _check(model, config, kernels, name)
    for layer in _layers(model):
        attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
        if all(hasattr(attention, each) for each in _OF_ATTENTION):
            *inputs, output = (getattr(attention, each) for each in _OF_ATTENTION)
            if "qkv" in kernels and _have_adapters(inputs, name):
                _share_input(inputs)
            if "o" in kernels and _have_adapters([output], name):
                output.forward = partial(_linear, output)
        if "mlp" in kernels and all(hasattr(mlp, each) for each in _OF_MLP):
            activation = _activation(config.get_text_config())
            if activation != "silu" and "gelu" not in activation:
                raise NotRecordable(
                    f"{name}: axolotl 0.19 stops, as its lora_mlp_kernel does not support the activation {activation}",
                    hint=f"--lora-kernels {','.join(part for part in kernels if part != 'mlp') or 'none'}",
                )
            projections = [getattr(mlp, each) for each in _OF_MLP]
            if _have_adapters(projections, name):
                mlp.forward = partial(_mlp, projections)  # type: ignore[union-attr]  # it has them


def _check(model: nn.Module, config: Any, kernels: Sequence[str], name: str) -> None:
    patches_attention = "qkv" in kernels or "o" in kernels
    if patches_attention and config.model_type not in PATCHED_TYPES:
        stops = stops_in_attention({"model_type": config.model_type})
        raise NotRecordable(
            f"{name}: axolotl 0.19 {'stops' if stops else 'has code of its own, which is not modelled,'} for models of type "
            f"{config.model_type}, as its kernels of adapters replace projections q_proj, k_proj, v_proj and o_proj in transformers' code "
            "of the attention",
            hint=_WITHOUT,
        )
    for module in model.modules():
        if "embedding" in kernels and len(getattr(module, "lora_embedding_A", ())):
            raise NotRecordable(
                f"{name}: axolotl's kernel for adapters of embeddings is not modelled", hint="--lora-kernels mlp,qkv,o"
            )


def _layers(model: Any) -> nn.ModuleList:
    """The layers of the decoder of a PeftModel, not those of a vision tower. Source: `get_layers` in axolotl."""
    causal = model.base_model.model
    decoder = getattr(causal, "language_model", causal.model)
    layers: nn.ModuleList = getattr(decoder, "language_model", decoder).layers
    return layers


def _activation(config: Any) -> str:
    """The activation by which axolotl chooses between SwiGLU and GEGLU."""
    found = (getattr(config, key, None) for key in ("hidden_act", "hidden_activation", "mlp_hidden_act"))
    return str(next(filter(None, found), None))


def _have_adapters(projections: Sequence[Any], name: str) -> bool:
    """Whether all projections have adapters. Raises NotRecordable for adapters without weights below them."""
    if not all(hasattr(each, "lora_A") for each in projections):
        return False
    if not all(hasattr(each.base_layer, "weight") for each in projections):
        raise NotRecordable(
            f"{name}: axolotl 0.19 fails, as its kernels of adapters read weights, which a GPTQ or AWQ checkpoint lacks",
            hint=_WITHOUT,
        )
    return True


class _Adapted(NamedTuple):
    """A projection with LoRA: W x + `scale` (b a) x, with the adapter's matrices `a` (r, in) and `b` (out, r)."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    packed: Any
    """bitsandbytes' state of a packed weight; None for a weight in its own dtype."""
    a: torch.Tensor
    b: torch.Tensor
    scale: float

    @property
    def settings(self) -> _Settings:
        return _Settings(self.weight, self.packed, self.scale)


class _Settings(NamedTuple):
    """What a function keeps of a projection besides the tensors that it saves for backward."""

    weight: torch.Tensor
    packed: Any
    scale: float


def _adapted(projection: Any) -> _Adapted:
    """The tensors of a projection. Under FSDP2 its adapter's units are gathered, which no hook does, as their forward does not run."""
    adapter = projection.active_adapters[0]
    first, second = projection.lora_A[adapter], projection.lora_B[adapter]
    for module in (first, second):
        if (unshard := getattr(module, "unshard", None)) is not None:
            unshard()
    base = projection.base_layer
    state = getattr(base, "quant_state", None)
    return _Adapted(base.weight, base.bias, state, first.weight, second.weight, projection.scaling[adapter])


def _dropped(projection: Any, x: torch.Tensor) -> torch.Tensor | None:
    """The input of the adapter after its dropout; None without dropout. All projections of an input share it."""
    dropout = projection.lora_dropout[projection.active_adapters[0]]
    if isinstance(dropout, nn.Identity) or not projection.training:
        return None
    dropped: torch.Tensor = dropout(x)
    return dropped


def _unpacked(weight: torch.Tensor, packed: Any) -> torch.Tensor:
    """The weight, of shape (out, in), in the base's dtype. Nested scales are unpacked after the weight's own tensor is allocated."""
    if packed is None:
        return weight
    if not packed.nested:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(weight, packed)
    operators, nested = torch.ops.bitsandbytes, packed.state2
    unpacked: torch.Tensor = operators.dequantize_4bit.default(
        weight, nested.absmax, packed.blocksize, packed.quant_type, packed.shape, packed.dtype
    )
    scales = operators.dequantize_blockwise.default(
        packed.absmax, nested.absmax, nested.code, nested.blocksize, torch.float32
    )
    scales += packed.offset
    return unpacked


def _product(x: torch.Tensor, of: _Adapted, dropped: torch.Tensor | None = None) -> torch.Tensor:
    """The output of a projection, `matmul_lora` in axolotl. `x` has shape (B, T, in)."""
    weight = _unpacked(of.weight, of.packed)
    rows = x.view(-1, x.shape[-1])
    out = torch.matmul(rows, weight.t())
    del weight
    a, b = of.a.t().to(x.dtype), of.b.t().to(x.dtype)
    adapted = rows if dropped is None else dropped.view(-1, x.shape[-1])
    out.addmm_(adapted @ a, b, alpha=of.scale)
    if of.bias is not None:
        out += of.bias
    return out.view(*x.shape[:-1], -1)


class _Learned(NamedTuple):
    """The gradients of an adapter, transposed, and the output's gradient times `b`, which the input's gradient needs too."""

    a: torch.Tensor
    b: torch.Tensor
    through: torch.Tensor


def _learn(grad: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> _Learned:
    """Gradients of an adapter of a projection with the input `x`. All tensors have two dimensions."""
    through = grad @ b
    da, db = torch.empty_like(a.t()), torch.empty_like(b.t())
    da.addmm_(x.t(), through, alpha=scale, beta=0)
    db.addmm_(a @ x.t(), grad, alpha=scale, beta=0)
    return _Learned(da, db, through)


def _input_gradient(grads: Sequence[torch.Tensor], settings: Sequence[_Settings]) -> torch.Tensor:
    """The gradient of the input of several projections with respect to the weights. Each is unpacked in turn."""
    total = None
    for grad, of in zip(grads, settings, strict=True):
        weight = _unpacked(of.weight, of.packed)
        if total is None:
            total = torch.mm(grad, weight)
        else:
            total.addmm_(grad, weight)
        del weight
    assert total is not None
    return total


# Projections


def _share_input(projections: list[Any]) -> None:
    """Compute all projections when the first is called; the others return what was computed."""
    waiting: list[torch.Tensor] = []

    def first(x: torch.Tensor) -> torch.Tensor:
        waiting[:] = _projected(projections, x)
        return waiting.pop(0)

    def other(x: torch.Tensor) -> torch.Tensor:
        return waiting.pop(0)

    for number, projection in enumerate(projections):
        projection.forward = other if number else first


def _linear(projection: Any, x: torch.Tensor) -> torch.Tensor:
    (out,) = _projected([projection], x)
    return out


def _projected(projections: Sequence[Any], x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    adapted = [_adapted(projection) for projection in projections]
    trained = [tensor for each in adapted for tensor in (each.a, each.b)]
    dropped = _dropped(projections[0], x)
    found: tuple[torch.Tensor, ...] = _Projections.apply(x, dropped, adapted, *trained)  # type: ignore[no-untyped-call]  # torch's
    return found


class _Projections(torch.autograd.Function):
    """Projections of one input: `LoRA_QKV`, and `LoRA_O` with one."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dropped: torch.Tensor | None, adapted: list[_Adapted], *trained: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        outputs = tuple(_product(x, each, dropped) for each in adapted)
        ctx.save_for_backward(x, x if dropped is None else dropped, *(tensor.to(x.dtype) for tensor in trained))
        ctx.settings = [each.settings for each in adapted]
        ctx.drops = dropped is not None
        return outputs

    @staticmethod
    def backward(ctx: Any, *outgoing: torch.Tensor) -> tuple[Any, ...]:
        x, adapted_x, *adapters = ctx.saved_tensors
        pairs = list(zip(adapters[::2], adapters[1::2], strict=True))
        shape = x.shape
        grads = [grad.reshape(-1, grad.shape[-1]) for grad in outgoing]
        rows = adapted_x.view(-1, shape[-1])
        learned = [
            _learn(grad, rows, a, b, of.scale) for grad, (a, b), of in zip(grads, pairs, ctx.settings, strict=True)
        ]
        dx = _input_gradient(grads, ctx.settings)
        ddropped = None
        if not ctx.drops:
            _add_adapters(dx, learned, pairs, ctx.settings)
        elif len(pairs) == 1:
            ddropped = (learned[0].through @ pairs[0][0] * ctx.settings[0].scale).view(shape)
        else:
            ddropped = torch.zeros_like(rows)
            _add_adapters(ddropped, learned, pairs, ctx.settings)
            ddropped = ddropped.view(shape)
        return dx.view(shape), ddropped, None, *(grad.t() for each in learned for grad in (each.a, each.b))


def _add_adapters(
    dx: torch.Tensor,
    learned: Sequence[_Learned],
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    settings: Sequence[_Settings],
) -> None:
    for each, (a, _), of in zip(learned, pairs, settings, strict=True):
        dx.addmm_(each.through, a, alpha=of.scale)


# Feed-forward networks


def _mlp(projections: Sequence[Any], x: torch.Tensor) -> torch.Tensor:
    adapted = [_adapted(projection) for projection in projections]
    trained = [tensor for each in adapted for tensor in (each.a, each.b)]
    out: torch.Tensor = _Mlp.apply(x, _dropped(projections[0], x), adapted, *trained)  # type: ignore[no-untyped-call]  # torch's
    return out


class _Mlp(torch.autograd.Function):
    """`LoRA_MLP`: gate, up and down projections with SwiGLU or GEGLU between them. Backward writes to the saved tensors and computes the
    hidden states again. The adapter of the down projection has no dropout.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, dropped: torch.Tensor | None, adapted: list[_Adapted], *trained: torch.Tensor
    ) -> torch.Tensor:
        gate_of, up_of, down_of = adapted
        gate = _product(x, gate_of, dropped)
        up = _product(x, up_of, dropped)
        hidden = empty(gate.shape, gate)
        kernel([gate, up], [hidden])
        out = _product(hidden, down_of)
        ctx.save_for_backward(
            x, x if dropped is None else dropped, gate, up, *(tensor.to(x.dtype) for tensor in trained)
        )
        ctx.settings = [each.settings for each in adapted]
        ctx.drops = dropped is not None
        return out

    @staticmethod
    def backward(ctx: Any, *outgoing: torch.Tensor) -> tuple[Any, ...]:
        x, adapted_x, gate, up, gate_a, gate_b, up_a, up_b, down_a, down_b = ctx.saved_tensors
        gate_of, up_of, down_of = ctx.settings
        shape = x.shape
        grad = outgoing[0].view(-1, outgoing[0].shape[-1])
        rows = adapted_x.view(-1, shape[-1])
        dgate, dup = gate.view(-1, gate.shape[-1]), up.view(-1, up.shape[-1])
        hidden = _hidden_gradient(grad, down_of, down_a, down_b)
        kernel(
            [hidden, dgate, dup], [hidden, dgate, dup]
        )  # which then are the hidden states and the gradients of gate and up
        down = _learn(grad, hidden, down_a, down_b, down_of.scale)
        of_up = _learn(dup, rows, up_a, up_b, up_of.scale)
        of_gate = _learn(dgate, rows, gate_a, gate_b, gate_of.scale)
        dx = ddropped = None
        if ctx.needs_input_grad[0]:
            dx = _input_gradient((dup, dgate), (up_of, gate_of))
            if ctx.drops:
                ddropped = torch.zeros_like(rows)
            into = dx if ddropped is None else ddropped
            _add_adapters(into, (of_up, of_gate), ((up_a, up_b), (gate_a, gate_b)), (up_of, gate_of))
            dx = dx.view(shape)
            ddropped = None if ddropped is None else ddropped.view(shape)
        return dx, ddropped, None, *(each.t() for found in (of_gate, of_up, down) for each in (found.a, found.b))


def _hidden_gradient(grad: torch.Tensor, of: _Settings, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The gradient (tokens, in) of the down projection's input. `grad` (tokens, out): of its output; `a`, `b`: its adapter."""
    weight = _unpacked(of.weight, of.packed)
    out = torch.matmul(grad, weight)
    del weight
    out.addmm_(grad @ b, a, alpha=of.scale)
    return out
