"""Changes that make a job fit if no plan does, the cheapest first: settings with which vLLM starts; a precomputed reference, checkpointing,
a fused loss, a shorter sequence, offload, a larger host, more GPUs, another GPU.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from fsdp_advisor.advice.candidate import Candidate
from fsdp_advisor.advice.open_choices import open_choices
from fsdp_advisor.advice.result import Remedy
from fsdp_advisor.advice.search import Search
from fsdp_advisor.advice.search_space import base_plan
from fsdp_advisor.advice.sweeps import Sweep
from fsdp_advisor.engines.vllm import vllm_share, with_settings
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.choices import Loss
from fsdp_advisor.job.losses import losses_without_logits
from fsdp_advisor.memory.device import device_overhead
from fsdp_advisor.model.liger import LIGER_LOSSES
from fsdp_advisor.model.tasks import task_of
from fsdp_advisor.rows import estimate_plan
from fsdp_advisor.units import format_gib, format_tokens

MAX_ADVISED_GPUS = 1024
"""More GPUs than this are not advised; `--find gpus` goes further."""


def remedies(sweep: Sweep) -> Iterator[Remedy]:
    """Changes of the request that make something fit, each on its own; two of them together if no single one saves enough memory."""
    search = sweep.search
    profile = search.evaluator.model.profile
    fits = "fits" if profile is not None else "may fit"  # without a profile only the states are known
    if (of_vllm := _of_vllm(search)) is not None:
        yield from of_vllm
        return
    checkpointing, offload = {"activation_checkpointing": "full"}, {"offload": "parameters"}
    yield from _with_smaller_evaluation(sweep)
    yield from _with_precomputed_reference(search)
    saving = [
        *_without_fixed(sweep, checkpointing, f"it {fits} with activation checkpointing"),
        *_with_fused_loss(search),
    ]
    yield from saving
    any_length = profile is not None and task_of(profile.task).takes_any_length
    if any_length and (tokens := sweep.shorter_sequence()) is not None:
        because = f"{format_tokens(tokens)} instead of {search.base.seq_len} fit"
        yield Remedy(options={"seq_len": tokens}, because=because)
    offloading = [*_without_fixed(sweep, offload, f"it {fits} with offload of everything to the host")]
    yield from offloading
    if not saving and not offloading:
        together = f"it {fits} with activation checkpointing and offload of everything to the host"
        yield from _without_fixed(sweep, checkpointing | offload, together)
        for change in (checkpointing, offload):
            if (wider := _opened(sweep, change)) is not None:
                yield from _with_fused_loss(wider, change)
    yield from _with_a_larger_host(sweep, fits)
    yield from _with_other_gpus(sweep, fits)


def _of_vllm(search: Search) -> list[Remedy] | None:
    """The settings with which vLLM starts and a plan fits, if vLLM does not start in its share of the GPUs; None if that is not the
    reason.
    """
    base, profile = search.base, search.evaluator.model.profile
    share = None if profile is None else vllm_share(profile, base, search.evaluator.gpu)
    if share is None or not share.missing_bytes:
        return None
    return [
        Remedy(options=settings, because="vLLM then starts in its share of the GPUs, and a plan fits")
        for settings in share.remedies
        if replace(search, base=with_settings(base, settings)).any_fit() is not None
    ]


def _with_smaller_evaluation(sweep: Sweep) -> Iterator[Remedy]:
    """The remedy of fewer sequences per forward of evaluation, if the steps fit: without offload, or else with it."""
    base, every, request = sweep.search.base, sweep.search.choices, sweep.request
    if base.evaluation is None:
        return
    steps = replace(base, evaluation=None)
    searches = [replace(sweep.search, choices=c) for c in (tuple(c for c in every if c.offload == "none"), every) if c]
    search = next((search for search in searches if replace(search, base=steps).any_fit() is not None), None)
    if search is None:
        return
    size = request.per_device_eval_batch_size
    while size > 1:
        size = 1 << (size - 1).bit_length() - 1  # the next lower power of two
        try:
            smaller = base_plan(
                request.but(per_device_eval_batch_size=size),
                gpus=base.world_size,
                nnodes=base.nnodes,
                seq_len=base.seq_len,
            )
        except UsageError:  # GRPO evaluates whole groups of completions
            continue
        found = replace(search, base=replace(base, evaluation=smaller.evaluation)).any_fit()
        if found is not None:
            because = (
                f"it fits with {size} instead of {request.per_device_eval_batch_size} sequences per forward of evaluation"
                + _host_text(found)
            )
            yield Remedy(options={"per_device_eval_batch_size": size}, because=because)
            return


def _with_precomputed_reference(search: Search) -> Iterator[Remedy]:
    """The remedy to compute the reference's log-probabilities before training, if the steps then fit without the reference model."""
    base = search.base
    if base.reference != "copy" or base.task == "grpo" or not base.facts.precomputes_reference:
        return
    found = replace(search, base=replace(base, reference="none")).any_fit()
    if found is not None:
        because = "it fits without a reference model in the steps" + _host_text(found)
        yield Remedy(options={"precompute_ref_log_probs": True}, because=because)


