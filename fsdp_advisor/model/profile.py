"""A model's profile: all facts about it that determine memory, as pure data.

A profile is an inventory of parameters, grouped into the units that sharded training gathers, and a set of tapes. Layers of one
kind behave in the same way, so a tape contains a few recorded layers, and the profile says which recorded layer stands for each
real one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, Literal, NamedTuple

from fsdp_advisor.errors import ErrorPayload
from fsdp_advisor.job.choices import WeightDtype
from fsdp_advisor.model.tape import Tape

ParameterRole = Literal["embedding", "head", "final_norm", "norm", "expert", "adapter", "quantized", "other"]
"""The role of a parameter's module in the model.

``embedding``: the input embedding, also if it is tied to the head; ``head``: the other parameters of the module that makes the logits;
``final_norm``: the last norm among the base model's own children; ``norm``: any other norm; ``expert``: a weight of a mixture's experts;
``adapter``: a parameter that an adapter adds, or a trained copy of a module; ``quantized``: packed weights. Embedding and head are those
that transformers names (`get_input_embeddings`, `get_output_embeddings`).
"""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter tensor; tied names count once. `name` is relative to its unit.

    `dtype`: the dtype in which it is stored; None: the dtype of the plan's precision. `matrix`: the shape of the weight that a tensor
    of packed values contains; None for other tensors. `in_other_layers`: whether the tensor is also in modules outside the unit, such as
    later layers. It counts in the first layer that has it. `idle`: whether it is to be trained, but gets no gradient in the step; then
    `trainable` is False. `module_runs`: whether its own module runs; else the code of another module reads it, as PEFT's wrapper of a
    parameter (`ParamWrapper`) reads the matrices of its adapter.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    tied: tuple[str, ...] = ()
    role: ParameterRole = "other"
    dtype: str | None = None
    matrix: tuple[int, ...] | None = None
    in_other_layers: bool = False
    idle: bool = False
    module_runs: bool = True
    elements: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "elements", prod(self.shape))

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is to be trained, even if it gets no gradient in the step."""
        return self.trainable or self.idle


_POSITION_TABLE = re.compile(r"(^|\.)(wpe|position_embeddings?|embed_positions)(\.weight)?$")
"""The name of a table of positions: GPT-2's, BERT's; that of BART, OPT and Whisper, and of GPT-J's rotations. Source: transformers 5.23,
models/{gpt2,bert,bart,opt,whisper,gptj}/modeling_*.py. Relative positions and tables that grow (`weights`) have other names.
"""


class Buffer(NamedTuple):
    """A tensor that lives as long as the model and is not a parameter. `bytes_per_element`: in its own dtype.

    `registered`: False for the scales and tables of a quantized layer, which engines neither cast nor broadcast. `matrix`: the shape of the
    weight that a buffer of packed values contains; None for other tensors. `is_usual`: whether the buffer has the dtype in which the
    weights are loaded, whichever that is; `bytes_per_element` then does not apply.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes_per_element: int
    registered: bool = True
    matrix: tuple[int, ...] | None = None
    is_usual: bool = False

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


class Run(NamedTuple):
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
    def recorded_order(self) -> tuple[int, ...]:
        """The recorded layer that stands for each real layer, in forward order."""
        return tuple(recorded for run in self.runs for recorded in run.pattern * run.repeats)

    @property
    def depth(self) -> int:
        return len(self.recorded_order)

    def layers(self) -> Iterator[Unit]:
        """Every real layer's unit, in forward order."""
        return map(self.units.__getitem__, self.recorded_order)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """The number of real layers that each recorded layer stands for."""
        return tuple(map(self.recorded_order.count, range(len(self.units))))


