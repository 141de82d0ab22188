"""A tape: the record of one training step of a model on one device, as pure data.

It has the allocations and frees of tensor storages in order, with sizes as polynomials in the micro-batch B, the sequence length T and
the number of chunks into which the code divides a sequence.

Shapes: B = micro-batch (sequences), T = tokens per sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Literal, NamedTuple, cast

MONOMIALS = ("1", "B", "T", "BT", "BT2", "T2")
Polynomial = tuple[int, int, int, int, int, int]
ZERO: Polynomial = (0, 0, 0, 0, 0, 0)

ROOT = -1
"""The unit index of the root: the parameters outside all layers (embedding, final norm, head)."""


class Chunked(NamedTuple):
    """Bytes or FLOPs of code that divides a sequence into chunks of `chunk` tokens, the last of which is padded.

    `of_tokens` is a polynomial in B and T, `of_chunks` one in B and the number of chunks, ceil(T / chunk).
    """

    chunk: int
    of_tokens: Polynomial
    of_chunks: Polynomial


Quantity = Polynomial | Chunked
"""Bytes or FLOPs as a function of B and T."""


def value_at(quantity: Quantity, b: int, t: int) -> int:
    """The value of a quantity at micro-batch `b` and `t` tokens. A polynomial is over ``MONOMIALS``.

    >>> value_at((1, 0, 0, 2, 0, 0), b=3, t=5)
    31
    >>> value_at(Chunked(64, of_tokens=(0, 0, 0, 2, 0, 0), of_chunks=(0, 0, 0, 100, 0, 0)), b=3, t=65)
    990
    """
    if isinstance(quantity, Chunked):
        chunks = -(-t // quantity.chunk)
        return value_at(quantity.of_tokens, b, t) + value_at(quantity.of_chunks, b, chunks)
    c1, cb, ct, cbt, cbt2, ct2 = quantity
    return c1 + cb * b + t * (ct + cbt * b + t * (cbt2 * b + ct2))


def total(quantities: Iterable[Quantity]) -> Quantity | None:
    """The sum of quantities; None if they have chunks of several sizes."""
    tokens, chunks, sizes = [ZERO], [ZERO], set()
    for quantity in quantities:
        if isinstance(quantity, Chunked):
            sizes.add(quantity.chunk)
            tokens.append(quantity.of_tokens)
            chunks.append(quantity.of_chunks)
        else:
            tokens.append(quantity)
    if len(sizes) > 1:
        return None
    of_tokens, of_chunks = (cast(Polynomial, tuple(map(sum, zip(*terms, strict=True)))) for terms in (tokens, chunks))
    return Chunked(sizes.pop(), of_tokens, of_chunks) if sizes else of_tokens


class Staging(NamedTuple):
    """The size of the workspace in which a GPU sums `rows` rows of `columns` elements (`program.reduction_workspace`)."""

    rows: Quantity
    columns: Quantity


class Tiled(NamedTuple):
    """The size of a storage with one row for each token of a tile. A loss divides the tokens that it scores into tiles.

    `scored`: the scored tokens of each sequence; 0: all but `unscored` of them, without the fraction `ignored`. `most`: the largest number
    of tokens of a tile; 0: the scored tokens of all sequences divided by `parts`, rounded up to a power of two. `second_bytes`: the bytes
    that are needed only if there is a second tile.
    """

    bytes_per_token: int
    unscored: int
    scored: int
    most: int
    parts: int
    ignored: float = 0.0
    second_bytes: int = 0

    def bytes_at(self, b: int, t: int) -> int:
        """Bytes at micro-batch `b` and `t` tokens.

        >>> Tiled(10, unscored=1, scored=0, most=4096, parts=0).bytes_at(2, 101), Tiled(10, 0, 0, 0, parts=63).bytes_at(2, 4096)
        (2000, 2560)
        >>> [Tiled(0, unscored=1, scored=0, most=4096, parts=0, second_bytes=5).bytes_at(2, t) for t in (2049, 2050)]
        [0, 5]
        """
        tokens = b * self.scored or b * (t - self.unscored) - int(b * (t - self.unscored) * self.ignored)
        tile = self.most or 1 << (-(-tokens // self.parts) - 1).bit_length()
        return self.bytes_per_token * min(tile, tokens) + (self.second_bytes if tokens > tile else 0)


MULTIPROCESSORS = 132
"""Multiprocessors of an H100. It is assumed where kernels divide their work by this number and the size of a storage depends on it."""


class Parts(NamedTuple):
    """The parts into which a kernel of a state-space layer divides the sum over the heads of a group, so that all multiprocessors work.

    Each program (thread block) of the kernel sums one part for one group and one chunk of `chunk` tokens. Source: mamba-ssm 2.3,
    ops/triton/ssd_chunk_scan.py, `nsplits`.
    """

    chunk: int
    heads: int
    groups: int

    def at(self, b: int, t: int) -> int:
        """The number of parts at micro-batch `b` and `t` tokens.

        >>> Parts(256, heads=128, groups=1).at(1, 2048), Parts(128, heads=64, groups=8).at(1, 4096)
        (16, 1)
        """
        heads = self.heads // self.groups
        heads_of_a_program = min(-(-b * -(-t // self.chunk) * self.heads // MULTIPROCESSORS), heads)
        return -(-heads // heads_of_a_program)


class Divided(NamedTuple):
    """The size of a storage with one entry for each part of a divided sum (`Parts`)."""

    bytes_of_part: Quantity
    chunk: int
    heads: int
    groups: int

    def bytes_at(self, b: int, t: int) -> int:
        return value_at(self.bytes_of_part, b, t) * Parts(self.chunk, self.heads, self.groups).at(b, t)


Size = Quantity | Staging | Tiled | Divided
"""The size of a storage in bytes."""


class Category(IntEnum):
    """The category of a storage on a tape. Engines add the storages that a tape lacks (states, gathered units, communication)."""

    TEMPORARY = 0  # allocated and freed in one phase
    ACTIVATION = 1  # saved in forward for backward
    LOSS = 2  # the logits and tensors that the loss computes from them
    CAST_PARAMETER = 3  # autocast's copy of a weight
    INPUT = 4  # the batch
    PARTIAL_GRADIENT = 5  # a part of a gradient, which autograd or FSDP1 sums or concatenates into `param.grad`
    SCRATCH = 6  # a kernel's workspace: counts as allocated memory, but not as a tensor
    GRADIENT = 7  # becomes `param.grad`: 7 + 2 * index of the parameter in its unit + (1 if the unit is the root)
    DEQUANTIZED = 65_535  # a copy of a packed weight, unpacked for a product; above all gradients


class Op(IntEnum):
    """The kinds of event on a tape, each with two arguments."""

    ALLOC = 0  # (size, category)
    FREE = 1  # (segment of birth, index among that segment's births)
    PRE_FORWARD = (
        2  # a unit's forward begins: (`MarkedUnit`, 0), or the model's code gathers the unit: (`MarkedUnit`, BY_CODE)
    )
    POST_FORWARD = 3
    PRE_BACKWARD = 4
    POST_BACKWARD = 5
    GRAD_READY = 6  # (parameter, 1 if the root's else 0): its gradient is accumulated into param.grad


BY_CODE = 1
"""The second argument of the mark of a unit that the model's code gathers itself. Its forward does not run."""


