"""The options of every command that takes a job, made from the fields of `EstimateRequest`: one word, declared once."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from fsdp_advisor.cli.output import Format
from fsdp_advisor.cli.plain import ALIASES
from fsdp_advisor.job.request import EstimateRequest, Option, dashed, fields_of

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
    "host_memory": "What a node's host has, such as 512GiB; loading, offload and saving must fit it. [default: enough]",
    "tokens": "To train on, such as 10e9 or 10B: adds days and GPU hours.",
    "price": "Of one GPU for one hour: adds the cost of --tokens.",
}


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


def takes_request(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give `command` an option per field of its first parameter's class, a request; it is called with that and its own options.

    Values stay text until the request is made, so that every face refuses a bad value with the same words.
    """
    hints = inspect.get_annotations(command, eval_str=True)
    asked, *own = [p.replace(annotation=hints[p.name]) for p in inspect.signature(command).parameters.values()]
    kind: type[EstimateRequest] = asked.annotation

    @wraps(command)
    def wrapper(**values: Any) -> Any:
        from fsdp_advisor.estimator import make_request

        said = {name: values.pop(name) for name in fields_of(kind)}
        return command(make_request({n: v for n, v in said.items() if v not in (None, False)}, kind), **values)

    signature = inspect.Signature([*(_parameter(o, kind) for o in fields_of(kind).values()), *own])
    wrapper.__signature__ = signature  # type: ignore[attr-defined]  # what typer reads
    wrapper.__annotations__ = {p.name: p.annotation for p in signature.parameters.values()}
    del wrapper.__wrapped__  # typer would look through it
    return wrapper


def _parameter(field: Option, kind: type[EstimateRequest]) -> inspect.Parameter:
    named = partial(inspect.Parameter, field.name, inspect.Parameter.KEYWORD_ONLY)
    text = HELP.get(field.name, field.rule.description or "")
    if field.kind is bool:
        return named(default=False, annotation=Annotated[bool, typer.Option(dashed(field.name), help=text)])
    if field.name in getattr(kind, "SEARCHED", ()):
        text += " [default: searched]"
    elif field.default is not None:
        text += f" [default: {field.default}]"
    metavar = "[" + "|".join(field.choices) + "]" if field.choices else "TEXT" if field.kind is str else "N"
    option = typer.Option(dashed(field.name), *ALIASES.get(field.name, ()), metavar=metavar, help=text)
    if field.required:
        return named(annotation=Annotated[str, option])
    return named(default=None, annotation=Annotated[Optional[str], option])  # noqa: UP045  # a value, not a hint
