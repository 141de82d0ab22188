"""A model's profile: all facts about it that determine memory, as pure data.

A profile is an inventory of parameters, grouped into the units that sharded training gathers, and a set of tapes. A tape is
the record of one training step of the model on one device: the allocations and frees of tensor storages in order, with sizes as
polynomials in the micro-batch B and the sequence length T. Layers of one kind behave in the same way, so a tape contains a few
recorded layers, and the profile says which recorded layer stands for each real one.


Shapes: B = micro-batch (sequences), T = tokens per sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from enum import IntEnum
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple

from fsdp_advisor.errors import ErrorPayload

MONOMIALS = ("1", "B", "T", "BT", "BT2", "T2")
Polynomial = tuple[int, int, int, int, int, int]

ROOT = -1
"""The unit index of the root: the parameters outside all layers (embedding, final norm, head)."""


def evaluate(polynomial: Polynomial, b: int, t: int) -> int:
    """The value of a polynomial over ``MONOMIALS`` at micro-batch `b` and `t` tokens.

    >>> evaluate((1, 0, 0, 2, 0, 0), b=3, t=5)
    31
    """
    c1, cb, ct, cbt, cbt2, ct2 = polynomial
    return c1 + cb * b + t * (ct + cbt * b + t * (cbt2 * b + ct2))


class Staging(NamedTuple):
    """The size of the workspace in which a GPU sums `rows` rows of `columns` elements (`program.reduction_workspace`)."""

    rows: Polynomial
    columns: Polynomial


class Tiled(NamedTuple):
    """The size of a storage with one row for each token of a tile, into which a loss divides the tokens that it scores.

    All tokens are scored but `unscored` of each sequence. A tile has at most `most` of them; if that is 0, a `parts`-th of them,
    rounded up to a power of two.
    """

    bytes_per_token: int
    unscored: int
    most: int
    parts: int

    def bytes_at(self, b: int, t: int) -> int:
        """
        >>> Tiled(10, unscored=1, most=4096, parts=0).bytes_at(2, 101), Tiled(10, 0, 0, parts=63).bytes_at(2, 4096)
        (2000, 2560)
        """
        tokens = b * (t - self.unscored)
        tile = self.most or 1 << (-(-tokens // self.parts) - 1).bit_length()
        return self.bytes_per_token * min(tile, tokens)


Size = Polynomial | Staging | Tiled
"""The size of a storage in bytes."""


ParameterRole = Literal["embedding", "head", "final_norm", "norm", "expert", "adapter", "quantized", "other"]
"""The role of a parameter's module in the model.

