"""The options of every command that takes a job, made from the fields of `EstimateRequest`: one word, declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from enum import Enum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, get_args, get_origin

import typer

from fsdp_advisor.request import EstimateRequest

ALIASES: dict[str, tuple[str, ...]] = {"micro_batch_size": ("--per-device-train-batch-size",)}

HELP: dict[str, str] = {
    "model": "Catalogued or hub id, a directory or config.json, or a bare parameter count (7e9, 7B).",
    "gpus": "Total ranks, one GPU each.",
    "nnodes": "Nodes.",
    "gpu": "A name that `fsdp-advisor gpus` lists (H100, rtx4090), or a size such as 24GiB. [default: the attached GPU, else H100-80GB]",
    "interconnect": "Between nodes: a name (InfiniBand NDR, RoCE, EFA, 100GbE) or each GPU's rate (400Gb/s, 50GB/s). [default: usual for the GPU]",
    "strategy": "Strategy, or all of them.",
    "backend": "What shards. auto: ddp for ddp; deepspeed for zero1 and for optimizer offload; else fsdp2.",
    "offload": "What is kept in host memory; parameters means parameters, gradients and optimizer state.",
    "offload_device": "Where offload goes.",
    "precision": "Of weights and computation.",
    "optim": "Optimizer, by its Hugging Face name.",
    "micro_batch_size": "Sequences per rank per forward.",
    "seq_len": "Tokens per sequence. [default: 2048, or the model's maximum if smaller]",
    "gradient_accumulation_steps": "Micro-batches per optimizer step.",
    "activation_checkpointing": "Recompute each layer in backward.",
    "attention": "Attention implementation.",
    "backward_prefetch": "FSDP1's BackwardPrefetch.",
    "reserved": "Also what the caching allocator reserves, fragmentation included: its own rules, walked through the job's steps.",
    "allocator_conf": "The allocator's settings as in PYTORCH_ALLOC_CONF, such as expandable_segments:True; implies --reserved.",
    "wrap": "FSDP2's units: each layer and the root, or all in one, which saves nothing while it computes.",
    "framework": "What prepares the model and runs the loop: each wraps, casts and accumulates in its own way.",
    "global_batch_size": "Sequences per optimizer step over all ranks; micro-batch and accumulation are chosen to make it.",
    "find": "The largest micro-batch or sequence, the fewest GPUs (at most --gpus, where that is above 1) or the smallest GPU that fits.",
    "margin": "Part of the GPU's memory to leave free: 0.08 or 8%.",
    "host_memory": "What a node's host has, such as 512GiB; offload must fit it.",
    "tokens": "To train on, such as 10e9 or 10B: adds days and GPU hours.",
    "price": "Of one GPU for one hour: adds the cost of --tokens.",
}


class Format(str, Enum):
    """How an answer is written."""

    text = "text"
    json = "json"
    markdown = "markdown"


FormatOption = Annotated[
    Format,
    typer.Option(
        "--format",
        help="How the answer is written. [default: text]",
        metavar="[" + "|".join(Format) + "]",
        case_sensitive=False,
        show_default=False,
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="The same as --format json.")]
OutputOption = Annotated[
    Optional[Path],  # noqa: UP045  # typer reads this while the module runs
    typer.Option("--output", "-o", metavar="FILE", help="Write to FILE, which must not exist yet."),
]
ForceOption = Annotated[bool, typer.Option("--force", help="Let -o overwrite FILE.")]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="No notes on standard error.")]


def dashed(field: str) -> str:
    """The option of a field.

    >>> dashed("micro_batch_size")
    '--micro-batch-size'
    """
    return "--" + field.replace("_", "-")


def takes_request(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command` an option per field of its first parameter's class, a request; it is called with that and its own options.

    Values stay text until pydantic reads them, so that every face refuses a bad value with the same words.
    """
    hints = inspect.get_annotations(command, eval_str=True)
    asked, *own = [p.replace(annotation=hints[p.name]) for p in inspect.signature(command).parameters.values()]
    kind: type[EstimateRequest] = asked.annotation

    @wraps(command)
    def wrapper(**values: Any) -> Any:
        from fsdp_advisor.estimator import make_request

        given = {name: values.pop(name) for name in kind.model_fields}
        return command(make_request({name: v for name, v in given.items() if v is not None}, kind), **values)

    signature = inspect.Signature([*_parameters(kind), *own])
    wrapper.__signature__ = signature  # type: ignore[attr-defined]  # what typer reads
    wrapper.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    del wrapper.__wrapped__  # typer would look through it
    return wrapper


def _parameters(kind: type[EstimateRequest]) -> list[inspect.Parameter]:
    result = []
    for name, field in kind.model_fields.items():
        text = HELP.get(name, field.description or "")
        if field.annotation is bool:
            flag = typer.Option(dashed(name), help=text)
            switch = inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Annotated[bool, flag]
            )
            result.append(switch)
            continue
        if name in getattr(kind, "SEARCHED", ()):
            text += " [default: searched]"
        elif field.default is not None and not field.is_required():
            text += f" [default: {field.default}]"
        option = typer.Option(dashed(name), *ALIASES.get(name, ()), metavar=_metavar(field.annotation), help=text)
        annotation: Any = Annotated[str, option] if field.is_required() else Annotated[Optional[str], option]  # noqa: UP045  # a value, not a hint
        default = inspect.Parameter.empty if field.is_required() else None
        result.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation))
    return result


def _kinds(annotation: Any) -> Iterator[Any]:
    """An annotation and all that it is made of."""
    yield annotation
    for inner in get_args(annotation):
        yield from _kinds(inner)


def _metavar(annotation: Any) -> str:
    kinds = list(_kinds(annotation))
    for kind in kinds:
        if get_origin(kind) is Literal:
            return "[" + "|".join(get_args(kind)) + "]"
    return "N" if int in kinds or float in kinds else "TEXT"
