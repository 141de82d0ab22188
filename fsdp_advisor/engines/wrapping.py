"""Which FSDP2 units a framework makes of what no layer holds, and where on a tape they begin and end.

PyTorch's own way is one unit for all of it, the root. accelerate takes the root apart (utils/fsdp_utils.py, fsdp2_prepare_model,
1.14 and later): an input embedding that is not tied is a unit of its own; final norm and head, with the embedding where that is
tied to the head, are one unit that keeps its parameters from forward to backward; what is left stays with the root, which keeps
them too.

On a tape all of that is the root's code. The places at which a unit's hooks run are found in it: the embedding runs first, final
norm and head run after the last layer, and the head's backward begins with the first gradient of a parameter. Of an image model
the embedding is the convolution over its patches, and the final norm has the head's place: its classifier stays with the root.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, cast

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import ROOT, Category, Op, Parameter, Polynomial, Profile, Tape, Unit, evaluate
from fsdp_advisor.program.builder import AT_ROOT
from fsdp_advisor.program.instructions import UnitId as Place

EMBEDDING: Place = (ROOT, 1)
HEAD: Place = (ROOT, 2)
OUTPUTS: Place = (ROOT, 3)
"""Where DDP gives out what the model gave it."""

NO_BYTES: Polynomial = (0, 0, 0, 0, 0, 0)

TAKEN_APART = ("causal-lm", "speech-seq2seq", "image-classification")
"""Tasks whose models' root is known to be taken apart as is said here. Of an image model the embedding is that of its patches."""

_EMBEDDINGS_NOT_SPLIT = ("masked-lm", "image-classification")
"""Tasks of the models (BERT, RoBERTa, ViT) in whose `_no_split_modules`, which accelerate wraps by default, the embeddings are."""

_LONG = 1009
"""Tokens at which the size of a tensor of T rows is told from others."""


@dataclass(frozen=True, eq=False)
class Part:
    """A unit within the root. `indices` are those of its parameters, its first ones, among the root's.

    `keeps`: its parameters stay gathered from forward to backward; None: as the layers' do.
    """

    unit: Unit
    indices: tuple[int, ...]
    keeps: bool | None = None


@dataclass(frozen=True, eq=False)
class Wrapping:
    """The units that are not one layer each. `last` are those reduced once backward is over, in their order.

    `whole`: the layers are no units but belong to the root's. `from_norm`: the head's unit begins with the final norm; without
    one, with the head itself.
    """

    parts: Mapping[Place, Part]
    last: tuple[Place, ...]
    whole: bool = False
    from_norm: bool = True


def takes_root_apart(plan: Plan) -> bool:
    return plan.prepared and plan.backend == "fsdp2"


def wrapping_for(profile: Profile, plan: Plan) -> Wrapping:
    """The units of a plan that are not one layer each."""
    return wrapping_of(profile, takes_root_apart(plan), plan.wrap == "none")


@lru_cache(maxsize=512)
def wrapping_of(profile: Profile, apart: bool, whole: bool = False) -> Wrapping:
    """The root's units: it alone, or what accelerate makes of it. `whole`: layers are no units, and so are the root's."""
    parameters = profile.root.parameters
    embedding = _embedding(profile) if apart and profile.task in TAKEN_APART else None
    if embedding is None:
        root = profile.root if not whole else Unit(profile.root.kind, (*parameters, *_of_layers(profile)))
        return Wrapping({AT_ROOT: Part(root, tuple(range(len(parameters))))}, (AT_ROOT,), whole)
    tied = bool(parameters[embedding].tied)
    head = _head(profile, embedding)
    norm = _final_norm(profile, embedding)
    tail = tuple(i for i in range(len(parameters)) if i in head or i in norm or (tied and i == embedding))
    module = _module(parameters[embedding].name)
    alone = () if tied else tuple(i for i, p in enumerate(parameters) if _module(p.name) == module)
    rest = tuple(i for i in range(len(parameters)) if i not in tail and i not in alone)

    def part(indices: tuple[int, ...], keeps: bool | None, more: tuple[Parameter, ...] = ()) -> Part:
        return Part(Unit(profile.root.kind, (*(parameters[i] for i in indices), *more)), indices, keeps)

    parts = {AT_ROOT: part(rest, True, _of_layers(profile) if whole else ()), HEAD: part(tail, True)}
    if alone:
        parts[EMBEDDING] = part(alone, None)
    return Wrapping(parts, (AT_ROOT, EMBEDDING if alone else HEAD), whole, from_norm=bool(norm))


def _of_layers(profile: Profile) -> tuple[Parameter, ...]:
    return tuple(parameter for unit in profile.layers() for parameter in unit.parameters)


def clones_outputs(plan: Plan) -> bool:
    """The Trainer has DDP search for unused parameters unless it checkpoints, and DDP then clones what the model gives out.

    Source: transformers/trainer.py, _build_accelerator_args; torch/nn/parallel/distributed.py, _DDPSink.
    """
    return plan.framework == "trainer" and plan.world_size > 1 and plan.activation_checkpointing == "none"


