"""Values on the simulated GPU. Kernels do nothing, so operators on few or integer elements are repeated on the host.

Device memory is host memory. After PyTorch's own CUDA kernel, which allocates what a GPU would, the CPU's kernel runs on the same
addresses: masks, counts, indices, positions and scalars are correct if their inputs are. This allocates nothing on the device. Values that
follow from large floating-point tensors are unknown; `_assume` writes values with which training continues.

Source of the method: torch.library.get_kernel (torch/library.py), which exists to call the kernel that another one replaces.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from fsdp_advisor.rehearsal.inside import decisions
from fsdp_advisor.rehearsal.inside.decisions import note
from fsdp_advisor.rehearsal.inside.import_hooks import after_import

LARGEST_INTEGERS = 32 << 20
"""Bytes of an integer tensor whose operators are repeated. 4,096 tokens x 8 experts of 128 as one-hot int64 are 32 MiB."""
LARGEST_BOOLS = 1 << 20
"""Bytes of a bool tensor whose operators are repeated: one element per token, but not a mask of tokens x tokens."""
LARGEST_FLOATS = 4 << 10
"""Bytes of a floating-point tensor whose operators are repeated: scalars, and sums over experts or samples."""
LARGEST_MASKS = 256 << 10
"""Bytes of the largest floating-point tensor for which filling, drawing, comparing and converting are repeated: one number for each of
8 x 8,192 tokens.
"""
MOST_EXPERTS = 4096
"""The largest dimension in which a choice is assumed to be a router's choice of experts. Larger dimensions are vocabularies."""
UNKNOWN = 1.5
"""The value of an unknown loss or norm: a plausible loss of a language model, because scripts check their loss."""

COMPARISONS = (
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "isnan",
    "isinf",
    "any",
    "all",
    "logical_not",
    "logical_and",
    "logical_or",
)
REDUCTIONS = (
    "sum", "mean", "norm", "linalg_vector_norm", "_foreach_norm", "dot", "amax", "amin", "prod", "logsumexp", "std", "var",
    "max", "min",
)  # fmt: skip
LOSSES = (
    "nll_loss_forward",
    "nll_loss2d_forward",
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "_ctc_loss",
)
ARITHMETIC = (
    "add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "fmod", "neg", "abs", "sgn", "sign", "clamp", "clamp_min",
    "clamp_max", "minimum", "maximum", "pow", "sqrt", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "log2", "floor",
    "ceil", "round", "trunc", "sigmoid", "tanh", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "logical_xor",
    "bitwise_left_shift", "bitwise_right_shift", "__lshift__", "__rshift__", "addcmul", "addcdiv", "lerp", "_amp_update_scale_",
)  # fmt: skip
INDEXING = (
    "index", "_index_put_impl_", "index_select", "index_add", "index_fill", "index_copy", "gather", "scatter", "scatter_add",
    "scatter_reduce", "masked_fill", "masked_select", "masked_scatter", "where", "tril", "triu", "flip", "roll", "cat", "take",
    "isin", "cumsum", "cumprod", "cummax", "cummin", "aminmax", "_aminmax", "searchsorted", "bucketize", "histc", "bincount",
    "repeat_interleave",
)  # fmt: skip
FILLS = ("fill_", "zero_", "arange", "eye", "linspace", "full", "tril_indices", "triu_indices")
RANDOM = ("random_", "uniform_", "normal_", "exponential_", "randperm", "bernoulli_", "bernoulli")
ASSUMED = frozenset((*COMPARISONS, *REDUCTIONS, *LOSSES))
COPIES = ("aten::copy_",)
"""Operators without a CUDA kernel of their own: they call another one, below the dispatcher."""

WITH_DEVICE_NUMBERS = ("aten::pow.Tensor_Tensor", "aten::pow.Tensor_Tensor_out")
"""Operators that PyTorch calls with a number wrapped as a GPU tensor, which cannot be passed to Python. Source: pow.Scalar in
aten/src/ATen/native/Pow.cpp (2.13).
"""

torch: Any = None
_host_generator: Any = None


