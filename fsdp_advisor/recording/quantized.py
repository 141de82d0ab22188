"""A model whose frozen linear layers bitsandbytes stores in 4 or 8 bits, for recording on a machine without a GPU.

`quantize` makes the same layers as transformers and bitsandbytes, on the meta device. In `as_on_cuda` they make the same allocations as on
a GPU. Sources: transformers 5.23 quantizers/base.py, integrations/bitsandbytes.py; bitsandbytes 0.50.2 backends/cuda/ops.py,
backends/default/ops.py, autograd/_functions.py.

A layer in 4 bits multiplies by a copy of the weight in its compute dtype, which lives as long as the product. Backward makes the copy
again, in the dtype that the weight had before it was quantized. If a GPU multiplies at most 1,536 rows, bitsandbytes may use a kernel
that makes no copy in forward, depending on the sizes and on the GPU (`_gemm_4bit_use_custom_cuda`). It is not modelled: forward
then allocates less, backward the same.

A layer in 8 bits keeps its input for backward, although it does not need it.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import nn

from fsdp_advisor.errors import ADAPTERS_EXTRA, MissingExtra
from fsdp_advisor.model.quantization import Quantization

PACKED = ("Params4bit", "Int8Params")
"""bitsandbytes' classes of quantized parameters."""
UNPACKING = ("bitsandbytes::dequantize_4bit", "fsdp_advisor::dequantize_packed")
"""The operators that return a whole packed weight in the dtype of a product."""
COPIES_OF_WEIGHTS = ("aten::_to_copy", "aten::mul")
"""The operators that scale a weight of 8 bits, or cast a weight that was unpacked, into a new tensor."""


# The model


def quantize(model: nn.Module, settings: Quantization) -> None:
    """Replace the layers that transformers' loader would quantize, in place. The model is on the meta device.

    The weights' dtype is that of the checkpoint that is loaded: backward computes in it. Raises MissingExtra without bitsandbytes.
    """
    bnb = _bitsandbytes()
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear
    from transformers.quantizers.base import HfQuantizer

    is_4bit = settings.method == "bnb_4bit"
    config = BitsAndBytesConfig(
        load_in_4bit=is_4bit,
        load_in_8bit=not is_4bit,
        bnb_4bit_quant_type=settings.quant_type,
        bnb_4bit_use_double_quant=settings.nested,
        bnb_4bit_quant_storage=settings.storage_dtype,
        bnb_4bit_compute_dtype=settings.compute_dtype,
    )
    pretrained: Any = model  # a PreTrainedModel
    before = dict(model.named_modules())
    skipped = HfQuantizer.get_modules_to_not_convert(
        pretrained, config.llm_int8_skip_modules, pretrained._keep_in_fp32_modules
    )
    replace_with_bnb_linear(model, modules_to_not_convert=skipped, quantization_config=config)
    for name, module in model.named_modules():
        replaced = before[name]
        if module is replaced:
            continue
        weight, bias = replaced.weight, replaced.bias
        assert isinstance(weight, nn.Parameter)
        if isinstance(bias, nn.Parameter):
            module.bias = nn.Parameter(torch.empty_like(bias), requires_grad=False)
        shape = (module.out_features, module.in_features)  # also for GPT-2's Conv1D, whose weight is transposed
        _quantize_weight(bnb, module, torch.empty(shape, dtype=weight.dtype, device="meta"))
        if is_4bit:
            module.support_avx512bf16_for_cpu = False
        setattr(module, "_is_hf_initialized", True)  # noqa: B010  # transformers' own mark, unknown to nn.Module
    setattr(model, "is_loaded_in_4bit" if is_4bit else "is_loaded_in_8bit", True)
    if settings.experts:
        _quantize_experts(bnb, model, settings)


def _quantize_experts(bnb: Any, model: nn.Module, settings: Quantization) -> None:
    """Pack the weights of experts that are one parameter of three dimensions. The parameter is unpacked each time that the module reads
    it, once in a forward.

    Source: axolotl 0.19, monkeypatch/moe_quant.py, `_patched_set_param_for_module`; bitsandbytes 0.50.2, nn/parametrize.py.
    """
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    for path, module in list(model.named_modules()):
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.dim() < 3 or "expert" not in f"{path}.{name}".lower():
                continue
            with mock.patch.dict(bnb.functional.name2qmap):
                replace_parameter_4bit(
                    module, name, compress_statistics=settings.nested, quant_type=settings.quant_type
                )
            parametrized: Any = module
            packed = parametrized.parametrizations[name]
            packed.original.quant_state = packed[0].quant_state


