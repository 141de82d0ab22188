"""Suggests changes of a job that fits only with offload, or not at all."""

from __future__ import annotations

from collections.abc import Sequence

from fsdp_advisor.assumptions import keeps_packed_base_whole, stores_frozen_base_in_fp32
from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.job.choices import compute_dtype, half_dtype
from fsdp_advisor.job.compatibility import OFFLOADS
from fsdp_advisor.job.frameworks import EXPANDABLE_SEGMENTS
from fsdp_advisor.job.losses import losses_without_logits
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.report import Report
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.units import format_gib
from fsdp_advisor.verdict import missing_for_states

LARGE_LOSS = 0.1
"""The share of a GPU's memory from which the memory of the loss is worth another loss."""


def way_out(report: Report) -> str:
    """The options that save memory without offload, and the command that searches.

    Empty if a row without offload fits, or any row if all rows offload; also if a row may fit whose peak is
    unknown, and for a bare parameter count.
    """
    known = [row for row in report.estimates if row.fits is not None]
    if not known or report.model_source == "count" or any(row.fits and row.plan.offload == "none" for row in known):
        return ""
    request = report.request
    if any(row.vllm_missing_bytes for row in known):
        return _answer("Nothing fits, because vLLM does not start in its share of the GPUs", ())
    if any(row.only_evaluation_lacks for row in known):
        return _answer("The steps fit, but evaluation does not", _smaller_evaluation(request))
    smaller_states = []
    if stores_frozen_base_in_fp32(request):
        smaller_states.append(f"--dtype {half_dtype(request.precision)} (half the frozen base)")
    if keeps_packed_base_whole(request) and any(row.plan.backend == "fsdp2" for row in known):
        stored = compute_dtype(request.precision)
        smaller_states.append(f"--bnb-4bit-quant-storage {stored} (FSDP then shards the base)")
    reference, offload = _reference_options(report, known), _offload(report, known)
    options = [*smaller_states, *offload]
    if options or _states_may_fit(report, known):
        options = [*smaller_states, *reference, *_small_savers(report, known), *offload]
    fits = any(row.fits for row in known)
    if not fits and len(known) < len(report.estimates):
        return ""
    if not fits:
        what = "Nothing fits"
    elif any(row.plan.offload == "none" for row in known):
        what = "Only offload fits"
    else:
        return ""  # only rows with offload were requested
    return _answer(what, options)


def _states_may_fit(report: Report, known: Sequence[StrategyEstimate]) -> bool:
    """Whether states leave room on a GPU without offload, or do with smaller scales, whose bytes are among the buffers."""
    rows = [row for row in known if row.plan.offload == "none"] or known
    nests = report.request.load_in_4bit and not report.request.use_bnb_nested_quant
    return any(missing_for_states(report, row) <= (row.states["buffers"] if nests else 0) for row in rows)


def _small_savers(report: Report, known: Sequence[StrategyEstimate]) -> list[str]:
    """The options that save memory around the states. They are of no use if the states alone are too large."""
    request, options = report.request, []
    if any(row.allocator is not None and row.allocator.expandable_segments_help for row in known):
        options.append(f"--allocator-conf {EXPANDABLE_SEGMENTS} (less fragmentation)")
    if request.load_in_4bit and not request.use_bnb_nested_quant:
        options.append("--use-bnb-nested-quant (scales in 8 bits)")
    if request.activation_checkpointing == "none":
        options.append("--activation-checkpointing full")
    return [*options, *_loss(report, known)]


def _reference_options(report: Report, known: Sequence[StrategyEstimate]) -> list[str]:
    """The options with which FSDP2 does not gather a whole reference model, or only before training."""
    whole = [row for row in known if row.whole_reference_bytes is not None]
    if not whole:
        return []
    options = []
    if any(row.plan.strategy == "zero3" for row in whole):
        options.append("--backend deepspeed or fsdp1 (gathers the reference model in parts)")
    if any(_may_precompute(report, row) for row in whole):
        options.append("--precompute-ref-log-probs (no reference model in the steps)")
    return options


def _may_precompute(report: Report, row: StrategyEstimate) -> bool:
    """Whether the row's steps have a copy of the model that fits the GPU alone, as it is gathered before training."""
    if row.plan.reference != "copy" or row.plan.task == "grpo" or _gathers_too_much(report, row):
        return False
    return row.fails_in != "load"


def _gathers_too_much(report: Report, row: StrategyEstimate) -> bool:
    """Whether the reference model that FSDP2 gathers at once is larger than the GPU."""
    return (row.whole_reference_bytes or 0) > report.gpu_memory_bytes


def _answer(what: str, options: Sequence[str]) -> str:
    together = ", alone or together" if len(options) > 1 else ""
    less = f" Options that save memory{together}: {', '.join(options)}." if options else ""
    return f"{what}.{less} fsdp-advisor recommend, with the same options, searches for the fastest plan that fits."


def _smaller_evaluation(request: EstimateRequest) -> list[str]:
    """The options with which evaluation needs less memory."""
    options, size = [], request.per_device_eval_batch_size
    if size > 1:
        options.append(f"--per-device-eval-batch-size (less than {size})")
    if request.compute_metrics and not request.prediction_loss_only and request.eval_accumulation_steps != 1:
        options.append("--eval-accumulation-steps 1 (logits of one batch)")
    return options


def _loss(report: Report, known: Sequence[StrategyEstimate]) -> list[str]:
    """The option of a loss that never has all logits, if these take much of a GPU at the peak of the row that needs least."""
    request, row = report.request, min(known, key=lambda row: row.known_bytes)
    loss_bytes = (row.at_peak or {}).get("loss", 0)
    losses = losses_without_logits(row.plan.loss_code, request.framework, request.task, report.task)
    if not losses or loss_bytes < LARGE_LOSS * report.gpu_memory_bytes:
        return []
    return [f"--loss {' or '.join(losses)} (less than the {format_gib(loss_bytes)} of whole logits)"]


def _offload(report: Report, known: Sequence[StrategyEstimate]) -> list[str]:
    """The option that moves all states to the host, if that has memory of its own, no row offloads and a row's engine can."""
    if find_gpu(report.gpu_name).unified_memory:
        return []
    can = any(
        row.plan.backend in OFFLOADS["parameters"].get(row.plan.strategy, ()) and not _gathers_too_much(report, row)
        for row in known
    )
    is_asked = any(row.plan.offload != "none" for row in report.estimates)
    return ["--offload parameters (states in the host's memory)"] if can and not is_asked else []