def answer_values(module: ModuleType) -> None:
    """Replace the CUDA kernels of small operators and of readings. `module` is torch, which has just been imported."""
    global torch, _host_generator
    torch = module
    if os.environ.get("REHEARSAL_VALUES") == "0" or not (
        hasattr(torch, "library") and hasattr(torch.library, "get_kernel") and torch.version.cuda
    ):
        return
    _host_generator = torch.Generator()
    after_import("torch._dynamo.trace_rules", _leave_uncompiled)
    library = torch.library.Library("aten", "IMPL")
    answer_values.library = library  # type: ignore[attr-defined]  # its kernels live as long as it does
    for name in (*torch._C._dispatch_get_registrations_for_dispatch_key("CUDA"), *COPIES):
        space, _, operator = name.partition("::")
        base = operator.partition(".")[0]
        make = _makers().get(base) or _makers().get(base.removesuffix("_")) if space == "aten" else None
        if make is None or name in WITH_DEVICE_NUMBERS:
            continue
        overload = getattr(getattr(torch.ops.aten, base), operator.partition(".")[2] or "default")
        kernel = _taking_numbers(overload, torch.library.get_kernel(name, "CUDA").call_boxed)
        library.impl(operator, make(overload, kernel), "CUDA", with_keyset=True)


def _leave_uncompiled(rules: ModuleType) -> None:
    """Let torch.compile skip this code, which runs where a graph breaks to read a value. `rules`: torch._dynamo.trace_rules."""
    for name in (__name__, decisions.__name__):
        rules.add(name)


Kernel = Callable[..., Any]


def _makers() -> dict[str, Callable[[Any, Kernel], Kernel]]:
    names = (*COMPARISONS, *REDUCTIONS, *ARITHMETIC, *INDEXING, *FILLS, *RANDOM)
    return dict.fromkeys(names, _repeated) | dict.fromkeys(LOSSES, _assumed) | {
        "_local_scalar_dense": _read, "copy_": _copied, "nonzero": _nonzero, "equal": _equal, "_unique2": _unique,
        "unique_consecutive": _unique, "unique_dim": _unique, "topk": _chosen, "sort": _chosen, "argmax": _chosen,
        "multinomial": _chosen,
    }  # fmt: skip


def _taking_numbers(operator: Any, kernel: Kernel) -> Kernel:
    """A kernel that also takes Python numbers for tensors: PyTorch's wrapped numbers are unwrapped on their way to Python.

    The number is converted to a tensor of the type that promotion of the number and the other tensor gives, so the result's type is the
    same.
    """
    places = [i for i, argument in enumerate(operator._schema.arguments) if str(argument.type) == "Tensor"]
    if len(places) < 2:
        return kernel

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        numbers = [i for i in places if i < len(args) and type(args[i]) in (int, float, bool, complex)]
        if numbers:
            changed = list(args)
            other = next(
                (args[i] for i in reversed(places) if i < len(args) and isinstance(args[i], torch.Tensor)), None
            )
            for i in numbers:
                dtype = None if other is None else torch.result_type(other, args[i])
                changed[i] = torch.scalar_tensor(args[i], dtype=dtype, device="cpu")
            args = tuple(changed)
        return kernel(keys, *args, **kwargs)

    return run


# ---- Operators on few or integer elements


def _repeated(operator: Any, kernel: Kernel) -> Kernel:
    """A kernel whose result has values. The CUDA kernel launches nothing, so the CPU's kernel runs afterwards on the same memory, which
    is host memory in a rehearsal. If the tensors are too large, values are assumed instead.
    """
    name = operator._schema.name.removeprefix("aten::")
    largest = LARGEST_MASKS if name in (*COMPARISONS, *RANDOM, *FILLS) else LARGEST_FLOATS

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        result = kernel(keys, *args, **kwargs)
        if not (
            _are_small(args, largest) and _is_or_are_small(result, largest) and _repeat(operator, args, kwargs, result)
        ):
            _assume(name, args, result)
        return result

    return run


def _assumed(operator: Any, kernel: Kernel) -> Kernel:
    """A kernel whose result has assumed values, because the CUDA kernel launches nothing."""
    name = operator._schema.name.removeprefix("aten::")

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        result = kernel(keys, *args, **kwargs)
        _assume(name, args, result)
        return result

    return run