``embedding``: the input embedding, also if it is tied to the head; ``head``: the other parameters of the module that makes the logits;
``final_norm``: the last norm among the base model's own children; ``norm``: any other norm; ``expert``: one of the experts of a
mixture; ``adapter``: one that an adapter adds, or a trained copy; ``quantized``: packed
weights. Embedding and head are those that transformers names (`get_input_embeddings`, `get_output_embeddings`).
"""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter tensor; tied names count once. `name` is relative to its unit.

    `dtype`: the dtype in which it is stored; None: the dtype of the plan's precision. `matrix`: the shape of the weight that a tensor
    of packed values contains; None for other tensors.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    tied: tuple[str, ...] = ()
    role: ParameterRole = "other"
    dtype: str | None = None
    matrix: tuple[int, ...] | None = None
    elements: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "elements", prod(self.shape))


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor that is no parameter and lives as long as the model. `bytes_per_element`: in its own dtype.

    `registered`: False for the scales and tables of a quantized layer, which engines neither cast nor send. `matrix`: the shape of
    the weight that a buffer of packed values contains; None for other tensors.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes_per_element: int
    registered: bool = True
    matrix: tuple[int, ...] | None = None

    @property
    def n_bytes(self) -> int:
        return self.bytes_at(self.bytes_per_element)

    @property
    def is_cast(self) -> bool:
        """Whether an engine that casts floating-point buffers casts this one."""
        return self.registered and "float" in self.dtype

    def bytes_at(self, bytes_per_element: int) -> int:
        return prod(self.shape) * bytes_per_element


@dataclass(frozen=True)
class Unit:
    """The parameters and buffers that one all-gather gathers: a layer of one kind, or the root."""

    kind: str
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...] = ()

    @cached_property
    def _hash(self) -> int:
        return hash((self.kind, self.parameters, self.buffers))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        return {"kind": self.kind, "parameters": self.parameters, "buffers": self.buffers}

    @cached_property
    def elements(self) -> int:
        return sum(p.elements for p in self.parameters)

    @cached_property
    def trainable_elements(self) -> int:
        return sum(p.elements for p in self.parameters if p.trainable)


@dataclass(frozen=True, slots=True)
class Run:
    """A pattern of recorded layers that repeats `repeats` times, in forward order."""

    pattern: tuple[int, ...]
    repeats: int


@dataclass(frozen=True)
class Stack:
    """A list of layers that run one after the other (a decoder; an encoder)."""

    path: str
    units: tuple[Unit, ...]  # one per recorded layer
    runs: tuple[Run, ...]  # which recorded layer stands for each real one

    @cached_property
    def depth(self) -> int:
        return sum(len(run.pattern) * run.repeats for run in self.runs)

    def layers(self) -> Iterator[Unit]:
        """Every real layer's unit, in forward order."""
        for run in self.runs:
            for _ in range(run.repeats):
                for recorded in run.pattern:
                    yield self.units[recorded]

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of real layers that each recorded layer stands for."""
        counts = [0] * len(self.units)
        for run in self.runs:
            for recorded in run.pattern:
                counts[recorded] += run.repeats
        return tuple(counts)


class Category(IntEnum):
    """The category of a storage on a tape. Engines add the storages that a tape lacks (states, gathered units, communication)."""

    TEMPORARY = 0  # allocated and freed in one phase
    ACTIVATION = 1  # saved in forward for backward
    LOSS = 2  # the logits and tensors that the loss computes from them
    CAST_PARAMETER = 3  # autocast's copy of a weight
    INPUT = 4  # the batch
    UNSHARDED_GRADIENT = 5  # a part of a gradient, which autograd or FSDP1 sums or concatenates into `param.grad`
    SCRATCH = 6  # a kernel's workspace: counts as allocated memory, but not as a tensor
    GRADIENT = 7  # becomes `param.grad`: 7 + 2 * index of the parameter in its unit + (1 if the unit is the root)


class Op(IntEnum):
    """The kinds of event on a tape, each with two arguments."""

    ALLOC = 0  # (size, category)
    FREE = 1  # (segment of birth, index among that segment's births)
    PRE_FORWARD = 2  # a unit's forward begins: (`MarkedUnit`, 0)
    POST_FORWARD = 3
    PRE_BACKWARD = 4
    POST_BACKWARD = 5
    GRAD_READY = 6  # (parameter, 1 if the root's else 0): its gradient is accumulated into param.grad


class MarkedUnit(IntEnum):
    """The unit of a mark (PRE_FORWARD to POST_BACKWARD). Readers skip marks of units that a plan does not have."""

    LAYER = 0  # the layer to which the segment belongs
    ROOT = 1
    EMBEDDING = 2  # an input embedding that is not tied to the head
    HEAD = 3  # final norm and head, with the embedding if it is tied to the head
    OUTPUTS = 4  # what the model returns: POST_FORWARD at the end of forward


Event = tuple[int, int, int]

ScoringPhase = Literal["mismatched", "reference_mismatched", "reference", "prefill", "decode", "policy"]
"""The phase of a forward without gradients. ``mismatched``: the trained model's on KTO's mismatched completions; ``reference_mismatched``
and ``reference``: the reference model's, on these and on the batch. Of GRPO: ``prefill``: the trained model's on prompts, with a cache
of keys and values; ``decode``: that for the last token of completions; ``policy``: that which scores them."""
GENERATION_PHASES: tuple[ScoringPhase, ...] = ("prefill", "decode")
ROLLOUT_PHASES: tuple[ScoringPhase, ...] = (*GENERATION_PHASES, "policy", "reference")
"""The phases of GRPO's tape that make the batch on which the others train."""


class Recomputed(NamedTuple):
    """The work of a layer's backward that repeats its forward, with the units of `Segment`."""

    matmul_flops: Polynomial
    attention_flops: Polynomial
    traffic_bytes: Polynomial
    operators: int


@dataclass(frozen=True)
class Segment:
    """The events between two layer boundaries of the recorded step.

    `phase` is ``forward``, ``backward`` or a `ScoringPhase`; `stack`, `layer` name the recorded layer, or (ROOT, n) the n-th stretch
    of root code.
    `flops`: of matrix products and attention. `traffic_bytes`: read and written by all other operators. `operators`: the number of
    operators. `recomputed`: the part of them that repeats a forward; None if it was not recorded, because all or none of it is repeated.
    `host_copies`: the bytes of each tensor that is copied to host memory in forward, or back in backward.
    """

    phase: str
    stack: int
    layer: int
    events: tuple[Event, ...]
    matmul_flops: Polynomial = (0, 0, 0, 0, 0, 0)
    attention_flops: Polynomial = (0, 0, 0, 0, 0, 0)
    traffic_bytes: Polynomial = (0, 0, 0, 0, 0, 0)
    operators: int = 0
    recomputed: Recomputed | None = None
    host_copies: tuple[Polynomial, ...] = ()


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
        """Per segment, (size, category) of each storage born there, in order."""
        return tuple(tuple([(a, b) for op, a, b in s.events if not op]) for s in self.segments)  # Op.ALLOC is 0


