"""The arguments that a script passes to `from_pretrained`, and the jobs for which other files cannot express them."""

from __future__ import annotations

from typing import Any

from fsdp_advisor.engines.quantized_loading import scripts_load_on_host
from fsdp_advisor.export.adapters import weights
from fsdp_advisor.export.job import Job


def model_arguments(job: Job) -> dict[str, Any]:
    """The arguments of `from_pretrained` that differ from transformers' defaults.

    sdpa is not an argument, because transformers then falls back to eager if a model has no sdpa.
    """
    plan = job.plan
    return {
        "dtype": weights(job),
        **({"device_map": {"": "cpu"}} if _loads_on_host(job) else {}),
        **({} if plan.attention == "sdpa" else {"attn_implementation": plan.attention}),
        **(
            {}
            if plan.experts_implementation == "grouped_mm"
            else {"experts_implementation": plan.experts_implementation}
        ),
    }


def _loads_on_host(job: Job) -> bool:
    """Whether the script loads a 4-bit base on the host, so that FSDP moves it unit by unit. By default the whole base is loaded on the
    GPU. FSDP2 does not move packed weights in uint8, which it does not shard.

    Source: transformers 5.23, quantizers/quantizer_bnb_4bit.py, `update_device_map`; engines/fsdp2/loading.py.
    """
    quantization = job.adaptation.quantization
    is_sharded = bool(quantization.get("load_in_4bit")) and quantization.get("bnb_4bit_quant_storage") != "uint8"
    return is_sharded and scripts_load_on_host(job.plan)


def experts_limit(job: Job) -> str | None:
    """Why a consumer whose configuration cannot choose the experts' implementation cannot train the job; None if it can."""
    if job.plan.experts_implementation == "grouped_mm":
        return None
    return "its configuration does not choose the code for experts; use the target script or trainer"