def _tensors(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _is_small(tensor: Any, largest_floats: int = LARGEST_MASKS) -> bool:
    if tensor.is_floating_point() or tensor.is_complex():
        limit = largest_floats
    else:
        limit = LARGEST_BOOLS if tensor.dtype == torch.bool else LARGEST_INTEGERS
    return bool(tensor.numel() * tensor.element_size() <= limit)


def _are_small(values: Any, largest_floats: int) -> bool:
    for value in values:
        if isinstance(value, torch.Tensor):
            if not _is_small(value, largest_floats):
                return False
        elif isinstance(value, (list, tuple)) and not _are_small(value, largest_floats):
            return False
    return True


def _is_or_are_small(result: Any, largest_floats: int) -> bool:
    return (
        _is_small(result, largest_floats) if isinstance(result, torch.Tensor) else _are_small((result,), largest_floats)
    )


def _repeat(operator: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Run the CPU's kernel on the memory of the arguments and of the CUDA kernel's result. Returns whether it could run."""
    with torch._C.DisableTorchFunction(), contextlib.suppress(Exception):  # an unknown index may be out of range
        made = _on_host(operator, args, kwargs)
        for to, value in zip(_tensors((result,)), _tensors((made,)), strict=True):
            host = _host(to)
            if host.data_ptr() != value.data_ptr():
                host.copy_(value)
        return True
    return False


def _on_host(operator: Any, args: Any, kwargs: Any) -> Any:
    hosted = {name: _host_argument(value) for name, value in kwargs.items()}
    if "device" in hosted:
        hosted["device"] = "cpu"
    if any(argument.name == "generator" for argument in operator._schema.arguments):
        hosted["generator"] = _host_generator
    if operator._schema.name == "aten::histc":  # the CPU has no kernel for integers
        return torch.histc(_host(args[0]).double(), *args[1:])
    return operator(*map(_host_argument, args), **hosted)


def _host_argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _host(value)
    if isinstance(value, (list, tuple)):
        return [_host_argument(each) for each in value]
    return None if isinstance(value, torch.Generator) else value


def _host(tensor: Any) -> Any:
    """A CPU tensor at the address of a tensor on the GPU."""
    if not tensor.is_cuda:
        return tensor.detach()
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    extent = 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    memory = (ctypes.c_char * (extent * tensor.element_size())).from_address(tensor.data_ptr())
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _assume(name: str, args: Any, result: Any) -> None:
    """Write assumed values to a small result that follows from unknown values: UNKNOWN for losses and norms, and for comparisons the
    usual outcome (no number is infinite or NaN).
    """
    if name not in ASSUMED:
        return
    for tensor in _tensors((result,)):
        if not _is_small(tensor):
            continue
        if tensor.dtype == torch.bool:
            same = len(args) > 1 and args[0] is args[1]  # isfinite(x) is (x == x) & (abs(x) != inf)
            _host(tensor).fill_((name in ("all", "ne") and not same) or (name in ("eq", "le", "ge") and same))
        elif tensor.is_floating_point() and name not in COMPARISONS:
            _host(tensor).fill_(UNKNOWN)


# ---- Choices: of experts by a router, of the next token, of samples


def _chosen(operator: Any, kernel: Kernel) -> Kernel:
    """A kernel that runs the CUDA kernel and then, if the values to choose by are unknown, writes evenly spread indices.

    Rows (tokens) choose experts in turn. In a dimension of more than MOST_EXPERTS elements the choice is from its middle, where a
    vocabulary has no special tokens.
    """
    name = operator._schema.name.removeprefix("aten::")

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        result = kernel(keys, *args, **kwargs)
        tensors = [t for t in _tensors((result,)) if t.dtype == torch.int64]
        source = args[0]
        if not source.is_floating_point():
            if _is_small(source):
                _repeat(operator, args, kwargs, result)
        elif tensors and tensors[-1].numel() and _is_small(tensors[-1]):
            arguments = dict(zip((a.name for a in operator._schema.arguments), args, strict=False)) | kwargs
            _spread(tensors[-1], source, arguments.get("dim", -1), bool(arguments.get("keepdim", name != "argmax")))
            note(name, "chosen evenly")
        return result

    return run


def _spread(indices: Any, source: Any, dim: int | None, keeps_dim: bool) -> None:
    with torch._C.DisableTorchFunction(), contextlib.suppress(Exception):
        host = _host(indices)
        if dim is None or source.dim() == 0:
            host.zero_()
            return
        size = source.shape[dim]
        rows = host.movedim(dim, -1) if keeps_dim else host.unsqueeze(-1)
        chosen = rows.shape[-1]
        of_row = torch.arange(rows.numel() // chosen, device="cpu").view(rows.shape[:-1]).unsqueeze(-1)
        first = of_row * (chosen if chosen < size else 1) if size <= MOST_EXPERTS else size // 2 + of_row * 0
        rows.copy_((first + torch.arange(chosen, device="cpu")) % size)


# ---- Readings by the host


def _read(operator: Any, kernel: Kernel) -> Kernel:
    def run(keys: Any, tensor: Any) -> Any:
        value = kernel(keys, tensor)
        if isinstance(value, float) and not math.isfinite(value):
            value = UNKNOWN
        note("item()", value if isinstance(value, (bool, int, float)) else str(value))
        return value

    return run


def _copied(operator: Any, kernel: Kernel) -> Kernel:
    """A kernel for copies. A copy between types or layouts is repeated on the host; a copy to the host counts as a reading."""

    def run(keys: Any, to: Any, source: Any, non_blocking: bool = False) -> Any:
        result = kernel(keys, to, source, non_blocking)
        if not (_is_small(source) and _is_small(to)):
            return result
        floats = to.is_floating_point() and source.is_floating_point()
        if (to.dtype != source.dtype or not (to.is_contiguous() and source.is_contiguous())) and (
            not floats or _is_small(to, LARGEST_FLOATS)
        ):
            _repeat(operator, (to, source), {}, result)
        if source.is_cuda and not to.is_cuda:
            if to.is_floating_point() and to.element_size() > 1:  # float8 has no nan_to_num
                with torch._C.DisableTorchFunction():
                    to.detach().nan_to_num_(nan=UNKNOWN)
            note("copy to the host", f"{str(source.dtype).removeprefix('torch.')} {list(source.shape)}", in_torch=False)
        return result

    return run


def _equal(operator: Any, kernel: Kernel) -> Kernel:
    def run(keys: Any, first: Any, second: Any) -> Any:
        value = kernel(keys, first, second)
        if _is_small(first) and _is_small(second) and first.is_cuda and second.is_cuda:
            value = torch.equal(_host(first), _host(second))
        note("torch.equal", value)
        return value

    return run


def _nonzero(operator: Any, kernel: Kernel) -> Kernel:
    """A kernel for `nonzero`: the host counts the elements, the CUDA kernel reads this number back, and the host writes their indices."""
    answer_next = ctypes.CDLL(None).rehearsal_answer_next

    def run(keys: Any, tensor: Any, **kwargs: Any) -> Any:
        if not _is_small(tensor):
            found = kernel(keys, tensor, **kwargs)
            note("nonzero", f"none of {tensor.numel()} (too many to compute)")
            return found
        indices = _host(tensor).nonzero()
        count = ctypes.c_int32(len(indices))
        answer_next(ctypes.byref(count), ctypes.c_size_t(4))
        result = kernel(keys, tensor, **kwargs)
        answer_next(None, ctypes.c_size_t(0))
        if result.shape == indices.shape:
            _host(result).copy_(indices)
        note("nonzero", f"{len(indices)} of {tensor.numel()}")
        return result

    return run


def _unique(operator: Any, kernel: Kernel) -> Kernel:
    """A kernel that copies the CPU kernel's results to new tensors on the GPU. The CUDA kernel would read back sizes that were never
    computed.
    """

    def run(keys: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_small(args[0]):
            return kernel(keys, *args, **kwargs)
        made = _on_host(operator, args, kwargs)
        results = tuple(torch.empty(t.shape, dtype=t.dtype, device=args[0].device) for t in made)
        for result, value in zip(results, made, strict=True):
            _host(result).copy_(value)
        note("unique", f"{len(made[0])} of {args[0].numel()}")
        return results

    return run
