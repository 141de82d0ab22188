"""The page's form: one control per field of the request, derived from the field's type."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from fsdp_advisor.errors import InvalidOption
from fsdp_advisor.job.choices import GPU_DEPENDENT
from fsdp_advisor.job.fields import Field, as_query, fields_of
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.server.page_words import choice, label, words

EXAMPLE: dict[str, str] = {"model": "meta-llama/Llama-3.1-8B", "gpus": "8", "gpu": "H100-80GB"}
"""The job that the page shows first."""

MAIN = ("model", "gpus", "gpu", "nnodes", "seq_len", "precision")
"""The fields that are always visible; the others are folded away."""

_HELP = {
    "gpu": "The name of a GPU (H100, rtx4090), or a memory size such as 24GiB; default: H100-80GB",
    "backend": "The library that shards the model",
    "loss": "How the loss is computed",
    "activation_checkpointing": "The layers that backward recomputes; selective keeps matrix products and attention",
    "wrap": "The units of FSDP: layer, none (the model), size:N parameters or more, class:A,B, or every:N layers",
    "reshard_after_forward": "Whether FSDP frees gathered parameters after forward; a number shards them over these ranks (FSDP2)",
    "compile": "What torch.compile compiles",
    "memory_budget": "The part of compiled layers' activations that is kept for backward, 0 to 1",
    "cuda_graphs": "Capture forward and backward as a CUDA graph (torchtitan); gradients then stay from step to step",
    "tiled_mlp": "Shards of the sequence in which feed-forward networks run: auto, none or a number",
    "fp8": "torchao's recipe for products of linear layers in fp8",
    "lora_kernels": "Parts whose adapters run in axolotl's kernels: auto, none, or some of mlp,qkv,o,embedding",
    "use_liger_kernel": "Liger's kernels for norms, positions and feed-forward networks",
    "activation_offload": "Activations are in pinned host memory between forward and backward",
    "backward_prefetch": "When FSDP1 gathers the parameters of the next layer in backward",
    "forward_prefetch": "All-gather the next layer before a layer's forward",
    "experts_implementation": "How the experts of a mixture are computed",
    "expert_imbalance": "The memory of a loop over the experts depends on it",
    "offload": "The states that are kept in host memory",
    "thorough": "Also search losses, selective checkpointing and activation offload; the first time takes longer",
    "find": "The largest micro-batch or sequence that fits, the fewest GPUs, or the smallest GPU",
    "method": "As the other options say, or the first of full fine-tuning, LoRA and QLoRA that fits",
    "precompute_ref_log_probs": "Compute the reference's log-probabilities before training",
}
"""Help texts that replace the command line's if those do not suit a form."""
_SUGGESTED = {"model": "known-models", "gpu": "known-gpus"}
_PLACEHOLDER = {
    "gpu": "H100-80GB",
    "nnodes": "usual",
    "seq_len": "2048",
    "micro_batch_size": "choose for me",
    "gradient_accumulation_steps": "choose for me",
    "global_batch_size": "free",
    "interconnect": "the GPU's usual",
    "host_memory": "any",
    "tokens": "10e9",
}
_OFFERED = {"activation_checkpointing": ("auto", "none", "selective", "full", "every-2", "every-4")}
"""The values that a form offers for fields with many possible values."""
_NO_YES = ("no", "yes")
_WRITTEN = ("margin", "host_memory", "tokens")
"""Numbers that users may write with a unit: 8%, 512GiB, 10B."""
_WIDTH = {"model": "wide", "gpus": "few", "nnodes": "few", "seq_len": "few"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """One input of the form. Its value is empty if the option has its default, and is then sent as not given. `suggestions` names a
    datalist.

    `choices` are values with their names; the name of the empty one is the default's. `help` says what the field means.
    """

    name: str
    label: str
    help: str
    kind: Literal["text", "number", "select"]
    value: str
    choices: tuple[tuple[str, str], ...] = ()
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
    """(options of a query string, without blank ones; names that are not options, such as those for tracking)."""
    known = {*fields_of(RecommendRequest), "config"}
    options = {name: value for name, value in query.items() if name in known and value.strip()}
    return options, [name for name in query if name not in known]


def offered() -> list[str]:
    """The names of the options that the page offers."""
    return [name for name, field in fields_of(RecommendRequest).items() if not field.rule.hidden]


def controls(values: Mapping[str, str], *, invalid: str = "") -> tuple[list[Control], dict[str, list[Control]]]:
    """The visible controls, and the folded ones by group, with `values` filled in. `invalid` names the field with the error."""
    fields = fields_of(RecommendRequest)
    made = {name: _control(field, values, invalid) for name, field in fields.items() if not field.rule.hidden}
    more: dict[str, list[Control]] = {}
    for name, control in made.items():
        if name not in MAIN:
            more.setdefault(fields[name].rule.group, []).append(control)
    return [made[name] for name in MAIN], more


def _control(option: Field, values: Mapping[str, str], invalid: str) -> Control:
    name, rule = option.name, option.rule
    default = "" if option.default is None or name in GPU_DEPENDENT else as_query({name: option.default})[name]
    number = option.kind in (int, float) and name not in _WRITTEN
    choices = ("", *option.choices) if option.choices and not default else option.choices
    value = values.get(name, default)
    if name in _OFFERED:
        choices = tuple(dict.fromkeys((*_OFFERED[name], value)))
    if option.kind is bool:
        choices, default = _NO_YES, _NO_YES[bool(option.default)]
        with suppress(InvalidOption):
            value = _NO_YES[bool(option.read(value))]
    about = words(rule.about[:1].upper() + rule.about[1:] + (f"; default: {rule.default}" if rule.default else ""))
    return Control(
        name=name,
        label=label(name),
        help=f"{_HELP.get(name, about)}.",
        kind="select" if choices else "number" if number else "text",
        value="" if value == default else value,
        choices=tuple(("" if value == default else value, choice(name, value)) for value in choices),
        minimum=rule.ge if number else None,
        maximum=rule.le if number else None,
        any_step=number and option.kind is float,
        longest=rule.max_length,
        placeholder=_PLACEHOLDER.get(name, default),
        suggestions=_SUGGESTED.get(name, ""),
        width=_WIDTH.get(name, ""),
        required=option.required and not values.get("config"),
        invalid=name == invalid,
    )