def _quantize_weight(bnb: Any, module: Any, weight: torch.Tensor) -> None:
    """Set a layer's weight to the quantized `weight`, as bitsandbytes does when a weight is moved to a GPU."""
    old = module.weight
    if isinstance(module, bnb.nn.Linear4bit):
        # a table of values that bitsandbytes keeps, here on the meta device
        with mock.patch.dict(bnb.functional.name2qmap):
            data, state = bnb.functional.quantize_4bit(
                weight, blocksize=old.blocksize, compress_statistics=old.compress_statistics, quant_type=old.quant_type,
                quant_storage=old.quant_storage,
            )  # fmt: skip
        module.weight = bnb.nn.Params4bit(
            data, quant_state=state, blocksize=old.blocksize, compress_statistics=old.compress_statistics,
            quant_type=old.quant_type, quant_storage=old.quant_storage, module=module, bnb_quantized=True,
        )  # fmt: skip
        module.quant_state = state
    else:
        data, scales, _ = bnb.functional.int8_vectorwise_quant(weight.to(torch.float16))
        module.weight = bnb.nn.Int8Params(data, requires_grad=False, CB=data, SCB=scales)


def prepare_for_training(model: nn.Module) -> None:
    """Freeze all parameters, and store those of 16 bits that are not quantized in fp32, as PEFT's
    `prepare_model_for_kbit_training`.

    Whether the model checkpoints its layers is not changed. A bias gets the dtype that the first forward of its layer in 4 bits
    gives it.
    """
    import peft

    peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # type: ignore[no-untyped-call]  # peft's
    module: Any
    for module in model.modules():
        if _is_4bit(module) and getattr(module, "bias", None) is not None and module.compute_dtype is not None:
            module.bias.data = module.bias.data.to(module.compute_dtype)


def set_compute_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Let layers in 4 bits unpack their weights and compute in `dtype`, as if the model was loaded in it."""
    module: Any
    for module in filter(_is_4bit, model.modules()):
        module.compute_dtype = module.quant_state.dtype = dtype
        if getattr(module, "bias", None) is not None:
            module.bias.data = module.bias.data.to(dtype)


# Queries of the recorder


def is_packed(parameter: torch.Tensor) -> bool:
    """Whether a parameter stores a packed quantized weight. Its dtype is a storage dtype, and casts do not change it."""
    return type(parameter).__name__ in PACKED or packed_shape(parameter) is not None


def packed_shape(parameter: Any) -> tuple[int, ...] | None:
    """The shape of the weight before it was packed; None if the parameter is not packed."""
    state = getattr(parameter, "quant_state", None)
    return None if state is None else tuple(state.shape)


def state_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name in a checkpoint and the tensor of each quantization constant: scales and value tables (`absmax`, `code`, `SCB`).
    In a model with packed experts those of a parameter are under the name of the module that unpacks it.

    They are neither parameters nor registered buffers.
    """
    layer: Any
    for path, layer in module.named_modules():
        prefix = f"{path}." if path else ""
        if _is_4bit(layer):
            owner = f"{prefix}weight" if hasattr(layer, "weight") else path
            yield from ((f"{owner}.{name}", tensor) for name, tensor in _tensors_of(layer.quant_state))
        elif _is_8bit(layer):
            yield f"{prefix}SCB", layer.weight.SCB if layer.state.SCB is None else layer.state.SCB


