"""What would fit if nothing does: checkpointing, offload, more GPUs, another GPU, fewer tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fsdp_advisor.advice.result import Remedy
from fsdp_advisor.advice.search_space import search_space
from fsdp_advisor.advice.sweeps import Sweep
from fsdp_advisor.model.tasks import task_of
from fsdp_advisor.units import format_gib, format_tokens

MAX_ADVISED_GPUS = 1024
"""More GPUs than this are not advised; `--find gpus` goes further."""

_RELAXED_OPTIONS = (
    ("activation_checkpointing", "activation checkpointing", "full"),
    ("offload", "offload of everything to the host", "parameters"),
)
"""(option, what it is in words, the value that is advised in place of `none`)."""


def remedies(sweep: Sweep) -> Iterator[Remedy]:
    """Changes of the request that make something fit, each on its own."""
    search = sweep.search
    base, gpu, profile = search.base, search.evaluator.gpu.name, search.evaluator.model.profile
    fits = "fits" if profile is not None else "may fit"  # only the states are known
    fit = "fit" if profile is not None else "may fit"
    yield from _relaxed_options(sweep, fits)
    if sweep.request.find != "gpus" and (gpus := sweep.min_gpus(MAX_ADVISED_GPUS)) is not None:
        nodes = sweep.nodes(gpus)
        on_nodes = f" on {nodes} nodes" if nodes > 1 else ""
        yield Remedy(options={"gpus": gpus, "nnodes": nodes}, because=f"it {fits} on {gpus} x {gpu}{on_nodes}")
    if sweep.request.find != "gpu-type" and (name := sweep.smallest_gpu()) is not None:
        yield Remedy(options={"gpu": name}, because=f"it {fits} on {base.world_size} x {name}")
    if (
        profile is not None
        and task_of(profile.task).takes_any_length
        and (tokens := sweep.shorter_sequence()) is not None
    ):
        because = f"{format_tokens(tokens)} instead of {base.seq_len} {fit}"
        yield Remedy(options={"seq_len": tokens}, because=because)


def _relaxed_options(sweep: Sweep, fits: str) -> Iterator[Remedy]:
    """Options that the request rules out, and that make something fit."""
    search = sweep.search
    for option, words, value in _RELAXED_OPTIONS:
        if getattr(sweep.request, option) != "none":
            continue
        choices = search_space(sweep.request.but(**{option: "auto"}), nnodes=search.base.nnodes)
        found = replace(search, choices=choices).limited_to(sweep.allowed).any_fit()
        if found is not None:
            host = format_gib(found.host_bytes_per_node)
            of_host = f" and needs {host} of host memory per node" if option == "offload" else ""
            yield Remedy(options={option: value}, because=f"it {fits} with {words}{of_host}")
