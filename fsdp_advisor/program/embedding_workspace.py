"""Workspace of CUDA's gradient of an embedding: PyTorch sorts the indices, sums groups of equal ones, and adds the groups to the rows.

The number of groups is limited by the number of indices and by the vocabulary, so the size is not a polynomial in B and T.

Shapes: V = rows of the embedding's weight, D = its columns.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.tape import Category, Chunked, Divided, Event, Op, Polynomial, Staging, Tape, Tiled

UNSORTED = 3072
"""The most indices that are added without a workspace."""
GROUP = 10
"""Indices of a group."""
INDEX_BYTES = 8
ACCUMULATOR_BYTES = 4
"""The sum of a group is fp32."""


def embedding_workspace_bytes(indices: int, rows: int, columns: int) -> tuple[int, ...]:
    """Bytes of the storages that live when the groups of `indices` are added to the gradient of a (rows, columns) weight.

    They are the sorted indices, their order and the first of each run of equal ones; the number of runs; by run its groups, and the first
    of them; the number of groups; by group its first index and its sum. Not modelled: what sorting and counting free before. Source:
    aten/src/ATen/native/cuda/Embedding.cu and EmbeddingBackwardKernel.cu (torch 2.13).

    >>> embedding_workspace_bytes(16384, 32000, 4096)[-2:], embedding_workspace_bytes(3072, 32000, 4096)
    ((144176, 295272448), ())
    """
    if indices <= UNSORTED:
        return ()
    runs = min(indices, rows)
    groups = indices // GROUP + runs
    counts = (indices, indices, indices, 1, runs, runs, 1, groups)
    return (*(INDEX_BYTES * n for n in counts), ACCUMULATOR_BYTES * groups * columns)


class EmbeddingGradient(NamedTuple):
    """The gradient of a (rows, columns) weight for a number of indices that depends on B and T."""

    indices: Polynomial
    rows: int
    columns: int


class _Weight(NamedTuple):
    """A (rows, columns) weight whose gradient has elements of `element_bytes`."""

    rows: int
    columns: int
    element_bytes: int


def embedding_gradients(profile: Profile, tape: Tape) -> dict[tuple[int, int], EmbeddingGradient]:
    """The gradients of embeddings of tokens, by the (segment, event) that allocates them.

    Such a gradient, or a part of it, has the size of the weight, and the next temporary that is freed is the gradient of the output,
    (indices, D) in the same dtype. A head of the same size differs: its backward then allocates the gradient of its input.
    """
    weights = _weights(profile, tape)
    found: dict[tuple[int, int], EmbeddingGradient] = {}
    for number, segment in enumerate(tape.segments):
        for at, (op, size, category) in enumerate(segment.events):
            if segment.phase == "backward" and op == Op.ALLOC and (weight := weights.get((size, category))) is not None:
                indices = _indices(tape, size, segment.events[at + 1 :], weight.columns * weight.element_bytes)
                if indices is not None:
                    found[number, at] = EmbeddingGradient(indices, weight.rows, weight.columns)
    return found


def _weights(profile: Profile, tape: Tape) -> dict[tuple[int, int], _Weight]:
    """The trained embeddings of tokens, by the (size, category) that a gradient, or a part of it, may have on the tape."""
    found: dict[tuple[int, int], _Weight] = {}
    for number, parameter in enumerate(profile.root.parameters):
        named = parameter.role == "embedding" or "embed_tokens" in parameter.name
        if named and parameter.trainable and len(parameter.shape) == 2:  # the embedding of patches is a convolution
            own = Category.GRADIENT + 2 * number + 1
            for element_bytes in (2, 4):
                n_bytes = parameter.elements * element_bytes
                sizes = [index for index, size in enumerate(tape.sizes) if size == (n_bytes, 0, 0, 0, 0, 0)]
                categories = (own, Category.PARTIAL_GRADIENT, Category.TEMPORARY)
                rows, columns = parameter.shape
                found |= {(s, int(c)): _Weight(rows, columns, element_bytes) for s in sizes for c in categories}
    return found


def _indices(tape: Tape, gradient: int, later: Iterable[Event], output_bytes: int) -> Polynomial | None:
    """The number of indices: the first temporary that is freed `later` has `output_bytes` for each.

    None if another operation made the storage of size number `gradient`: one that allocates more, or the sum of two such storages.
    """
    for op, a, b in later:
        if op == Op.ALLOC:
            return None
        if op == Op.FREE:
            index, category = tape.births[a][b]
            size = tape.sizes[index]
            if index == gradient:
                return None
            if category == Category.TEMPORARY and not isinstance(size, (Chunked, Divided, Staging, Tiled)):
                c1, cb, ct, cbt, cbt2, ct2 = (n // output_bytes for n in size)
                return None if any(n % output_bytes for n in size) else (c1, cb, ct, cbt, cbt2, ct2)
    return None
