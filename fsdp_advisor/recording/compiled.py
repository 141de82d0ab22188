"""Modules that `torch.compile` compiles for a GPU, for recording on a machine without one.

Dynamo, AOTAutograd with its partitioner, and Inductor are PyTorch's own and run as in training. What differs is the device: graphs are
traced on fake CPU tensors and moved to a GPU that does not exist before Inductor sees them. The Python code that Inductor generates, with
its allocations, reuses and frees, then runs on fake tensors (`generated_code`). Graphs contain the operators of a GPU (`graph_functions`).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch._inductor.compile_fx as inductor
from torch import nn
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._dynamo.device_interface import CudaInterface
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor import scheduler, select_algorithm
from torch._inductor.graph import GraphLowering
from torch._inductor.kernel import mm_grouped
from torch._inductor.runtime.hints import DeviceProperties
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_aggregate
from torch.nn.attention import flex_attention
from torch.utils._python_dispatch import _disable_current_modes

from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.recording.generated_code import empty_strided, load, reinterpret, template

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PROPERTIES = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132, warp_size=32, regs_per_multiprocessor=65536,
    max_threads_per_multi_processor=2048, max_threads_per_block=1024, shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448, shared_memory_per_multiprocessor=233472, L2_cache_size=52428800,
    total_memory=85028765696, gcnArchName="",
)  # fmt: skip
"""The properties of a GPU that Inductor reads. Its heuristics, such as how it splits a sum over many rows, use the number of
multiprocessors.
"""
BUCKET_BYTES = 25 * 2**20
"""The size of DDP's buckets. Source: torch/nn/parallel/distributed.py (torch 2.13), bucket_cap_mb."""
CAPABILITY = (PROPERTIES.major, PROPERTIES.minor)


def compile_modules(modules: Iterable[nn.Module], *, in_ddp: bool, in_one_graph: bool = False) -> None:
    """Compile the forward of each module. Hooks run outside of it, as do those of FSDP2.

    `in_ddp`: whether modules run in the forward of DDP, where Dynamo divides graphs at the boundaries of DDP's buckets.
    Source: torch/_dynamo/convert_frame.py, CatchErrorsWrapper (torch 2.13).
    `in_one_graph`: whether code that breaks the graph of a module is an error (`fullgraph`).
    """
    backend = DDPOptimizer(BUCKET_BYTES, _backend).compile_fn if in_ddp else _backend
    for module in modules:
        module.__dict__[_OUTSIDE_DDP] = torch.compile(module.forward, backend=_backend, fullgraph=in_one_graph)
        module.forward = torch.compile(module.forward, backend=backend, fullgraph=in_one_graph)


_OUTSIDE_DDP = "forward_outside_ddp"
"""The attribute of a compiled module with its forward as compiled without DDP's boundaries."""


@contextlib.contextmanager
def outside_ddp(model: nn.Module) -> Iterator[None]:
    """Context in which the compiled modules of a model run as in one that DDP does not wrap."""
    with contextlib.ExitStack() as contexts:
        for module in model.modules():
            if (forward := module.__dict__.get(_OUTSIDE_DDP)) is not None:
                contexts.enter_context(mock.patch.object(module, "forward", forward))
        yield


def regions(model: nn.Module, layers: Collection[nn.Module]) -> list[nn.Module]:
    """The modules that accelerate's regional compilation compiles: the layers of each ModuleList of one class, and the other modules
    that contain no such list, such as embedding, final norm and head.

    Raises NotRecordable if it compiles a module that contains some of the `layers`, as for a list of layers of several classes.
    Source: accelerate 1.15, utils/other.py, `compile_regions` and `compile_regions_fsdp2`.
    """
    found = _regions(model)
    for region in found:
        if any(module in layers for module in region.modules() if module is not region):
            raise NotRecordable(
                f"accelerate's regional compilation compiles {type(region).__name__} as a whole, because its layers are not a list of "
                "one class",
                hint="use --compile model, or --framework torch",
            )
    return found


def _regions(module: nn.Module) -> list[nn.Module]:
    if _repeats(module):
        return list(module.children())
    if any(_repeats(each) for each in module.modules()):
        return [region for child in module.children() for region in _regions(child)]
    return [module]


def _repeats(module: nn.Module) -> bool:
    """Whether a module is a ModuleList of the class of its first module."""
    return isinstance(module, nn.ModuleList) and len(module) > 0 and all(isinstance(m, type(module[0])) for m in module)


def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, compiled by Dynamo with `_backend`, so that it allocates as Inductor's code on a GPU."""
    compiled: Callable[..., Any] = torch.compile(function, backend=_backend)
    return compiled


@contextlib.contextmanager
def compiler(
    memory_budget: float = 1.0, *, by_accelerate: bool = False, emulates_casts: bool = False
) -> Iterator[None]:
    """Context in which `compile_modules` compiles for a GPU, and the compiled layers run.

    `memory_budget`: AOTAutograd's `activation_memory_budget`, between 0 (only inputs of graphs are kept for backward) and 1.
    `by_accelerate`: whether Dynamo has accelerate's settings for regions under FSDP2. Source: accelerate 1.15, accelerator.py,
    `_prepare_fsdp2`. `emulates_casts`: Inductor's setting `emulate_precision_casts`.
    """
    settings = {"capture_scalar_outputs": True, "skip_fwd_side_effects_in_bwd_under_checkpoint": True}
    torch.overrides.get_overridable_functions()  # fills a cache of PyTorch that Dynamo uses
    # it warns of operators in place in a checkpointed region
    logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    with contextlib.ExitStack() as contexts:
        for owner, changes in _changes().items():
            for name, value in changes.items():
                contexts.enter_context(mock.patch.object(owner, name, value, create=True))
        contexts.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # the compiler's, about its own settings and about code of transformers
        contexts.enter_context(_device_guard())
        contexts.enter_context(functorch_config.patch(activation_memory_budget=memory_budget))
        contexts.enter_context(
            inductor_config.patch(force_disable_caches=True, compile_threads=1, emulate_precision_casts=emulates_casts)
        )
        contexts.enter_context(torch._dynamo.config.patch(settings if by_accelerate else {}))
        _forget()
        try:
            yield
        finally:
            _forget()


