"""The settings of packed and padding-free batches in exported files.

Source: trl 1.16, sft_trainer.py, `__init__`; axolotl 0.19, core/builders/causal.py and utils/schemas/{config,enums,validation}.py;
LLaMA-Factory 0.9.5, hparams/data_args.py, data/collator.py; transformers 5.23, data/data_collator.py.
"""

from __future__ import annotations

from typing import Any

from fsdp_advisor.export.job import Job
from fsdp_advisor.job.plan import Plan

FLATTENING_NOTE = "pass data_collator=DataCollatorWithFlattening() to the Trainer: its arguments name no collator"
_OWN_DATA = ("sequence-classification", "token-classification", "ctc", "audio-classification")
"""Tasks for which the exported scripts make no random data."""
UNTRUNCATED_NOTE = "TRL truncates no sequence of a padding-free batch: those of the data set may have at most {} tokens"


def batch_limit(job: Job, *, packs: bool = False, padding_free: bool = False, images: bool = False) -> str | None:
    """Why a consumer cannot make the job's batches; None if it can. `packs`: whether it packs whole sequences into rows;
    `padding_free`: whether it makes padding-free batches of sequences that are not packed; `images`: whether it reads the user's data,
    which may have images and padding. Every consumer can cut sequences to full rows.
    """
    if job.plan.images is not None and not images:
        return "its data are random text, without images"
    if job.plan.padding_fraction and not images:
        return "its random data have no padding"
    if job.task in _OWN_DATA and not images:
        return f"it makes no data for {job.task}; use the target trainer, which takes yours"
    if job.plan.packing == "bfd" and not packs:
        return "it does not pack sequences; use the target trl"
    if job.plan.padding_free and job.plan.packing != "bfd" and not padding_free:
        return "it makes no padding-free batches; use the target trl or trainer"
    return None


def script_batch_limit(job: Job) -> str | None:
    """Why an exported script cannot build the plan's batches; None if it can. TRL's own script builds them by itself."""
    return None if job.plan.framework == "trl" and job.plan.task == "sft" else batch_limit(job, images=True)


def axolotl_limit(job: Job) -> str | None:
    """Why axolotl cannot make the batches."""
    plan, flash = job.plan, job.plan.attention == "flash_attention_2"
    if plan.packing == "wrapped":
        return "it packs whole sequences; use --packing bfd"
    if plan.packing == "bfd" and not flash and plan.micro_batch_size > 1:
        return f"with {plan.attention} it packs each row by itself; use --attention flash_attention_2 or --micro-batch-size 1"
    if plan.padding_free and plan.packing == "none" and not flash:
        return "its batch_flattening needs --attention flash_attention_2"
    return None


def llamafactory_limit(job: Job) -> str | None:
    """Why LLaMA-Factory cannot make the batches."""
    plan = job.plan
    if plan.packing == "bfd" and (plan.attention != "flash_attention_2" or plan.micro_batch_size > 1):
        return "its neat_packing is as predicted with --attention flash_attention_2 --micro-batch-size 1; use the target trl"
    return batch_limit(job, packs=True, images=True)


def trl_keys(plan: Plan) -> dict[str, Any]:
    """TRL's keys for packed and padding-free batches of supervised fine-tuning."""
    keys: dict[str, Any] = {"packing": plan.packing != "none"}
    if plan.packing != "none":
        keys["packing_strategy"] = plan.packing
    if plan.padding_free:
        keys["padding_free"] = True
        if plan.packing == "none":
            keys["max_length"] = None
    return keys


def axolotl_keys(plan: Plan) -> dict[str, Any]:
    """axolotl's keys for packed and padding-free batches."""
    flattening = {"batch_flattening": True} if plan.padding_free and plan.packing == "none" else {}
    return {"sample_packing": plan.packing == "bfd", "pad_to_sequence_len": not flattening, **flattening}


def llamafactory_keys(plan: Plan) -> dict[str, Any]:
    """LLaMA-Factory's keys for packed batches."""
    return {"packing": plan.packing != "none", **({"neat_packing": True} if plan.packing == "bfd" else {})}