@dataclass(frozen=True, eq=False)
class Profile:
    """A model as the estimator sees it.

    `Resolved.tape` adds tapes and refusals when a plan first needs them, so `tapes` and `refusals` grow while everything else stays
    as it is. The keys of `tapes` and `refusals` are names of a `TapeKey`. `refusals`: the reasons why a tape cannot be recorded with
    `versions`; it is not tried again.
    """

    name: str
    task: str
    root: Unit
    stacks: tuple[Stack, ...]
    order: tuple[int, ...]  # number of the root's parameters before the first stack, before the second ...
    max_seq_len: int | None
    config: dict[str, object]
    versions: dict[str, str]
    tapes: MutableMapping[str, Tape] = field(default_factory=dict)
    refusals: dict[str, ErrorPayload] = field(default_factory=dict)

    def layers(self) -> Iterator[Unit]:
        for stack in self.stacks:
            yield from stack.layers()

    def counted_units(self) -> Iterator[tuple[Unit, int]]:
        """The root, then each recorded layer's unit, with the number of real ones it stands for."""
        yield self.root, 1
        for stack in self.stacks:
            yield from zip(stack.units, stack.counts, strict=True)

    def in_order(self) -> Iterator[Parameter]:
        """Every real parameter, in the order of `model.parameters()`."""
        done = 0
        for before, stack in zip(self.order, self.stacks, strict=True):
            yield from self.root.parameters[done:before]
            done = before
            for unit in stack.layers():
                yield from unit.parameters
        yield from self.root.parameters[done:]

    def bytes_of(self, element_bytes: Callable[[Parameter], int]) -> int:
        """Bytes of all parameters, of which each element has `element_bytes(parameter)`."""
        return sum(p.elements * element_bytes(p) * n for unit, n in self.counted_units() for p in unit.parameters)

    @cached_property
    def parameters(self) -> int:
        """The number of parameter elements; tied parameters count once."""
        return sum(unit.elements * count for unit, count in self.counted_units())

    @cached_property
    def trainable_parameters(self) -> int:
        return sum(unit.trainable_elements * count for unit, count in self.counted_units())

    @cached_property
    def adapter_parameters(self) -> int:
        """The number of elements that adapters add, trained copies included."""
        return sum(
            p.elements * count for unit, count in self.counted_units() for p in unit.parameters if p.role == "adapter"
        )

    @cached_property
    def saved(self) -> Profile:
        """The part that a checkpoint contains: the adapters if the model has any, else the model.

        Source: peft/peft_model.py, save_pretrained.
        """
        if not self.adapter_parameters:
            return self

        def adapters(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
            return tuple(p for p in parameters if p.role == "adapter")

        def of(unit: Unit) -> Unit:
            return Unit(unit.kind, adapters(unit.parameters))

        return replace(
            self,
            root=of(self.root),
            stacks=tuple(replace(stack, units=tuple(map(of, stack.units))) for stack in self.stacks),
            order=tuple(len(adapters(self.root.parameters[:before])) for before in self.order),
        )

    @cached_property
    def base_parameters(self) -> int:
        """The number of elements that a published checkpoint of the model has."""
        return self.parameters - self.adapter_parameters

    @cached_property
    def mixes_dtypes(self) -> bool:
        """Whether parameters have dtypes of their own, so that a model in half precision has weights in fp32 too."""
        return any(p.dtype is not None for unit, _ in self.counted_units() for p in unit.parameters)

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The configuration of the language model: that of a multimodal model contains it."""
        text = self.config.get("text_config")
        return text if isinstance(text, dict) else self.config

    @cached_property
    def window(self) -> int | None:
        """Tokens in a layer's sliding window; None if the configuration has no such layers."""
        config = self.text_config
        value = config.get("sliding_window") if config.get("use_sliding_window", True) else None
        return value if isinstance(value, int) and value > 0 else None

    @cached_property
    def experts(self) -> int | None:
        """The number of experts of a layer; None for a model without experts. transformers stacks their weights on dim 0."""
        stacked = [p.shape[0] for unit, _ in self.counted_units() for p in unit.parameters if p.role == "expert"]
        return max(stacked, default=None)

    @cached_property
    def image_tokens(self) -> int | None:
        """Tokens of an image: those with a learned position, else its patches; None for a model without images.

        Example: ViT with 224 x 224 pixels in patches of 16 has 14 x 14 patches and a class token, 197. Source: transformers, ViTEmbeddings.
        """
        for parameter in self.root.parameters:
            if parameter.name.endswith("position_embeddings") and len(parameter.shape) == 3:
                return parameter.shape[1]
        size, patch = self.config.get("image_size"), self.config.get("patch_size")
        return (size // patch) ** 2 if isinstance(size, int) and isinstance(patch, int) else None

    def fills_window(self, seq_len: int) -> bool:
        """Whether sequences of this length look farther back than the window. Source: transformers' `_ignore_causal_mask_sdpa`."""
        return self.window is not None and seq_len >= self.window

    @cached_property
    def largest_parameter_elements(self) -> int:
        return max((p.elements for unit, _ in self.counted_units() for p in unit.parameters), default=0)

    @property
    def layer_classes(self) -> tuple[str, ...]:
        """The layer classes for a transformer wrapping policy, in order of appearance."""
        return tuple(dict.fromkeys(u.kind for s in self.stacks for u in s.units))
