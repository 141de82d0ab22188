"""Minimal versions of the training engines' hooks that change the autograd graph.

FSDP2 casts a unit's floating-point inputs and puts an autograd function on them. FSDP1 makes every parameter a view of one flat
parameter, so a unit's gradients are concatenated before they are reduced. DDP and DeepSpeed do not change the graph. The recorder
runs a model under these hooks, so that lifetimes on the tape are those under the engine.
Source: torch.distributed.fsdp._fully_shard._fsdp_param_group / _fsdp_state and torch.distributed.fsdp._flat_param (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint


class _OnInputGradients(torch.autograd.Function):
    """FSDP2's RegisterPostBackwardFunction: the identity, which makes a call when the gradients of all its inputs are ready."""

    @staticmethod
    def forward(ctx: Any, call: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.call()
        return (None, *grads)


def watch_input_gradients(
    args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return `args` and `kwargs` with `_OnInputGradients` applied to every tensor that requires a gradient."""
    leaves, spec = tree_flatten((args, kwargs))
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if at:
        outputs = _OnInputGradients.apply(call, *(leaves[i] for i in at))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        for i, output in zip(at, outputs, strict=True):
            leaves[i] = output
    args, kwargs = tree_unflatten(leaves, spec)
    return args, kwargs


def cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    """Every floating-point tensor of `tree` in `dtype` (FSDP's `cast_forward_inputs`)."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return tree_map(cast, tree)


def checkpoint_layers(layers: Iterable[nn.Module]) -> None:
    """Checkpoint layers as accelerate does: within their units, so recomputation does not run a unit's hooks again.

    Source: accelerate/accelerator.py, `apply_activation_checkpointing` with `CheckpointImpl.NO_REENTRANT`.
    """
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)


class AdapterShards:
    """The fp32 shards of an FSDP2 unit that is a module of an adapter. PEFT casts the module's input to their dtype, and DoRA reads
    their shape, which is that of the whole parameters.

    Source: peft 0.21, tuners/lora/layer.py, `_cast_input_dtype`; tuners/lora/dora.py, `DoraLinearLayer.forward`.
    """

    def __init__(self, module: nn.Module) -> None:
        """Replace the module's parameters by shards until `use_gathered` is called."""
        self._module = module
        self._gathered = dict(module._parameters)
        self._shards = {
            n: nn.Parameter(torch.empty(()).expand(p.shape)) for n, p in self._gathered.items() if p is not None
        }
        self.use_shards()

    def use_gathered(self) -> None:
        self._module._parameters.update(self._gathered)

    def use_shards(self) -> None:
        self._module._parameters.update(self._shards)


class FlatUnit:
    """FSDP1's flat parameter of one unit. Parameters are views of it, which with `use_orig_params` are aligned to 16 bytes."""

    def __init__(
        self,
        owners: list[tuple[nn.Module, str]],
        parameters: list[nn.Parameter],
        stored: torch.dtype,
        *,
        use_orig_params: bool,
    ) -> None:
        """Make the flat parameter. `owners`: the (module, attribute) pairs of the parameters, tied ones after the first; `parameters`
        give the shapes. `stored`: the dtype of the shards.
        """
        self._shapes = [p.shape for p in parameters]
        self._places: list[list[tuple[nn.Module, str]]] = [[] for _ in parameters]
        index = {id(p): i for i, p in enumerate(parameters)}
        for module, name in owners:
            parameter = module._parameters.pop(name)
            self._places[index[id(parameter)]].append((module, name))
        dtype = parameters[0].dtype
        self._splits, self._is_padding = aligned_splits(
            [p.numel() for p in parameters], alignment(dtype.itemsize) if use_orig_params else 1
        )
        self.has_views = False
        self._registers = use_orig_params
        is_trained = any(p.requires_grad for p in parameters)
        # Without `use_orig_params` modules keep the last views, whose memory is freed
        views = [torch.empty(shape, dtype=dtype) for shape in self._shapes]
        self._ungathered = [torch.empty(0, dtype=stored)] * len(views) if use_orig_params else views
        self.flat = nn.Parameter(torch.empty(sum(self._splits), dtype=dtype), requires_grad=is_trained)

    def use_views(self, on_gradient: Callable[[torch.Tensor | None], None]) -> None:
        """Set every parameter attribute to a view of the flat parameter, as FSDP1 does before a unit's forward. With `use_orig_params` the
        views also count as the module's parameters, through which AdaLoRA finds its matrices.

        Source: torch 2.13, fsdp/_flat_param.py, `_use_unsharded_views`.
        """
        self.has_views = True
        splits = torch.split(self.flat, self._splits)
        views = (split for split, padding in zip(splits, self._is_padding, strict=True) if not padding)
        for split, shape, places in zip(views, self._shapes, self._places, strict=True):
            view = split.view(shape)
            if view.requires_grad:
                view.register_hook(on_gradient)
            for module, name in places:
                module.__dict__[name] = view
                if self._registers:
                    module._parameters[name] = view  # type: ignore[assignment]  # not a Parameter

    def use_shards(self) -> None:
        """Set every parameter attribute to what it is while the unit is not gathered. The code around the unit may read its dtype."""
        self.has_views = False
        for tensor, places in zip(self._ungathered, self._places, strict=True):
            for module, name in places:
                module.__dict__[name] = tensor
                module._parameters.pop(name, None)


def alignment(itemsize: int) -> int:
    """FSDP1 with `use_orig_params` aligns parameters to a multiple of this number of elements.

    Source: `_get_aligned_numel` (torch 2.13).
    """
    return 16 // itemsize


def aligned_splits(numels: list[int], aligned: int) -> tuple[list[int], list[bool]]:
    """Element counts of FSDP1's flat parameter, with padding between parameters to multiples of `aligned` elements.

    Source: FlatParamHandle._init_flat_param_and_metadata (torch 2.13).
    >>> aligned_splits([3, 8], 4)
    ([3, 1, 8], [False, True, False])
    """
    splits: list[int] = []
    padding: list[bool] = []
    total = 0
    for numel in numels:
        if gap := -total % aligned:
            splits.append(gap)
            padding.append(True)
            total += gap
        splits.append(numel)
        padding.append(False)
        total += numel
    return splits, padding
