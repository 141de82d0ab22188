"""Linear layers of GPTQ and AWQ checkpoints, as gptqmodel trains adapters on them. Their packed weights are buffers.

Sources: gptqmodel 7.7, nn_modules/qlinear/{__init__,torch,tritonv2,gemm_awq}.py; optimum 2.3, gptq/quantizer.py; transformers 5.23,
integrations/awq.py, quantizers/quantizer_awq.py. The kernels are those of the backend `auto_trainable` on CUDA.

In training, GPTQ's layer dequantizes the whole weight with one compiled kernel and multiplies with a plain product, so autograd keeps
the weight in 16 bits until backward. AWQ's layer keeps the packed weight and dequantizes it again in backward. For at most 1,024
rows AWQ's forward makes no copy of the weight; that is not modelled.
"""

# I = input features, O = output features

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from fsdp_advisor.errors import UsageError
from fsdp_advisor.recording.fake_operators import fake_operator
from fsdp_advisor.recording.source import LayerStack

_WORD_BITS = 32


class PackedLinear(nn.Module):
    """A layer whose weight (I, O) is packed into words of 32 bits, with 16-bit scales and packed zero points for each group."""

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self, in_features: int, out_features: int, packed: tuple[int, int], *, bits: int, group_size: int, bias: bool
    ) -> None:
        """`packed`: the shape of the packed weight."""
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        groups = 1 if group_size == -1 else math.ceil(in_features / group_size)
        with torch.device("meta"):
            self.register_buffer("qweight", torch.empty(packed, dtype=torch.int32))
            self.register_buffer("qzeros", torch.empty(groups, _words(out_features, bits), dtype=torch.int32))
            self.register_buffer("scales", torch.empty(groups, out_features, dtype=torch.float16))
            self.register_buffer("bias", torch.empty(out_features, dtype=torch.float16) if bias else None)

    def _weight(self) -> torch.Tensor:
        weight: torch.Tensor = _dequantized(self.qweight, self.qzeros, self.scales, self.in_features)
        return weight


def _words(values: int, bits: int) -> int:
    return math.ceil(values * bits / _WORD_BITS)


