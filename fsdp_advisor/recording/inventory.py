"""The inventory of a model: the parameters and buffers of its recorded layers and of its root, without tapes."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence, Set

import torch
from torch import nn

from fsdp_advisor.model.profile import Buffer, Parameter, ParameterRole, Profile, Stack, Unit
from fsdp_advisor.recording import kinds
from fsdp_advisor.recording.packed import packed_weights
from fsdp_advisor.recording.quantized import is_packed, packed_shape, state_tensors
from fsdp_advisor.recording.roles import parameter_roles
from fsdp_advisor.recording.source import LayerStack, Source

ROTARY = {"inv_freq", "original_inv_freq"}
"""Buffers of rotary embeddings, which transformers has in fp32 whatever the model's dtype."""


def kinds_of_layers(model: nn.Module, stacks: Iterable[LayerStack]) -> dict[str, list[int]]:
    """By path of a stack, a number for each layer; layers of one kind have the same number."""
    has_backward = kinds.has_backward(model, [layer for stack in stacks for layer in stack.layers])
    result = {}
    for stack in stacks:
        shared = kinds.shared_tensors(stack.layers)
        signatures: list[Hashable] = [
            (kinds.signature(layer), has_backward[layer], tensors, kinds.position_of_reused_keys(layer, position))
            for position, (layer, tensors) in enumerate(zip(stack.layers, shared, strict=True))
        ]
        numbers = {signature: number for number, signature in enumerate(dict.fromkeys(signatures))}
        result[stack.path] = [numbers[signature] for signature in signatures]
    return result


