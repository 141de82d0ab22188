"""Training scripts of a bundle: short loops through accelerate, DeepSpeed and the Trainer, and the lines that add FSDP1.

A script trains as the estimate assumes, on random tokens or on a file of token ids.

Source: accelerate 1.15.0, accelerator.py; deepspeed 0.19.8, `deepspeed.initialize`; transformers 5.23.0, integrations/deepspeed.py
(`HfDeepSpeedConfig`: from_pretrained shards the model as it loads it); torch 2.13, torch.distributed.fsdp.
"""

from __future__ import annotations

from typing import Any

from fsdp_advisor.engines.deepspeed.settings import stage
from fsdp_advisor.engines.fsdp1.sharding import PREFETCH_NAMES, torch_sharding_name
from fsdp_advisor.errors import assert_never
from fsdp_advisor.export import accelerate, deepspeed
from fsdp_advisor.export.adapters import packages as adapting_packages
from fsdp_advisor.export.adapters import template_values, weights
from fsdp_advisor.export.checkpointing import checkpointing_call, is_of_model, saves_on_host
from fsdp_advisor.export.constants import DEEPSPEED_FILE, LINES_FILE, PACKAGES, SCRIPT, Consumer
from fsdp_advisor.export.header import header
from fsdp_advisor.export.job import Job
from fsdp_advisor.export.losses import packages as loss_packages
from fsdp_advisor.export.losses import script_call
from fsdp_advisor.export.model_arguments import model_arguments
from fsdp_advisor.export.rendering import render
from fsdp_advisor.job.choices import half_dtype
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.tasks import AUTO_CLASSES
from fsdp_advisor.policies.optimizers import optimizer_of
from fsdp_advisor.policies.optimizers.interface import Constructor


def training_script(job: Job, consumer: Consumer, launch: str) -> tuple[str, str]:
    """File name and text of the script that trains the job with a consumer. `launch` is the command that starts it."""
    values = _values(job, consumer) | {"launch": launch}
    match consumer:
        case "accelerate":
            return SCRIPT, render("train_accelerate.py.jinja", **values, **_through_accelerate(job))
        case "deepspeed":
            return SCRIPT, render("train_deepspeed.py.jinja", **values, **_through_deepspeed(job))
        case "trainer":
            return SCRIPT, render("train_trainer.py.jinja", **values)
        case "torch":
            return LINES_FILE, render("fsdp1_lines.py.jinja", **values, **_through_fsdp1(job.plan))
        case "axolotl" | "trl" | "llamafactory":
            raise ValueError(f"{consumer} has its own training script")
        case _:
            assert_never(consumer)


_NOT_IN_THE_SCRIPT = Constructor(module="deepspeed", name="")
"""Stands for an optimizer that DeepSpeed makes itself."""


def _values(job: Job, consumer: Consumer) -> dict[str, Any]:
    plan, optimizer = job.plan, optimizer_of(job.plan).script
    if optimizer_of(plan).is_deepspeeds:
        optimizer = _NOT_IN_THE_SCRIPT
    assert job.task is not None and isinstance(optimizer, Constructor)
    return {
        "header": header(job, *PACKAGES[consumer], *adapting_packages(job), *loss_packages(job)),
        "plan": plan,
        "model": job.model_name,
        "model_arguments": model_arguments(job),
        "auto": AUTO_CLASSES[job.task],
        "task": job.task,
        "weights": weights(job),
        "learning_rate": job.learning_rate,
        "onto_device": plan.backend == "ddp" and not job.adaptation.quantization,
        **template_values(job),
        "predicted": job.peaks.get(job.allocated or ""),
        "checkpointing": checkpointing_call(job) if is_of_model(job) or consumer != "accelerate" else "",
        "selective": plan.checkpointing == "selective",
        "saves_on_host": saves_on_host(job),
        "optimizer": optimizer.call(),
        "bitsandbytes": optimizer.module.startswith("bitsandbytes"),
        "torchao": optimizer.module.startswith("torchao"),
        "schedulefree": optimizer.has_modes,
        "optimi": optimizer.module == "optimi",
        "loss_call": script_call(job),
        "searches_unused": job.searches_unused,
        "layers": list(job.wrapped_classes),
        "least": plan.wrap_policy.number if plan.wrap_policy.kind == "size" else 0,
    }


def _through_accelerate(job: Job) -> dict[str, Any]:
    plan = job.plan
    in_file = plan.backend == "deepspeed" and accelerate.needs_a_file(plan) and deepspeed.names_optimizer(plan)
    reduces_each = plan.backend in ("fsdp1", "fsdp2") and not plan.defers_reduction
    return {
        "dummy": in_file,
        "sync_each_batch": reduces_each and plan.gradient_accumulation_steps > 1,
        "steps_flat_parameters": plan.steps_flat_parameters,
    }


def _through_deepspeed(job: Job) -> dict[str, Any]:
    return {
        "stage3": stage(job.plan) == 3,
        "own_optimizer": not deepspeed.names_optimizer(job.plan),
        "deepspeed_file": DEEPSPEED_FILE,
    }


def _through_fsdp1(plan: Plan) -> dict[str, Any]:
    prefetch = plan.backward_prefetch
    return {
        "sharding": torch_sharding_name(plan),
        "hybrid": plan.strategy == "hsdp",
        "compute": half_dtype(plan.precision) if plan.mixed else None,
        "prefetch": "None" if prefetch == "none" else f"BackwardPrefetch.{PREFETCH_NAMES[prefetch]}",
        "offload": plan.offload == "parameters",
    }