@contextlib.contextmanager
def _device_guard() -> Iterator[None]:
    """Context in which fake tensors on the GPU can be written.

    Writing needs a device guard. A build without CUDA lacks CUDA's guard, so the guard of meta tensors, which does nothing, replaces it.
    In a build with CUDA, PyTorch itself replaces CUDA's guard by one that does nothing if there is no GPU.

    Source: c10/core/DeviceType.h; c10/core/impl/DeviceGuardImplInterface.cpp, `ensureCUDADeviceGuardSet` (torch 2.13).
    """
    torch._C._ensureCUDADeviceGuardSet()
    library = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("libc10.*"))))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[_CUDA]
    guards[_CUDA] = before or guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before


_CUDA, _META = 1, 14
"""The numbers of CUDA and meta in PyTorch's enum DeviceType."""


def _forget() -> None:
    """Forget compiled code and the GPU's properties."""
    torch._dynamo.reset()
    DeviceProperties.create.cache_clear()


# The compiler


def _backend(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
    """Inductor as a backend of `torch.compile`, for graphs on the GPU."""
    return inductor.compile_fx(graph, inputs, inner_compile=_compile)


def _compile(graph: torch.fx.GraphModule, inputs: Sequence[Any], **options: Any) -> Any:
    """Compile one graph, AOTAutograd's forward or backward, with Inductor's `compile_fx_inner`."""
    _move(graph, GPU)
    with _disable_current_modes():
        moved = [_moved(tensor, GPU) for tensor in inputs]
    return inductor.compile_fx_inner(graph, moved, **options)


def _partition(*args: Any, **kwargs: Any) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Partition a joint graph into forward and backward. AOTAutograd gets both on the device of the inputs."""
    parts = _partition_of_inductor(*args, **kwargs)
    for graph in parts:
        _move(graph, CPU)
    return parts


def _joint_passes(graph: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> torch.fx.GraphModule:
    """Run Inductor's passes over the joint graph before it is partitioned. They run on the CPU, because they compute constants."""
    changed = _passes(graph, *args, **kwargs)
    _move(changed, GPU)
    return changed


_passes: Callable[..., torch.fx.GraphModule] = inductor._recursive_joint_graph_passes
_partition_of_inductor: Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]] = inductor.partition_fn


def _move(graph: torch.fx.GraphModule, to: torch.device) -> None:
    """Move a graph to a device."""

    def moved(value: Any) -> Any:
        return _moved(value, to)

    with _disable_current_modes():
        for node in graph.graph.nodes:
            node.args, node.kwargs = map_aggregate(node.args, moved), map_aggregate(node.kwargs, moved)
            if "val" in node.meta:
                node.meta["val"] = map_aggregate(node.meta["val"], moved)


def _moved(value: Any, to: torch.device) -> Any:
    """A fake tensor, or a device, moved to `to`. Other values are returned unchanged."""
    if isinstance(value, torch.device):
        return to
    if isinstance(value, FakeTensor) and value.device != to:
        meta = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
        return FakeTensor(value.fake_mode, meta, to)
    return value


class _Generator(torch.Generator):
    """A generator of random numbers on the GPU."""

    device = GPU

    def clone_state(self) -> _Generator:
        return self


class _OnDevice(contextlib.nullcontext[None]):
    """Context in which the GPU is the current one."""


def _changes() -> dict[Any, dict[str, Any]]:
    """By object, the attributes that are replaced while layers are compiled and run, and their replacements."""
    of_gpu: dict[str, Callable[..., Any]] = {
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: PROPERTIES,
        "is_bf16_supported": lambda *_, **__: True,
    }
    interface: dict[str, Callable[..., Any]] = {
        **of_gpu, "is_available": lambda: True, "synchronize": lambda *_: None, "raise_if_triton_unavailable": lambda *_: None,
        "get_compute_capability": lambda *_: 10 * PROPERTIES.major + PROPERTIES.minor,
    }  # fmt: skip
    return {
        torch.cuda: {
            **of_gpu, "get_device_capability": lambda *_: CAPABILITY, "set_device": lambda _: None, "device": _OnDevice,
            "_DeviceGuard": _OnDevice, "_get_generator": lambda _: _Generator(),
            "default_generators": (_Generator(),),
        },
        torch.version: {"cuda": "13.0"},
        torch._C: {"_cuda_getCurrentRawStream": lambda _: 0},
        torch._C._dynamo.guards: {"_empty_strided_cuda": empty_strided, "_reinterpret_tensor": reinterpret},
        CudaInterface: {name: staticmethod(value) for name, value in interface.items()},
        CudaInterface.Worker: {
            name: staticmethod(of_gpu[name]) for name in ("current_device", "get_device_properties")
        },
        inductor: {"_recursive_joint_graph_passes": _joint_passes, "partition_fn": _partition, "get_input_idxs_to_check": lambda *_: []},
        GraphLowering: {"_compile_to_module_lines": load},
        torch.utils._triton: {"triton_hash_with_backend": lambda: ""},
        scheduler: {"has_triton": lambda: True},
        mm_grouped: {"has_triton": lambda: True},
        flex_attention: {"_validate_device": lambda *_: None},
        select_algorithm: {"PyCodeCache": SimpleNamespace(load=template)},
    }  # fmt: skip
