"""The page's form: one control per field of the request, derived from the field's type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from fsdp_advisor.job.fields import Field, fields_of
from fsdp_advisor.job.request import RecommendRequest

EXAMPLE: dict[str, str] = {"model": "meta-llama/Llama-3.1-8B", "gpus": "8", "gpu": "H100-80GB"}
"""The job that the page shows first."""

MAIN = (
    "model", "gpus", "nnodes", "gpu",
    "precision", "optim", "micro_batch_size", "seq_len", "activation_checkpointing", "offload",
)  # fmt: skip
"""The fields that are always visible; the others are folded away."""

_LABELS = {
    "gpus": "GPUs (total)",
    "nnodes": "Nodes",
    "gpu": "GPU type, or size",
    "micro_batch_size": "Micro-batch",
    "seq_len": "Sequence length",
    "optim": "Optimizer",
    "activation_checkpointing": "Checkpointing",
    "gradient_accumulation_steps": "Accumulation steps",
    "interconnect": "Network between nodes",
    "global_batch_size": "Global batch size",
    "find": "Find the largest or smallest",
    "host_memory": "Host memory per node",
    "tokens": "Tokens to train on",
    "price": "Price per GPU hour",
    "wrap": "FSDP units",
    "allocator_conf": "PYTORCH_ALLOC_CONF",
    "margin": "Memory left free",
}
_SUGGESTED = {"model": "known-models", "gpu": "known-gpus"}
_PLACEHOLDER = {
    "gpu": "H100-80GB",
    "seq_len": "2048",
    "micro_batch_size": "auto",
    "gradient_accumulation_steps": "auto",
    "global_batch_size": "free",
    "interconnect": "the GPU's usual",
    "host_memory": "any",
    "tokens": "10e9",
}
_WRITTEN = ("margin", "host_memory", "tokens")
"""Numbers that users may write with a unit: 8%, 512GiB, 10B."""
_WIDTH = {"model": "wide", "gpu": "half", "optim": "half", "micro_batch_size": "few", "activation_checkpointing": "few"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One input of the form. Permalinks leave out values that equal `default`. `suggestions` names a datalist."""

    name: str
    label: str
    kind: Literal["text", "number", "select"]
    value: str
    default: str
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    any_step: bool = False
    longest: int | None = None
    placeholder: str = ""
    suggestions: str = ""
    width: str = ""
    required: bool = False
    invalid: bool = False


def read_query(query: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """The options that a query string gives, without blank ones, and names that are no options (a link's tracking)."""
    known = {*fields_of(RecommendRequest), "config"}
    options = {name: value for name, value in query.items() if name in known and value.strip()}
    return options, [name for name in query if name not in known]


def controls(values: Mapping[str, str], *, invalid: str = "") -> tuple[list[Control], list[Control]]:
    """The visible and the folded controls, with `values` filled in. `invalid` names the field with the error."""
    fields = fields_of(RecommendRequest)
    made = {name: _control(field, values, invalid) for name, field in fields.items() if not field.rule.hidden}
    return [made[name] for name in MAIN], [control for name, control in made.items() if name not in MAIN]


def _control(option: Field, values: Mapping[str, str], invalid: str) -> Control:
    name, rule = option.name, option.rule
    default = "" if option.default is None else str(option.default)
    number = option.kind in (int, float) and name not in _WRITTEN
    choices = ("False", "True") if option.kind is bool else option.choices
    return Control(
        name=name,
        label=_LABELS.get(name, name.replace("_", " ").capitalize()),
        kind="select" if choices else "number" if number else "text",
        value=values.get(name, default),
        default=default,
        choices=("", *choices) if choices and option.optional else choices,
        minimum=rule.ge if number else None,
        maximum=rule.le if number else None,
        any_step=number and option.kind is float,
        longest=rule.max_length,
        placeholder=_PLACEHOLDER.get(name, ""),
        suggestions=_SUGGESTED.get(name, ""),
        width=_WIDTH.get(name, ""),
        required=option.required and not values.get("config"),
        invalid=name == invalid,
    )
