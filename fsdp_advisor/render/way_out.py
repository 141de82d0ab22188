"""Suggests changes of a job that fits only with offload, or not at all."""

from __future__ import annotations

from fsdp_advisor.assumptions import SHARDED_STORAGE, stores_frozen_base_in_fp32
from fsdp_advisor.report import Report


def way_out(report: Report) -> str:
    """The options that save memory without offload, and the command that searches.

    Empty if a row without offload fits, or any row if all rows offload; also if a row may fit whose peak is
    unknown, and for a bare parameter count.
    """
    known = [row for row in report.estimates if row.fits is not None]
    if not known or report.model_source == "count" or any(row.fits and row.plan.offload == "none" for row in known):
        return ""
    request = report.request
    options = []
    if stores_frozen_base_in_fp32(request):
        options.append("--dtype bfloat16 (half the frozen base)")
    if request.load_in_4bit and request.bnb_4bit_quant_storage == "uint8" and request.gpus > 1:
        options.append(f"--bnb-4bit-quant-storage {SHARDED_STORAGE[request.precision]} (FSDP then shards the base)")
    if request.load_in_4bit and not request.use_bnb_nested_quant:
        options.append("--use-bnb-nested-quant (scales in 8 bits)")
    if request.activation_checkpointing == "none":
        options.append("--activation-checkpointing full")
    fits = any(row.fits for row in known)
    if not fits and len(known) < len(report.estimates):
        return ""
    if not fits:
        what = "Nothing fits"
    elif any(row.plan.offload == "none" for row in known):
        what = "Only offload fits"
    else:
        return ""  # only rows with offload were requested
    less = f" Options that save memory: {', '.join(options)}." if options else ""
    return f"{what}.{less} fsdp-advisor recommend, with the same options, searches for the fastest plan that fits."
