"""Group layers into kinds, and select the few layers that must be recorded.

Two layers are of one kind if their code, parameters and settings are the same. A layer's effect on memory also depends on its
neighbours, because it frees tensors that they allocated. So a recorded layer stands for every real layer of its kind whose two
neighbours on each side are of the same kinds.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import nn

from fsdp_advisor.model.profile import Run

RADIUS = 2
_POSITION = re.compile(r"(layer|block)_?(idx|id|index|number|num)$|^training$|^_")


def signature(layer: nn.Module) -> Hashable:
    """A value that is equal for layers of one kind: classes, parameter and buffer shapes, and plain settings except the layer's
    position.
    """
    settings = []
    for name, module in layer.named_modules():
        values = sorted(
            (key, bool(value) if isinstance(value, float) else value)
            for key, value in vars(module).items()
            if (value is None or isinstance(value, (bool, int, str, float))) and not _POSITION.search(key)
        )
        settings.append((name, type(module).__name__, repr(values)))
    tensors = [
        (n, tuple(t.shape), t.dtype, t.requires_grad) for n, t in (*layer.named_parameters(), *layer.named_buffers())
    ]
    return (tuple(settings), tuple(tensors))


def shared_tensors(layers: Sequence[nn.Module]) -> list[Hashable]:
    """A value for each layer that is equal for layers with the same sharing: which of its tensors other layers also have, and for which of
    them it is the first layer.

    A tensor that several layers share belongs to the first of them. PEFT's Lily and VeRA have such matrices.
    """
    users: dict[int, list[int]] = {}
    for i, layer in enumerate(layers):
        for tensor in tensors_of(layer):
            users.setdefault(id(tensor), []).append(i)
    shared = {key: number for number, (key, of) in enumerate(users.items()) if len(of) > 1}
    return [
        tuple((shared[id(t)], users[id(t)][0] == i) for t in tensors_of(layer) if id(t) in shared)
        for i, layer in enumerate(layers)
    ]


def position_of_reused_keys(layer: nn.Module, position: int) -> int | None:
    """The layer's position if its attention reuses keys and values of another layer, else None.

    Backward sums their gradient over all layers that reuse them. So each of these layers frees what the next one of them has allocated,
    even if other layers lie between. Gemma 3n and 4 have such layers.
    """
    return position if any(getattr(module, "is_kv_shared_layer", False) for module in layer.modules()) else None


PASSES = ("n_recurrent_loops", "loop_num_passes")
"""Fields of a configuration with the number of passes through some layers in one forward. Source: transformers 5.24,
models/dory/configuration_dory.py and models/inkling2_loop/configuration_inkling2_loop.py.
"""


def most_passes(model: nn.Module) -> int:
    """How often a forward of the model runs the layers that it runs most often."""
    configs = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    return max((getattr(config, name, None) or 1 for config in configs for name in PASSES), default=1)


def tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """The parameters and registered buffers of a module, each once."""
    yield from module.parameters()
    yield from module.buffers()


def has_backward(model: nn.Module, layers: Sequence[nn.Module]) -> dict[nn.Module, bool]:
    """By layer, whether it has a backward: a parameter of the layer, or of a layer or module before it, is trained."""
    numbers = {id(p): number for number, p in enumerate(model.parameters())}
    first = min((numbers[id(p)] for p in model.parameters() if p.requires_grad), default=len(numbers))
    return {layer: any(numbers[id(p)] >= first for p in layer.parameters()) for layer in layers}


def contexts(kinds: Sequence[int]) -> list[tuple[int, ...]]:
    """Each layer's kind with the kinds of its neighbours; -1 beyond the ends.

    >>> contexts([0, 0])
    [(-1, -1, 0, 0, -1), (-1, 0, 0, -1, -1)]
    """
    padded = [-1] * RADIUS + list(kinds) + [-1] * RADIUS
    return [tuple(padded[i : i + 2 * RADIUS + 1]) for i in range(len(kinds))]


def representatives(kinds: Sequence[int]) -> list[int]:
    """Indices of a short subsequence of layers that still contains every value of `contexts(kinds)`.

    Greedy: where two positions are followed by the same kinds, the layers between them are removed, as long as no context is lost.
    >>> representatives([0] * 32)
    [0, 28, 29, 30, 31]
    """
    kept = list(range(len(kinds)))
    wanted = set(contexts(kinds))
    window = 2 * RADIUS

    def look(indices: list[int], at: int) -> tuple[int, ...]:
        return tuple(kinds[i] for i in indices[at : at + window])

    start = 1  # the first layer stays, so that an alternating pattern begins as in the model
    while start + window <= len(kept):
        here = look(kept, start)
        for end in range(len(kept) - window, start, -1):
            if look(kept, end) == here:
                shorter = kept[:start] + kept[end:]
                if set(contexts([kinds[i] for i in shorter])) == wanted:
                    kept = shorter
                    break
        else:
            start += 1
    return kept


def runs(kinds: Sequence[int], kept: Sequence[int]) -> tuple[Run, ...]:
    """The recorded layer that stands for each real layer, in order, with repeated patterns folded into runs.

    >>> runs([0] * 32, [0, 28, 29, 30, 31])
    (Run(pattern=(0, 1), repeats=1), Run(pattern=(2,), repeats=28), Run(pattern=(3, 4), repeats=1))
    """
    real = contexts(kinds)
    short = contexts([kinds[k] for k in kept])
    recorded = {context: i for i, context in enumerate(short)}
    sequence = [recorded[context] for context in real]
    # events that occur once per stack occur near its ends, so layers there represent only themselves
    for i in range((len(short) + 1) // 2):
        if short[i] != real[i]:
            break
        sequence[i] = i
    for i in range(1, len(short) // 2 + 1):
        if short[-i] != real[-i]:
            break
        sequence[-i] = len(short) - i
    folded: list[Run] = []
    at = 0
    while at < len(sequence):
        best = (1, 1)
        for period in range(1, (len(sequence) - at) // 2 + 1):
            repeats = 1
            while sequence[at + repeats * period : at + (repeats + 1) * period] == sequence[at : at + period]:
                repeats += 1
            if repeats > 1 and period * repeats > best[0] * best[1]:
                best = (period, repeats)
        period, repeats = best
        if repeats == 1 and folded and folded[-1].repeats == 1:
            folded[-1] = Run((*folded[-1].pattern, sequence[at]), 1)
        else:
            folded.append(Run(tuple(sequence[at : at + period]), repeats))
        at += period * repeats
    return tuple(folded)