class GptqLinear(PackedLinear):
    """GPTQ's layer: `TritonV2Linear`, which trains as `TorchLinear`. `g_idx` is the group of each input feature; two small tensors are
    shifts for unpacking words.
    """

    def __init__(self, in_features: int, out_features: int, *, bits: int, group_size: int, bias: bool) -> None:
        packed = (_words(in_features, bits), out_features)
        super().__init__(in_features, out_features, packed, bits=bits, group_size=group_size, bias=bias)
        with torch.device("meta"):
            self.register_buffer("g_idx", torch.empty(in_features, dtype=torch.int32))
            shifts = 36 if bits == 3 else _WORD_BITS // bits
            self.register_buffer("wf_unsqueeze_zero", torch.empty(shifts, dtype=torch.int32), persistent=False)
            self.register_buffer("wf_unsqueeze_neg_one", torch.empty(shifts, dtype=torch.int32), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out_shape = (*x.shape[:-1], self.out_features)
        weight = self._weight().to(x.dtype)
        out = torch.matmul(x.reshape(-1, x.shape[-1]), weight).reshape(out_shape)
        del weight
        if self.bias is not None:
            out.add_(self.bias.to(out.dtype))
        return out


class AwqLinear(PackedLinear):
    """AWQ's layer: `AwqGEMMLinear`. Its scales get the dtype of its input."""

    def __init__(self, in_features: int, out_features: int, *, bits: int, group_size: int, bias: bool) -> None:
        packed = (in_features, _words(out_features, bits))
        super().__init__(in_features, out_features, packed, bits=bits, group_size=group_size, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = x.dtype
        x = x.to(given if given in (torch.float16, torch.bfloat16) else torch.float16).contiguous()
        self.scales = self.scales.to(x.dtype)
        if self.bias is not None:
            self.bias = self.bias.to(x.dtype)
        tensors = (x, self.qweight, self.qzeros, self.scales, self.bias)
        out: torch.Tensor = _AwqProduct.apply(*tensors)  # type: ignore[no-untyped-call]  # torch's
        return out.to(given)


class _AwqProduct(torch.autograd.Function):
    """`AwqGemmFn` of more than 1,024 rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        qweight: torch.Tensor,
        qzeros: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(qweight, qzeros, scales)
        ctx.shape = x.shape
        weight = _dequantized(qweight, qzeros, scales, x.shape[-1])
        out = torch.matmul(x.reshape(-1, x.shape[-1]), weight)
        out = out if bias is None else out + bias
        return out.reshape(*x.shape[:-1], weight.shape[1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        qweight, qzeros, scales = ctx.saved_tensors
        weight = _dequantized(qweight, qzeros, scales, ctx.shape[-1]).to(gradient.dtype)
        product = torch.matmul(gradient.reshape(-1, gradient.shape[-1]), weight.transpose(-1, -2))
        return product.reshape(ctx.shape), None, None, None, None


@fake_operator("dequantize_packed")
def _dequantized(qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, in_features: int) -> torch.Tensor:
    """The weight (I, O) in the dtype of its scales (groups, O), by one kernel."""
    return scales.new_empty(in_features, scales.shape[1])


def pack(model: nn.Module, stacks: list[LayerStack], settings: Mapping[str, Any]) -> None:
    """Replace the layers of a transformers model on the meta device that are packed in its checkpoint, in place.

    `settings`: the values of the checkpoint's `quantization_config`. GPTQ packs the linear layers of the stacks, AWQ all but the head.
    Raises UsageError for a mixture of experts, whose experts transformers keeps in one parameter.
    """
    from transformers.pytorch_utils import Conv1D
    from transformers.quantizers.base import HfQuantizer
    from transformers.quantizers.quantizers_utils import should_convert_module

    if any("experts" in name and parameter.dim() == 3 for name, parameter in model.named_parameters()):
        raise UsageError(
            "a mixture of experts in GPTQ or AWQ is not modelled: transformers keeps its experts in one parameter",
            hint="--load-in-4bit quantizes the other layers with bitsandbytes",
        )
    packed_by_gptq = settings["quant_method"] == "gptq"
    kind = GptqLinear if packed_by_gptq else AwqLinear
    layers = {id(m) for stack in stacks for layer in stack.layers for m in layer.modules()}
    chosen = [name for group in settings.get("modules_in_block_to_quantize") or () for name in group]
    pretrained: Any = model
    kept = HfQuantizer.get_modules_to_not_convert(
        pretrained, settings.get("modules_to_not_convert"), pretrained._keep_in_fp32_modules, add_default_skips=True
    )
    for name, module in list(model.named_modules()):
        if type(module) is not nn.Linear and not (packed_by_gptq and isinstance(module, Conv1D)):
            continue
        if packed_by_gptq:
            is_packed = id(module) in layers and (not chosen or name.endswith(tuple(chosen)))
        else:
            is_packed = should_convert_module(name, kept)
        if is_packed:
            shape = module.weight.shape if isinstance(module, Conv1D) else module.weight.shape[::-1]
            new = kind(*shape, bits=settings["bits"], group_size=settings["group_size"], bias=module.bias is not None)
            model.set_submodule(name, new)
    model.quantization_method = settings["quant_method"]  # as transformers' loader, for PEFT


def packed_weights(model: nn.Module) -> dict[str, tuple[int, int]]:
    """The shapes (O, I) of the weights in packed layers, by the names of the buffers that contain them."""
    layers = ((f"{path}." if path else "", m) for path, m in model.named_modules() if isinstance(m, PackedLinear))
    return {f"{prefix}qweight": (layer.out_features, layer.in_features) for prefix, layer in layers}


def adapter_layers() -> dict[type[nn.Module], type[nn.Module]]:
    """Packed layer here -> PEFT's adapter layer that wraps gptqmodel's class for it."""
    from peft.tuners.lora.awq import AwqLoraLinear
    from peft.tuners.lora.gptq import GPTQLoraLinear

    return {GptqLinear: GPTQLoraLinear, AwqLinear: AwqLoraLinear}
