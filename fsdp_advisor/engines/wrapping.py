"""Which FSDP2 units a framework makes of what no layer holds, and whose marks on a tape a plan needs.

PyTorch's own way is one unit for all of it, the root. accelerate takes the root apart (utils/fsdp_utils.py, fsdp2_prepare_model,
1.14 and later): an input embedding that is not tied is a unit of its own; final norm and head, with the embedding where that is
tied to the head, are one unit that keeps its parameters from forward to backward; what is left stays with the root, which keeps
them too.

On a tape all of that is the root's code, and marks show where these units begin and end (`MarkedUnit`). Of an image model the
embedding is the convolution over its patches, and the final norm alone is the head's unit: its classifier stays with the root.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.profile import ROOT, MarkedUnit, Parameter, ParameterRole, Polynomial, Profile, Unit
from fsdp_advisor.model.tasks import task_of
from fsdp_advisor.program.builder import AT_ROOT
from fsdp_advisor.program.instructions import UnitId

NO_BYTES: Polynomial = (0, 0, 0, 0, 0, 0)

EMBEDDING: UnitId = (ROOT, MarkedUnit.EMBEDDING - 1)
HEAD: UnitId = (ROOT, MarkedUnit.HEAD - 1)
OUTPUTS: UnitId = (ROOT, MarkedUnit.OUTPUTS - 1)
"""Where DDP gives out what the model gave it."""

_EMBEDDINGS_NOT_SPLIT = ("masked-lm", "image-classification")
"""Tasks of the models (BERT, RoBERTa, ViT) in whose `_no_split_modules`, which accelerate wraps by default, the embeddings are."""


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

    `whole`: the layers are no units but belong to the root's.
    """

    parts: Mapping[UnitId, Part]
    last: tuple[UnitId, ...]
    whole: bool = False


def takes_root_apart(plan: Plan) -> bool:
    return plan.facts.splits_root_unit and plan.backend == "fsdp2"


def wrapping_for(profile: Profile, plan: Plan) -> Wrapping:
    """The units of a plan that are not one layer each."""
    return wrapping_of(profile, takes_root_apart(plan), plan.wrap == "none")


@lru_cache(maxsize=512)
def wrapping_of(profile: Profile, apart: bool, whole: bool = False) -> Wrapping:
    """The root's units: it alone, or what accelerate makes of it. `whole`: layers are no units, and so are the root's."""
    parameters = profile.root.parameters
    embedding = _with_role(profile, "embedding") if apart and task_of(profile.task).has_root_units else ()
    if not embedding:
        root = profile.root if not whole else Unit(profile.root.kind, (*parameters, *_of_layers(profile)))
        return Wrapping({AT_ROOT: Part(root, tuple(range(len(parameters))))}, (AT_ROOT,), whole)
    tied = any(parameters[i].tied for i in embedding)
    tail = tuple(
        sorted((*_with_role(profile, "head"), *_with_role(profile, "final_norm"), *(embedding if tied else ())))
    )
    alone = () if tied else embedding
    rest = tuple(i for i in range(len(parameters)) if i not in tail and i not in alone)

    def part(indices: tuple[int, ...], keeps: bool | None, more: tuple[Parameter, ...] = ()) -> Part:
        return Part(Unit(profile.root.kind, (*(parameters[i] for i in indices), *more)), indices, keeps)

    parts = {AT_ROOT: part(rest, True, _of_layers(profile) if whole else ()), HEAD: part(tail, True)}
    if alone:
        parts[EMBEDDING] = part(alone, None)
    return Wrapping(parts, (AT_ROOT, EMBEDDING if alone else HEAD), whole)


def marked_units(profile: Profile, plan: Plan) -> frozenset[int]:
    """The units (`MarkedUnit`), in addition to layers and root, whose marks on the tape are hooks of the plan's engine."""
    if plan.backend == "ddp" and plan.uses_accelerate:
        return frozenset({OUTPUTS[1] + 1})
    return frozenset(place[1] + 1 for place in wrapping_for(profile, plan).parts if place != AT_ROOT)


def _of_layers(profile: Profile) -> tuple[Parameter, ...]:
    return tuple(parameter for unit in profile.layers() for parameter in unit.parameters)


def clones_outputs(plan: Plan) -> bool:
    """The Trainer has DDP search for unused parameters unless it checkpoints, and DDP then clones what the model gives out.

    Source: transformers/trainer.py, _build_accelerator_args; torch/nn/parallel/distributed.py, _DDPSink.
    """
    return plan.facts.finds_unused_parameters and plan.world_size > 1 and plan.activation_checkpointing == "none"


def logits_per_batch(profile: Profile, element_bytes: int) -> Polynomial:
    """Bytes of the logits: a row of the vocabulary for each token. Other tasks' logits are small and not counted."""
    embedding = _with_role(profile, "embedding")
    if not embedding or not profile.task.endswith(("-lm", "-seq2seq")):
        return NO_BYTES
    return (0, 0, 0, element_bytes * profile.root.parameters[embedding[0]].shape[0], 0, 0)


def encoded_per_batch(profile: Profile, element_bytes: int) -> Polynomial:
    """Bytes of `encoder_last_hidden_state`, which a model with encoder and decoder returns with the logits."""
    width = profile.config.get("d_model")
    if "seq2seq" not in profile.task or not isinstance(width, int):
        return NO_BYTES
    if profile.task != "speech-seq2seq":
        return (0, 0, 0, element_bytes * width, 0, 0)
    frames = profile.config.get("max_source_positions")
    return (0, element_bytes * width * frames, 0, 0, 0, 0) if isinstance(frames, int) else NO_BYTES


def _with_role(profile: Profile, role: ParameterRole) -> tuple[int, ...]:
    """Indices of the root's parameters that have this role."""
    return tuple(i for i, p in enumerate(profile.root.parameters) if p.role == role)


def not_modelled(profile: Profile, plan: Plan) -> list[str]:
    """What an estimate under accelerate or the Trainer leaves out or assumes."""
    if not plan.uses_accelerate:
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