class MarkedUnit(IntEnum):
    """The unit of a mark (PRE_FORWARD to POST_BACKWARD). Readers skip marks of units that a plan does not have."""

    LAYER = 0  # the layer to which the segment belongs
    ROOT = 1
    EMBEDDING = 2  # an input embedding that is not tied to the head
    HEAD = 3  # final norm and head, with the embedding if it is tied to the head
    OUTPUTS = 4  # the model's outputs: POST_FORWARD at the end of forward


Event = tuple[int, int, int]

ScoringPhase = Literal[
    "mismatched", "reference_mismatched", "reference", "prefill", "decode", "policy", "evaluate", "logits"
]
"""The phase of a forward without gradients. ``mismatched``: of the trained model on KTO's mismatched completions;
``reference_mismatched``: of the reference model on these; ``reference``: of the reference model on the batch. In GRPO ``prefill``: of
the trained model on prompts, with a cache of keys and values; ``decode``: for the last token of completions; ``policy``: of the trained
model to score completions. ``evaluate``: the Trainer's evaluation. ``logits``: TRL's second forward of it.
"""
TapePhase = Literal["forward", "routers", "backward"] | ScoringPhase
"""The phase of a segment. ``routers``: of the terms of the routers' loss, one for each layer, which the forward ends with."""
REFERENCE_PHASES: tuple[TapePhase, ...] = ("reference", "reference_mismatched")
GENERATION_PHASES: tuple[ScoringPhase, ...] = ("prefill", "decode")
ROLLOUT_PHASES: tuple[ScoringPhase, ...] = (*GENERATION_PHASES, "policy", "reference")
"""The phases of GRPO's tape that generate and score the batch. The other phases train on it."""


class Recomputed(NamedTuple):
    """The work of a layer's backward that repeats its forward, with the units of `Segment`."""

    matmul_flops: Quantity
    attention_flops: Quantity
    traffic_bytes: Quantity
    operators: int


@dataclass(frozen=True)
class Segment:
    """The events between two layer boundaries of the recorded step.

    `stack`, `layer` name the recorded layer, or (ROOT, n) the n-th piece of the root's code.
    `matmul_flops`, `attention_flops`: of matrix products and of attention. `traffic_bytes`: read and written by all other operators.
    `operators`: the number of operators. `recomputed`: the part of this work that repeats a forward; None if all or none of a forward is
    repeated, so that the part was not recorded. `host_copies`: the bytes of each tensor that is copied to host memory in forward, or back
    in backward.
    """

    phase: TapePhase
    stack: int
    layer: int
    events: tuple[Event, ...]
    matmul_flops: Quantity = (0, 0, 0, 0, 0, 0)
    attention_flops: Quantity = (0, 0, 0, 0, 0, 0)
    traffic_bytes: Quantity = (0, 0, 0, 0, 0, 0)
    operators: int = 0
    recomputed: Recomputed | None = None
    host_copies: tuple[Quantity, ...] = ()


@dataclass(frozen=True, eq=False)
class Tape:
    """One recorded training step: segments in the order in which they ran, and sizes (bytes) as polynomials in B and T.

    The size of the workspace of a sum over rows on a GPU is its rows and columns (`Staging`).
    """

    sizes: tuple[Size, ...]
    segments: tuple[Segment, ...]

    def read(self) -> Tape:
        """The tape with all events loaded, for readers that walk them."""
        return self

    @cached_property
    def births(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """For each segment, the (size, category) of each storage that it allocates, in order."""
        return tuple(tuple([(a, b) for op, a, b in s.events if not op]) for s in self.segments)  # Op.ALLOC is 0
