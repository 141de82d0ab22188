"""The settings of adapters, frozen parameters and quantized bases in exported files.

Source: PEFT 0.21, mapping.py (`get_peft_config`), utils/other.py (`prepare_model_for_kbit_training`); transformers 5.23,
utils/quantization_config.py (`BitsAndBytesConfig`).
"""

from __future__ import annotations

from typing import Any

from fsdp_advisor.export.job import Job
from fsdp_advisor.job.adaptation import LORA_OPTIONS, LORA_USUAL, TASK_TYPES
from fsdp_advisor.job.choices import half_dtype
from fsdp_advisor.model.quantization import Quantization


def weights(job: Job) -> str:
    """The dtype in which a job loads its model."""
    if job.adaptation.quantization:
        return Quantization.from_keywords(quantization_of(job)).compute_dtype
    return job.plan.loaded_dtype


def quantization_of(job: Job) -> dict[str, Any]:
    """The keywords of a quantized base, with the compute dtype of the job's precision. An estimate, where only sizes count, has bf16."""
    found = dict(job.adaptation.quantization)
    if found.get("bnb_4bit_compute_dtype") == "bfloat16":
        found["bnb_4bit_compute_dtype"] = half_dtype(job.plan.precision)
    return found


def adapter(job: Job) -> dict[str, Any]:
    """The argument of `peft.get_peft_config`; empty without adapters."""
    if not job.adaptation.peft:
        return {}
    task_type = TASK_TYPES.get(job.task or "")
    return {**job.adaptation.peft, **({"task_type": task_type} if task_type else {})}


def template_values(job: Job) -> dict[str, Any]:
    """The values of an adaptation for the templates of scripts."""
    return {
        "adapter": adapter(job),
        "freeze": list(job.adaptation.freeze),
        "quantization": quantization_of(job),
        "adapts": bool(job.adaptation.peft or job.adaptation.freeze),
    }


def packages(job: Job) -> tuple[str, ...]:
    """The packages that the job's adaptation needs."""
    return ("peft",) * bool(job.adaptation.peft) + ("bitsandbytes",) * bool(job.adaptation.quantization)


def lora(job: Job) -> dict[str, Any]:
    """The keywords of LoraConfig that have options in LORA_OPTIONS; empty without adapters."""
    if not job.adaptation.peft:
        return {}
    values = {"r": 8, "lora_alpha": 8, "lora_dropout": 0.0, **job.adaptation.peft}  # PEFT's defaults
    return {name: value for name, value in values.items() if name in LORA_OPTIONS}


def lora_limit(job: Job, *, freezes: bool = False) -> str | None:
    """Why a consumer that knows only the options of LORA_OPTIONS cannot train the job. `freezes`: whether it can freeze parameters."""
    adaptation = job.adaptation
    if adaptation.freeze and not freezes:
        return "it has no option for the parameters to freeze"
    if not adaptation.peft:
        return None
    if adaptation.method != "LORA":
        return f"of adapters it has LoRA alone, not {adaptation.method}"
    usual = {**LORA_USUAL, "task_type": TASK_TYPES.get(job.task or "", "CAUSAL_LM")}
    others = {k for k, v in adaptation.peft.items() if k not in LORA_OPTIONS and k != "peft_type" and usual.get(k) != v}
    return f"it has no option for {', '.join(sorted(others))} of LoRA" if others else None
