"""Changes that make a job fit if no plan does, the cheapest first: checkpointing, a fused loss, a shorter sequence, offload, a larger
host, more GPUs, another GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fsdp_advisor.advice.evaluator import Candidate
from fsdp_advisor.advice.open_choices import open_choices
from fsdp_advisor.advice.result import Remedy
from fsdp_advisor.advice.search import Search
from fsdp_advisor.advice.sweeps import Sweep
from fsdp_advisor.model.tasks import task_of
from fsdp_advisor.rows import estimate_plan
from fsdp_advisor.units import format_gib, format_tokens

MAX_ADVISED_GPUS = 1024
"""More GPUs than this are not advised; `--find gpus` goes further."""


def remedies(sweep: Sweep) -> Iterator[Remedy]:
    """Changes of the request that make something fit, each on its own."""
    search = sweep.search
    profile = search.evaluator.model.profile
    fits = "fits" if profile is not None else "may fit"  # without a profile only the states are known
    yield from _without_fixed(sweep, "activation_checkpointing", "full", f"it {fits} with activation checkpointing")
    yield from _with_fused_loss(search)
    any_length = profile is not None and task_of(profile.task).takes_any_length
    if any_length and (tokens := sweep.shorter_sequence()) is not None:
        because = f"{format_tokens(tokens)} instead of {search.base.seq_len} fit"
        yield Remedy(options={"seq_len": tokens}, because=because)
    yield from _without_fixed(sweep, "offload", "parameters", f"it {fits} with offload of everything to the host")
    yield from _with_a_larger_host(sweep, fits)
    yield from _with_other_gpus(sweep, fits)


def _without_fixed(sweep: Sweep, option: str, value: str, because: str) -> Iterator[Remedy]:
    """The remedy to set `option`, which the request fixes to `none`, to `value`, if a plan then fits."""
    if getattr(sweep.request, option) != "none":
        return
    base = sweep.search.base
    search, request = sweep.search, sweep.request.but(**{option: "auto"})
    choices = open_choices(request, search.evaluator.model, base).choices
    found = replace(search, choices=choices).limited_to(sweep.allowed).any_fit()
    if found is not None:
        yield Remedy(options={option: value}, because=because + _host_text(found))


def _with_fused_loss(search: Search) -> Iterator[Remedy]:
    """The remedy of a loss that does not keep the logits, if it saves as much memory as is missing."""
    evaluator = search.evaluator
    if evaluator.model.profile is None:
        return
    smallest = search.smallest_footprint()
    row = estimate_plan(evaluator.model, smallest.plan, evaluator.gpu, explain=True)
    if row.peak_tensor_bytes is None or row.fused_loss_peak_bytes is None or smallest.host_fits is False:
        return
    saved = row.peak_tensor_bytes - row.fused_loss_peak_bytes
    if 0 < smallest.known_bytes - evaluator.available_bytes <= saved:
        because = f"a loss that never has all logits, such as --loss liger, saves about {format_gib(saved)} of what {smallest.label} needs"
        yield Remedy(options={}, because=because)


def _with_a_larger_host(sweep: Sweep, fits: str) -> Iterator[Remedy]:
    """The remedy of more host memory than the request gives, or than usual nodes have."""
    search = sweep.search
    unlimited = replace(search.evaluator, host_memory_bytes=None, host_unlimited=True, known=None, _estimates={})
    found = replace(search, evaluator=unlimited).any_fit()
    if found is not None and found.plan.offload != "none":
        needs = int(found.host_peak_bytes_per_node / (1 - unlimited.margin))
        yield Remedy(
            options={"host_memory": f"{-(-needs // 2**30)}GiB"},
            because=f"it {fits} as {found.label} with {format_gib(needs)} of host memory per node",
        )


def _with_other_gpus(sweep: Sweep, fits: str) -> Iterator[Remedy]:
    """Remedies with more GPUs of the same type, or with the same number of larger ones."""
    base, gpu = sweep.search.base, sweep.search.evaluator.gpu.name
    if sweep.request.find != "gpus" and (gpus := sweep.min_gpus(MAX_ADVISED_GPUS)) is not None:
        nodes = sweep.nodes(gpus)
        on_nodes = f" on {nodes} nodes" if nodes > 1 else ""
        found = sweep.on_world(gpus).any_fit()
        because = f"it {fits} on {gpus} x {gpu}{on_nodes}" + (_host_text(found) if found else "")
        yield Remedy(options={"gpus": gpus, "nnodes": nodes}, because=because)
    if sweep.request.find != "gpu-type" and (name := sweep.smallest_gpu()) is not None:
        found = sweep.on_gpu(name).any_fit()
        because = f"it {fits} on {base.world_size} x {name}" + (_host_text(found) if found else "")
        yield Remedy(options={"gpu": name}, because=because)


def _host_text(found: Candidate) -> str:
    """The host memory that a plan needs; empty if it does not offload."""
    if found.plan.offload == "none":
        return ""
    return f", and needs {format_gib(found.host_bytes_per_node)} of host memory per node"