def _opened(sweep: Sweep, options: Collection[str]) -> Search | None:
    """The search in which the fields named by `options` are searched instead of fixed; None if one of them is not `none` in the request."""
    if any(getattr(sweep.request, option) != "none" for option in options):
        return None
    search, request = sweep.search, sweep.request.but(**dict.fromkeys(options, "auto"))
    choices = open_choices(request, search.evaluator.model, search.base).choices
    return replace(search, choices=choices).limited_to(sweep.allowed)


def _without_fixed(sweep: Sweep, options: Mapping[str, str], because: str) -> Iterator[Remedy]:
    """The remedy to set `options`, which the request fixes to `none`, to these values, if a plan then fits."""
    search = _opened(sweep, options)
    found = None if search is None else search.any_fit()
    if found is not None:
        yield Remedy(options=options, because=because + _host_text(found))


def _with_fused_loss(search: Search, change: Mapping[str, str] | None = None) -> Iterator[Remedy]:
    """The remedy of a loss that never has all logits, with `change`, if the tensors of the smallest plan then leave the margin.

    Its tiles, and fragmentation, are not counted, because its step is not recorded.
    """
    evaluator, option = search.evaluator, _fused_loss(search)
    if option is None:
        return
    on_gpu = tuple(choice for choice in search.choices if choice.offload == "none")
    for choices in (on_gpu, search.choices):
        if not choices:
            continue
        smallest = replace(search, choices=choices).smallest_footprint()
        row = estimate_plan(evaluator.model, smallest.plan, evaluator.gpu, explain=True, searched=True)
        if row.peak_tensor_bytes is None or row.fused_loss_peak_bytes is None or smallest.host_fits is False:
            continue
        if row.only_evaluation_lacks:
            continue
        saved = row.peak_tensor_bytes - row.fused_loss_peak_bytes
        least = row.fused_loss_peak_bytes + device_overhead(evaluator.gpu, smallest.plan).middle_bytes
        if least <= evaluator.available_bytes < smallest.known_bytes:
            because = (
                f"with a loss that never has all logits, {smallest.label} needs {format_gib(least)} ({format_gib(saved)} less) plus"
                " fragmentation and the loss's tiles"
            )
            yield Remedy(options={**(change or {}), "loss": option}, because=because + _host_text(smallest))
            return


def _fused_loss(search: Search) -> Loss | None:
    """The `--loss` with which the model never has all logits; None if it has none, or uses it."""
    base, profile = search.base, search.evaluator.model.profile
    if profile is None:
        return None
    losses = losses_without_logits(base.loss_code, base.framework, base.task, profile.task)
    has_liger = profile.config.get("model_type") in LIGER_LOSSES
    return next((loss for loss in losses if loss != "liger" or has_liger), None)


def _with_a_larger_host(sweep: Sweep, fits: str) -> Iterator[Remedy]:
    """The remedy of more host memory than the request gives, or than usual nodes have."""
    search = sweep.search
    unlimited = replace(search.evaluator, host_memory_bytes=None, host_unlimited=True, known=None, _estimates={})
    found = replace(search, evaluator=unlimited).any_fit()
    if found is not None and found.plan.offload != "none":
        needs = found.host_peak_bytes_per_node
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
    """The host memory that a plan needs; empty if it does not offload, or if that is unknown."""
    if found.plan.offload == "none" or found.host_bytes_per_node is None:
        return ""
    return f", and needs {format_gib(found.host_bytes_per_node)} of host memory per node"