@dataclass(frozen=True, eq=False)
class Profile:
    """All facts about a model that an estimate uses.

    `Resolved.tape` adds tapes and refusals when a plan first needs them, so `tapes` and `refusals` grow while all other fields are
    constant. The keys of `tapes` and `refusals` are names of a `TapeKey`. `refusals`: the reasons why a tape cannot be recorded with
    `versions`; it is not tried again. `checkpoint_dtype`: the dtype of the published weights; None if unknown. It is not stored with the
    profile, because it changes no tape.
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
    checkpoint_dtype: WeightDtype | None = None

    def layers(self) -> Iterator[Unit]:
        for stack in self.stacks:
            yield from stack.layers()

    def counted_units(self) -> Iterator[tuple[Unit, int]]:
        """The root, then each recorded layer's unit, with the number of real ones it stands for."""
        yield self.root, 1
        for stack in self.stacks:
            yield from zip(stack.units, stack.counts, strict=True)

    def counted_parameters(self) -> Iterator[tuple[Parameter, int]]:
        """Each recorded parameter, in the order of `counted_units`, with the number of real ones it stands for."""
        return ((p, count) for unit, count in self.counted_units() for p in unit.parameters)

    @property
    def scales_bytes(self) -> int:
        """Bytes of the scales and tables of quantized layers."""
        return sum(b.n_bytes * count for unit, count in self.counted_units() for b in unit.buffers if not b.registered)

    def parameter_names(self) -> Iterator[str]:
        """The names of all parameters, within their units."""
        return (p.name for p, _ in self.counted_parameters())

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
        return sum(p.elements * element_bytes(p) * n for p, n in self.counted_parameters())

    @cached_property
    def parameters(self) -> int:
        """The number of parameter elements; tied parameters count once."""
        return sum(unit.elements * count for unit, count in self.counted_units())

    @cached_property
    def trainable_parameters(self) -> int:
        return sum(unit.trainable_elements * count for unit, count in self.counted_units())

    @property
    def is_partly_frozen(self) -> bool:
        """Whether some parameters are not trained."""
        return self.trainable_parameters < self.parameters

    @cached_property
    def adapter_parameters(self) -> int:
        """The number of elements that adapters add, trained copies included."""
        return sum(p.elements * count for p, count in self.counted_parameters() if p.role == "adapter")

    @cached_property
    def adapted_modules(self) -> tuple[str, ...]:
        """The last parts of the names of the modules that LoRA's adapters are on, with which PEFT finds the same modules.

        Empty if there are none, or if another module has such a name and no adapter.
        """
        names = [name.split(".") for name in self.parameter_names()]
        adapted = {name[name.index("lora_A") - 1] for name in names if "lora_A" in name[1:]}
        others = {name[-2] for name in names if len(name) > 1 and "base_layer" not in name}
        return () if adapted & others else tuple(sorted(adapted))

    @cached_property
    def lora_layers(self) -> int:
        """The number of LoRA's layers."""
        return sum(count for p, count in self.counted_parameters() if ".lora_A." in p.name)

    @cached_property
    def saved(self) -> Profile:
        """The profile of what a checkpoint contains: the adapters if the model has any, else the whole model.

        Source: peft/peft_model.py, save_pretrained.
        """
        return self._of(lambda p: p.role == "adapter") if self.adapter_parameters else self

    @cached_property
    def base(self) -> Profile:
        """The model without adapters."""
        return self._of(lambda p: p.role != "adapter", keeps_buffers=True) if self.adapter_parameters else self

    def _of(self, keeps: Callable[[Parameter], bool], *, keeps_buffers: bool = False) -> Profile:
        """The model with only those parameters for which `keeps` is true."""

        def kept(parameters: tuple[Parameter, ...]) -> tuple[Parameter, ...]:
            return tuple(p for p in parameters if keeps(p))

        def of(unit: Unit) -> Unit:
            return Unit(unit.kind, kept(unit.parameters), unit.buffers if keeps_buffers else ())

        order = tuple(len(kept(self.root.parameters[:before])) for before in self.order)
        return replace(self.with_units(of), order=order)

    def with_units(self, change: Callable[[Unit], Unit]) -> Profile:
        """The profile with every unit changed."""
        stacks = tuple(replace(stack, units=tuple(map(change, stack.units))) for stack in self.stacks)
        return replace(self, root=change(self.root), stacks=stacks)

    @cached_property
    def base_parameters(self) -> int:
        """The number of elements in a published checkpoint of the model."""
        return self.parameters - self.adapter_parameters

    @cached_property
    def shares_between_layers(self) -> bool:
        """Whether layers have parameters in common."""
        return any(p.in_other_layers for stack in self.stacks for unit in stack.units for p in unit.parameters)

    @cached_property
    def has_usual_buffers(self) -> bool:
        """Whether some buffers have the dtype in which the model is loaded."""
        return any(b.is_usual for unit, _ in self.counted_units() for b in unit.buffers)

    @cached_property
    def mixes_dtypes(self) -> bool:
        """Whether some parameters have their own dtype, so that a model in half precision also has weights in other dtypes."""
        return any(p.dtype is not None for p, _ in self.counted_parameters())

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The configuration of the language model, which is nested in that of a multimodal model."""
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
        """The number of experts of a layer; None for a model without experts.

        The weights are stacked on dim 0. DBRX stacks their rows, so its count comes from the configuration.
        """
        if isinstance(dbrx := self.config.get("ffn_config"), dict) and "moe_num_experts" in dbrx:
            return int(dbrx["moe_num_experts"])
        stacked = [p.shape[0] for p, _ in self.counted_parameters() if p.role == "expert"]
        return max(stacked, default=None)

    @cached_property
    def image_tokens(self) -> int | None:
        """The tokens of an image: the number of learned positions, or else of patches; None for a model without images.

        Example: ViT with 224 x 224 pixels in patches of 16 has 14 x 14 patches and a class token, 197. Source: transformers, ViTEmbeddings.
        """
        for parameter in self.root.parameters:
            if parameter.name.endswith("position_embeddings") and len(parameter.shape) == 3:
                return parameter.shape[1]
        size, patch = self.config.get("image_size"), self.config.get("patch_size")
        return (size // patch) ** 2 if isinstance(size, int) and isinstance(patch, int) else None

    @cached_property
    def has_position_table(self) -> bool:
        """Whether the model looks positions up in a table of `max_seq_len` rows, so that longer sequences end with an IndexError. Some
        tables have up to two more rows, for padding. A vision tower's table has other sizes.
        """
        if self.max_seq_len is None:
            return False
        rows = range(self.max_seq_len, self.max_seq_len + 3)
        for unit, _ in self.counted_units():
            named = [*((p.name, p.shape) for p in unit.parameters), *((b.name, b.shape) for b in unit.buffers)]
            if any(len(shape) == 2 and shape[0] in rows and _POSITION_TABLE.search(name) for name, shape in named):
                return True
        return False

    def fills_window(self, seq_len: int) -> bool:
        """Whether sequences of this length are longer than the sliding window. Source: transformers' `_ignore_causal_mask_sdpa`."""
        return self.window is not None and seq_len >= self.window

    @cached_property
    def largest_parameter_elements(self) -> int:
        return max((p.elements for p, _ in self.counted_parameters()), default=0)

    @property
    def layer_classes(self) -> tuple[str, ...]:
        """The layer classes for a transformer wrapping policy, in order of appearance."""
        return tuple(dict.fromkeys(u.kind for s in self.stacks for u in s.units))