def logits_per_batch(profile: Profile, element_bytes: int) -> Polynomial:
    """Bytes of the logits: a row of the vocabulary for each token. Other tasks' logits are small and not counted."""
    embedding = _embedding(profile)
    if embedding is None or not profile.task.endswith(("-lm", "-seq2seq")):
        return NO_BYTES
    return (0, 0, 0, element_bytes * profile.root.parameters[embedding].shape[0], 0, 0)


def encoded_per_batch(profile: Profile, element_bytes: int) -> Polynomial:
    """Bytes of `encoder_last_hidden_state`, which a model with encoder and decoder returns with the logits."""
    width = profile.config.get("d_model")
    if "seq2seq" not in profile.task or not isinstance(width, int):
        return NO_BYTES
    if profile.task != "speech-seq2seq":
        return (0, 0, 0, element_bytes * width, 0, 0)
    frames = profile.config.get("max_source_positions")
    return (0, element_bytes * width * frames, 0, 0, 0, 0) if isinstance(frames, int) else NO_BYTES


def _embedding(profile: Profile) -> int | None:
    """The input embedding among the root's parameters: the first matrix with a row for each word, or an image's patches."""
    if profile.task == "image-classification":
        convolutions = [i for i, p in enumerate(profile.root.parameters) if len(p.shape) == 4]
        return convolutions[0] if convolutions and _image_tokens(profile) else None
    matrices = [i for i, p in enumerate(profile.root.parameters) if len(p.shape) == 2]
    rows = _vocabulary(profile)
    return next((i for i in matrices if profile.root.parameters[i].shape[0] == rows), matrices[0] if matrices else None)


def _image_tokens(profile: Profile) -> int | None:
    """Patches and what is put before them: a position each."""
    return next((p.shape[1] for p in profile.root.parameters if len(p.shape) == 3 and p.shape[1] > 1), None)


def _vocabulary(profile: Profile) -> object:
    text = profile.config.get("text_config")
    return profile.config.get("vocab_size") or (text.get("vocab_size") if isinstance(text, dict) else None)


def _head(profile: Profile, embedding: int) -> frozenset[int]:
    """The parameters of the output embedding that are not the input's: of the module that ends the model."""
    parameters = profile.root.parameters
    if parameters[embedding].tied:
        module = _module(parameters[embedding].tied[0])
    else:
        matrices = [p for p in parameters if len(p.shape) == 2 and p.shape == parameters[embedding].shape]
        if len(matrices) < 2:
            return frozenset()
        module = _module(matrices[-1].name)
    return frozenset(i for i, p in enumerate(parameters) if i != embedding and _module(p.name) == module)


def _final_norm(profile: Profile, embedding: int) -> frozenset[int]:
    """The last norm that is a direct child of the base model, as `_find_final_norm` looks for it: `model.norm`."""
    parameters = profile.root.parameters
    base = parameters[embedding].name.partition(".")[0]

    def direct(p: Parameter) -> bool:
        return p.name.startswith(base + ".") and p.name.count(".") == 2 and len(p.shape) == 1

    modules = [_module(p.name) for p in parameters if direct(p) and p.name.endswith(".weight")]
    return frozenset(i for i, p in enumerate(parameters) if modules and _module(p.name) == modules[-1])


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def not_modelled(profile: Profile, plan: Plan) -> list[str]:
    """What an estimate under accelerate or the Trainer leaves out or assumes."""
    if not plan.prepared:
        return []
    notes = []
    if takes_root_apart(plan) and HEAD not in wrapping_for(profile, plan).parts:
        what = {
            "masked-lm": "accelerate 1.15 fails to wrap a head whose bias the module around it shares",
            "seq2seq-lm": "accelerate 1.15 fails to wrap an embedding that encoder and decoder share",
        }.get(profile.task, "accelerate makes units of its own around the layers")
        notes.append(f"{what}: counted is one unit per layer and the root")
    if plan.backend in ("fsdp1", "fsdp2") and plan.wrap == "layer" and profile.task in _EMBEDDINGS_NOT_SPLIT:
        fails = ", and a head that is tied to them fails" if profile.task == "masked-lm" else ""
        notes.append(
            f"layers are units because the configuration names their class; without it the embeddings are one too{fails}"
        )
    if plan.backend == "deepspeed":
        notes.append(
            'bucket sizes and thresholds other than those that "auto" stands for in the DeepSpeed configuration'
        )
    if plan.framework == "accelerate":
        notes.append("a loop that keeps the model's outputs beyond the loss holds the logits as long")
    else:
        notes.append("what a data collator adds to a batch, and the batches of one update that wait together")
    if plan.precision == "fp16-mixed":
        notes.append("the gradient scaler's few scalars")
    return notes


# Marks on the tape


Marks = tuple[Wrapping, int] | Literal["outputs", "none"]
"""Which marks a plan needs: of a root's units, with the bytes of a computed element, or of what DDP gives out."""