def materialise_states(model: nn.Module) -> None:
    """Replace the tensors of `state_tensors` in quantized layers by new CPU tensors. Call it after the parameters were replaced."""

    def new(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")

    layer: Any
    for layer in model.modules():
        if _is_4bit(layer):
            state = copy.copy(layer.quant_state)
            state.absmax, state.code = new(state.absmax), new(state.code)
            if state.nested:
                state.offset, state.state2 = new(state.offset), copy.copy(state.state2)
                state.state2.absmax, state.state2.code = new(state.state2.absmax), new(state.state2.code)
            layer.quant_state = state
            if hasattr(layer, "weight"):
                layer.weight.quant_state = state
        elif _is_8bit(layer):  # as after the first forward, which moves the tensors from the weight to the layer
            shape = (layer.out_features,)
            layer.state = copy.copy(layer.state)
            layer.state.CB, layer.state.SCB = layer.weight.data, torch.empty(shape, dtype=torch.float32, device="cpu")
            layer.weight.CB = layer.weight.SCB = None


def _is_4bit(module: Any) -> bool:
    return getattr(module, "quant_state", None) is not None


def _is_8bit(module: Any) -> bool:
    return type(getattr(module, "state", None)).__name__ == "MatmulLtState"


def _tensors_of(state: Any) -> Iterator[tuple[str, torch.Tensor]]:
    yield "absmax", state.absmax
    yield "quant_map", state.code
    if state.nested:
        yield "nested_offset", state.offset
        yield "nested_absmax", state.state2.absmax
        yield "nested_quant_map", state.state2.code


# The step


@contextlib.contextmanager
def readable_weights() -> Iterator[None]:
    """Context in which DoRA can read packed weights that are fake tensors, and layers find their quantization settings.

    In each forward DoRA computes the norm of an unpacked copy of the weight. The copy has the dtype that the weight had before it was
    quantized to 4 bits, or fp32 for 8 bits. PEFT recognizes packed weights by their classes, but an engine replaces them by views of
    another class, which also lack bitsandbytes' attributes.
    """
    with contextlib.ExitStack() as patches:
        if dora := sys.modules.get("peft.tuners.lora.dora"):
            patches.enter_context(mock.patch.object(dora, "dequantize_module_weight", _weight_of))
        if layers := sys.modules.get("bitsandbytes.nn.modules"):
            patches.enter_context(
                mock.patch.object(layers, "fix_4bit_weight_quant_state_from_module", _set_state_of_weight)
            )
        yield


@contextlib.contextmanager
def as_on_cuda() -> Iterator[None]:
    """Context in which bitsandbytes' layers run on CPU tensors as on CUDA. It does nothing before a model was quantized."""
    if "bitsandbytes" not in sys.modules:
        yield
        return
    bnb = _bitsandbytes()
    operators: dict[str, Callable[..., Any]] = {
        "gemm_4bit": _gemm_4bit,
        "int8_vectorwise_quant": _int8_vectorwise_quant,
        "int8_mixed_scaled_mm": _int8_mixed_scaled_mm,
        "int8_scaled_mm": _int8_scaled_mm,
        "int8_mm_dequant": _int8_mm_dequant,
        "int8_vectorwise_dequant": _int8_vectorwise_dequant,
    }
    library = torch.library.Library("bitsandbytes", "IMPL", "AutogradCPU")
    try:
        for name, kernel in operators.items():
            library.impl(name, _unless_traced(name, kernel))
        with mock.patch.object(bnb, "matmul", _matmul_8bit):
            yield
    finally:
        library._destroy()


def _unless_traced(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of an operator, or the operator itself where AOTAutograd traces a graph, which keeps it: compiled code then calls it."""
    operator = getattr(torch.ops.bitsandbytes, name).default

    def run(*args: Any, **kwargs: Any) -> Any:
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL) is None:
            return kernel(*args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args, **kwargs)

    return run


def _bitsandbytes() -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it warns that an optional CPU package is missing
    try:
        with nothing_compiled():
            import bitsandbytes
    except ImportError as error:
        raise MissingExtra(
            "recording a quantized base needs bitsandbytes",
            extra=ADAPTERS_EXTRA,
        ) from error
    # it warns about each cast of an input
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    return bitsandbytes


def _set_state_of_weight(layer: Any) -> None:
    """Replaces bitsandbytes' function that makes a `Params4bit` of a weight that an engine replaced by a view. A fake tensor cannot
    become one.
    """
    if getattr(layer.weight, "quant_state", None) is None:
        layer.weight.quant_state = layer.quant_state


def _weight_of(layer: Any) -> torch.Tensor:
    """Replaces `peft.utils.integrations.dequantize_module_weight`: the unpacked weight of a layer."""
    functional = _bitsandbytes().functional
    weight: torch.Tensor = layer.weight
    if _is_4bit(layer):
        weight = functional.dequantize_4bit(weight.data, layer.quant_state)
    elif _is_8bit(layer):
        weight = functional.int8_vectorwise_dequant(weight.data, layer.state.SCB)
    return weight


def _matmul_8bit(
    A: torch.Tensor,
    B: torch.Tensor,
    out: torch.Tensor | None = None,
    state: Any = None,
    threshold: float = 0.0,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`bitsandbytes.matmul` as for CUDA tensors. For CPU tensors bitsandbytes uses another function."""
    from bitsandbytes.autograd._functions import MatMul8bitLt

    if threshold > 0:
        state.threshold = threshold
    product: torch.Tensor = MatMul8bitLt.apply(A, B, out, bias, state)  # type: ignore[no-untyped-call]  # torch's
    return product


# The operators of backends/cuda/ops.py, with the tensors inside them. A kernel's own work is one operator with the same name.


def _gemm_4bit(
    A: torch.Tensor,
    B: torch.Tensor,
    shapeB: Sequence[int],
    absmax: torch.Tensor,
    blocksize: int,
    quant_type: str,
    bias: torch.Tensor | None = None,
    absmax_8bit: torch.Tensor | None = None,
    absmax_code: torch.Tensor | None = None,
    absmax_offset: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product A B^T as `_dequant_linear_fallback` computes it. A has shape (..., K), B contains a packed weight of shape (N, K)."""
    operators = torch.ops.bitsandbytes
    if absmax_8bit is not None:
        scales = operators.dequantize_blockwise.default(absmax_8bit, absmax, absmax_code, 256, torch.float32)
        absmax = scales + absmax_offset
    weight = operators.dequantize_4bit.default(B, absmax, blocksize, quant_type, shapeB, A.dtype)
    return torch.nn.functional.linear(A, weight, bias)


def _int8_vectorwise_quant(
    A: torch.Tensor, threshold: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The input in 8 bits, its scales, and None for the indices of outlier columns, which have a value of 6 or more (`llm_int8_threshold`).

    Outlier columns are multiplied in half precision. Their number depends on the data, so none are assumed. Each would add a column of the
    input, and temporarily a column of the weight.
    """
    rows = A.numel() // A.shape[-1]
    scales = torch.empty(rows, device=A.device, dtype=torch.float32)
    quantized = torch.empty(A.shape, device=A.device, dtype=torch.int8)
    columns = None
    if threshold > 0:
        outliers = A.abs() >= threshold
        outliers.any()
        columns = torch.empty(0, device=A.device, dtype=torch.int64)
    return quantized, scales, columns


def _int8_mixed_scaled_mm(
    A: torch.Tensor,
    CA: torch.Tensor,
    CB: torch.Tensor,
    SCA: torch.Tensor,
    SCB: torch.Tensor,
    outlier_cols: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    columns = torch.empty(0, device=A.device, dtype=A.dtype)
    output = torch.ops.bitsandbytes.int8_scaled_mm.default(CA, CB, SCA, SCB, bias=bias, dtype=A.dtype)
    return output, columns


def _int8_scaled_mm(
    A: torch.Tensor,
    B: torch.Tensor,
    row_stats: torch.Tensor,
    col_stats: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    product = torch.ops.bitsandbytes.int8_linear_matmul.default(A, B)
    scaled: torch.Tensor = torch.ops.bitsandbytes.int8_mm_dequant.default(
        product, row_stats, col_stats, dtype=dtype or torch.float16, bias=bias
    )
    return scaled


def _int8_mm_dequant(
    A: torch.Tensor,
    row_stats: torch.Tensor,
    col_stats: torch.Tensor,
    dtype: torch.dtype | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.empty_like(A, dtype=torch.float16)
    if bias is not None and bias.dtype != torch.float16:
        out.add_(bias)
    return out.to(dtype or torch.float16)


def _int8_vectorwise_dequant(A: torch.Tensor, stats: torch.Tensor) -> torch.Tensor:
    return A * stats.view(-1, 1) * (1 / 127)


@contextlib.contextmanager
def nothing_compiled() -> Iterator[None]:
    """Context in which `torch.compile` returns functions uncompiled, for packages that compile functions while they are imported.

    bitsandbytes compiles its CPU kernels (backends/default/ops.py), which loads Inductor and takes 3 seconds. Fake tensors can run the
    functions uncompiled.
    """
    with mock.patch.object(torch, "compile", lambda function=None, **_: function or (lambda each: each)):
        yield