def inventory_of(
    model: nn.Module,
    source: Source,
    stacks: Sequence[LayerStack],
    kinds_by_stack: Mapping[str, Sequence[int]],
    recorded: Mapping[str, Sequence[int]],
    replaced: Collection[str],
) -> Profile:
    """The profile of a source's whole `model`.

    `kinds_by_stack`: the result of `kinds_of_layers`. `recorded`: by path of a stack, the indices of the layers to record. `replaced`: the
    names of buffers that a step replaces, which are not states.
    """
    parameters = _Parameters(model, source)
    usual = _usual_buffers(model, source)
    modules = {id(module): name for name, module in model.named_modules()}
    seen: set[int] = set()
    prefixes: list[str] = []
    profile_stacks = []
    for stack in stacks:
        units = []
        for index, layer in enumerate(stack.layers):
            prefix = modules[id(layer)] + "."
            prefixes.append(prefix)
            if index in recorded[stack.path]:
                units.append(parameters.unit(layer, prefix, seen, usual))
            seen |= {id(tensor) for tensor in kinds.tensors_of(layer)}
        runs = kinds.runs(kinds_by_stack[stack.path], recorded[stack.path])
        profile_stacks.append(Stack(stack.path, tuple(units), runs))
    starts = tuple(prefixes)
    of_root = [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in seen]
    return Profile(
        name=source.name,
        task=source.task,
        root=Unit(
            type(model).__name__,
            tuple(parameters.of_root(name, parameter, starts) for name, parameter in of_root),
            tuple(b for b in _buffers(model, seen, usual) if not b.name.startswith(starts) and b.name not in replaced),
        ),
        stacks=tuple(profile_stacks),
        order=_order(model, [modules[id(stack.layers[0])] for stack in stacks], seen),
        max_seq_len=source.max_seq_len,
        config=source.config(),
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """The versions of the packages that determine a recording."""
    import transformers

    return {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}


def _order(model: nn.Module, first_layers: Sequence[str], in_layers: Set[int]) -> tuple[int, ...]:
    """For each stack, the number of the root's parameters before its first layer."""
    order: list[int] = []
    count = 0
    for name, parameter in model.named_parameters():
        if len(order) < len(first_layers) and name.startswith(first_layers[len(order)] + "."):
            order.append(count)
        count += id(parameter) not in in_layers
    return (*order, *[count] * (len(first_layers) - len(order)))


class _Parameters:
    """Describes the parameters of a model."""

    def __init__(self, model: nn.Module, source: Source) -> None:
        self._roles: dict[int, ParameterRole] = parameter_roles(model, source.root_modules(model), source.is_added)
        self._usual_dtype = source.inventory_dtype
        wrappers = [name for name, module in model.named_modules() if type(module).__name__ == "ParamWrapper"]
        of_wrappers = tuple(f"{name}.lora_{matrix}." for name in wrappers for matrix in "AB")
        self._read = {id(p) for name, p in model.named_parameters() if name.startswith(of_wrappers)}
        self._names: dict[int, list[str]] = {}  # several for a tied parameter
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self._names.setdefault(id(parameter), []).append(name)

    def of_root(self, name: str, parameter: nn.Parameter, layer_prefixes: tuple[str, ...]) -> Parameter:
        others = (n for n in self._names[id(parameter)] if n != name and not n.startswith(layer_prefixes))
        return self._parameter(name, parameter, tied=tuple(others))

    def unit(self, layer: nn.Module, prefix: str, seen: Set[int], usual: Set[int]) -> Unit:
        """The unit of a layer. Tensors in `seen` are left out, because earlier layers have them. `usual`: as in `_buffers`."""
        own = tuple(self._of_layer(name, p, prefix) for name, p in layer.named_parameters() if id(p) not in seen)
        return Unit(type(layer).__name__, own, _buffers(layer, seen, usual))

    def _of_layer(self, name: str, parameter: nn.Parameter, prefix: str) -> Parameter:
        names = self._names[id(parameter)]
        inside = [other for other in names if other.startswith(prefix)]
        return self._parameter(
            name,
            parameter,
            tied=tuple(other.removeprefix(prefix) for other in inside if other != prefix + name),
            in_other_layers=len(inside) < len(names),
        )

    def _parameter(
        self, name: str, parameter: nn.Parameter, *, tied: tuple[str, ...], in_other_layers: bool = False
    ) -> Parameter:
        """`dtype` is None if it is the model's usual one. A packed weight always has its dtype."""
        usual = parameter.dtype == self._usual_dtype and not is_packed(parameter)
        return Parameter(
            name,
            tuple(parameter.shape),
            parameter.requires_grad,
            tied,
            self._roles[id(parameter)],
            None if usual else _dtype_name(parameter),
            packed_shape(parameter),
            in_other_layers=in_other_layers,
            module_runs=id(parameter) not in self._read,
        )


def _usual_buffers(model: nn.Module, source: Source) -> set[int]:
    """The buffers, by `id`, whose dtype is that in which the model is built."""
    names = [name for name, buffer in model.named_buffers() if buffer.dtype == source.inventory_dtype]
    if all(name.rpartition(".")[2] in ROTARY for name in names):
        return set()
    other = torch.float32 if source.inventory_dtype != torch.float32 else torch.bfloat16
    own, others = dict(model.named_buffers()), dict(source.build(other).named_buffers())
    return {id(own[name]) for name in names if name in others and others[name].dtype == other}


def _buffers(module: nn.Module, seen: Set[int], usual: Set[int]) -> tuple[Buffer, ...]:
    """The registered buffers of a module that are not in `seen`, and the scales and tables of its quantized layers. `usual`: the buffers
    whose dtype is that in which the model is loaded.
    """
    packed = packed_weights(module)
    return (
        *(
            _buffer(n, b, matrix=packed.get(n), is_usual=id(b) in usual)
            for n, b in module.named_buffers()
            if id(b) not in seen
        ),
        *(_buffer(n, t, registered=False) for n, t in state_tensors(module)),
    )


def _buffer(
    name: str,
    buffer: torch.Tensor,
    *,
    registered: bool = True,
    matrix: tuple[int, int] | None = None,
    is_usual: bool = False,
) -> Buffer:
    dtype, n_bytes = _dtype_name(buffer), buffer.dtype.itemsize
    return Buffer(name, tuple(buffer.shape), dtype, n_bytes, registered, matrix, is_usual)


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