def marks_for(profile: Profile, plan: Plan) -> Marks:
    if plan.backend == "ddp" and plan.prepared:
        return "outputs"
    wrapping = wrapping_for(profile, plan)
    return (wrapping, plan.compute_bytes) if HEAD in wrapping.parts else "none"


def marked(profile: Profile, tape: Tape, marks: Marks) -> Tape:
    """The tape with marks where the hooks of the root's units run."""
    if marks == "none":
        return tape
    return _with_outputs(tape.read()) if marks == "outputs" else _marked(profile, tape.read(), *marks)


@lru_cache(maxsize=8)
def _with_outputs(tape: Tape) -> Tape:
    """A mark where forward has ended and the model's outputs are all that is left of it."""
    segments = list(tape.segments)
    last = max(i for i, s in enumerate(segments) if s.phase == "forward")
    mark = (int(Op.POST_FORWARD), OUTPUTS[1] + 1, 0)
    segments[last] = replace(segments[last], events=(*segments[last].events, mark))
    return Tape(tape.sizes, tuple(segments))


@lru_cache(maxsize=8)
def _marked(profile: Profile, tape: Tape, wrapping: Wrapping, compute_bytes: int) -> Tape:
    """Marks are no births: what refers to births stays right."""
    segments = list(tape.segments)
    forward = [i for i, s in enumerate(segments) if s.phase == "forward"]
    backward = [i for i, s in enumerate(segments) if s.phase == "backward"]
    alone = EMBEDDING in wrapping.parts
    first = EMBEDDING if alone else HEAD
    tokens = _image_tokens(profile) if profile.task == "image-classification" else None
    hidden = compute_bytes * _width(wrapping) * (tokens or _LONG)

    def insert(index: int, at: int, op: Op, place: Place) -> None:
        events = segments[index].events
        mark = (int(op), place[1] + 1, 0)
        segments[index] = replace(segments[index], events=(*events[:at], mark, *events[at:]))

    def births(index: int) -> list[tuple[int, int, int]]:
        """(position, bytes of T = _LONG at B = 1, category) of each birth."""
        return [
            (at, evaluate(cast(Polynomial, tape.sizes[a]), 1, _LONG), b)
            for at, (op, a, b) in enumerate(segments[index].events)
            if op == Op.ALLOC and b != Category.SCRATCH
        ]

    def position(index: int, wanted: Op, root: int) -> int:
        return next(at for at, (op, a, _) in enumerate(segments[index].events) if op == wanted and a == root)

    begins = position(forward[0], Op.PRE_FORWARD, 1) + 1
    if tokens:  # patches are what is born before they are joined with the class token
        joined = next(at for at, n, _ in births(forward[0]) if n == hidden)
        begins = max(at for at, _, _ in births(forward[0]) if at < joined)
    insert(forward[0], begins, Op.PRE_FORWARD, first)
    if alone:
        output = next((at for at, n, _ in births(forward[0]) if at > begins and (tokens or n == hidden)), None)
        insert(
            forward[0], len(segments[forward[0]].events) if output is None else output + 1, Op.POST_FORWARD, EMBEDDING
        )
        logits = 0 if wrapping.from_norm else next((at for at, _, c in births(forward[-1]) if c == Category.LOSS), 0)
        insert(forward[-1], logits, Op.PRE_FORWARD, HEAD)
    turns = position(backward[0], Op.PRE_BACKWARD, 1) + 1
    of_head = [at for at, n, c in births(backward[0]) if at > turns and (_is_gradient(c) or n == hidden)]
    if tokens:  # it is the norm alone: the classifier is behind it
        of_head = [at + 1 for at, n, _ in births(backward[0]) if at > turns and n == hidden]
    insert(backward[0], of_head[0] if of_head else turns, Op.PRE_BACKWARD, HEAD)
    if alone:
        inputs = [at for at, n, _ in births(backward[0]) if at > turns and n == hidden]
        whole = wrapping.from_norm or not inputs
        insert(backward[0], len(segments[backward[0]].events) if whole else inputs[0] + 1, Op.POST_BACKWARD, HEAD)
        marks = [at for at, (op, a, _) in enumerate(segments[backward[-1]].events) if op == Op.POST_BACKWARD and not a]
        turn = marks[-1] + 1 if marks else 0
        if tokens:  # class token and positions come first
            own = Category.GRADIENT + 2 * wrapping.parts[EMBEDDING].indices[0] + 1
            turn = next(at for at, _, c in births(backward[-1]) if c == own)
        insert(backward[-1], turn, Op.PRE_BACKWARD, EMBEDDING)
    return Tape(tape.sizes, tuple(segments))


def _is_gradient(category: int) -> bool:
    return category >= Category.GRADIENT or category == Category.UNSHARDED_GRADIENT


def _width(wrapping: Wrapping) -> int:
    """The model's width: what the embedding gives for a token and the head takes."""
    first = wrapping.parts.get(EMBEDDING, wrapping.parts[HEAD])
    weight = next(p for p in first.unit.parameters if len(p.shape) in (2, 4))
    return weight.shape[1 if len(weight.shape) == 2 else 0]
