"""Arguments of Hugging Face's Trainer, as a Python module that a training script imports.

Source: transformers 5.23.0, training_args.py (`TrainingArguments`, `_process_fsdp_args`), trainer.py; accelerate 1.15.0.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any

from fsdp_advisor.engines.fsdp1.sharding import PREFETCH_NAMES
from fsdp_advisor.engines.model_outputs import searches_by_default
from fsdp_advisor.export import accelerate, deepspeed
from fsdp_advisor.export.adapters import packages as adapting_packages
from fsdp_advisor.export.adapters import template_values
from fsdp_advisor.export.batches import FLATTENING_NOTE, batch_limit
from fsdp_advisor.export.checkpointing import checkpointing_limit, is_of_model, keywords
from fsdp_advisor.export.constants import ARGUMENTS_FILE, NVME_NOTE, PACKAGES, WRAP_POLICY
from fsdp_advisor.export.evaluation import evaluation_arguments, evaluation_notes
from fsdp_advisor.export.header import header
from fsdp_advisor.export.job import Job
from fsdp_advisor.export.limits import NO_MODEL
from fsdp_advisor.export.losses import loss_limit, trainer_arguments
from fsdp_advisor.export.losses import packages as loss_packages
from fsdp_advisor.export.model_arguments import model_arguments
from fsdp_advisor.export.rendering import render
from fsdp_advisor.export.target import Target
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.model.tasks import AUTO_CLASSES
from fsdp_advisor.policies.optimizers import optimizer_of
from fsdp_advisor.policies.optimizers.interface import NamedOptimizer, Refusal


def unsupported(job: Job) -> str | None:
    """Why the Trainer cannot train the job; None if it can."""
    if job.task is None:
        return NO_MODEL
    limit = checkpointing_limit(job, "reentrant", "every", offloads=("inputs",)) or batch_limit(
        job, padding_free=True, images=True
    )
    return loss_limit(job, "liger") or limit or accelerate.unsupported(job, "trainer")


def write(job: Job) -> tuple[str, tuple[str, ...]]:
    """The module, and notes on what it cannot set."""
    plan = job.plan
    text = render(
        "trainer.py.jinja",
        header=header(job, *PACKAGES["trainer"], *adapting_packages(job), *loss_packages(job)),
        model=job.model_name,
        auto=AUTO_CLASSES[job.task or ""],
        model_arguments=model_arguments(job),
        **template_values(job),
        arguments=arguments(job),
        replicas=plan.replica_degree if replicated(plan) else None,
        shards=plan.shard_degree,
    )
    notes = list(accelerate.difference_notes(plan))
    if plan.padding_free:
        notes.append(FLATTENING_NOTE)
    notes += evaluation_notes(job)
    if job.offloads_to_nvme:
        notes.append(NVME_NOTE)
    return text, tuple(notes)


def named_optimizer(plan: Plan) -> NamedOptimizer:
    """The optimizer's name and arguments in transformers. Raises ValueError for an optimizer that `unsupported` reports."""
    named = optimizer_of(plan).transformers
    if isinstance(named, Refusal):
        raise ValueError(named.reason)
    return named


def replicated(plan: Plan) -> bool:
    """Whether the plan needs a mesh of replicas."""
    return plan.backend == "fsdp2" and plan.strategy == "hsdp" and plan.replica_degree > 1


def arguments(job: Job) -> dict[str, Any]:
    """The arguments of the plan, by their names in TrainingArguments."""
    plan, optimizer = job.plan, named_optimizer(job.plan)
    arguments: dict[str, Any] = {
        "per_device_train_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "learning_rate": job.learning_rate,
        "optim": optimizer.name,
        **trainer_arguments(job),
        **evaluation_arguments(job),
    }
    if optimizer.arguments is not None:
        arguments["optim_args"] = optimizer.arguments
    if optimizer.target_modules is not None:
        arguments["optim_target_modules"] = optimizer.targets
    if plan.precision == "fp16-mixed":
        arguments["fp16"] = True
    elif plan.precision == "bf16-mixed" or (plan.precision == "bf16" and plan.backend == "deepspeed"):
        arguments["bf16"] = True  # must agree with DeepSpeed's section, whatever the dtype of its master weights
    if plan.compile != "none":
        arguments |= {"torch_compile": True, "torch_compile_backend": "inductor", "torch_compile_mode": "default"}
    if is_of_model(job):
        arguments |= {"activation_checkpointing": True, "activation_checkpointing_kwargs": keywords(job)}
    if plan.backend in ("fsdp1", "fsdp2"):
        arguments |= {"fsdp": True, "fsdp_config": _fsdp(job)}
        if plan.gradient_accumulation_steps > 1 and not plan.defers_reduction:
            arguments["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        return arguments
    by_default = searches_by_default(plan, adapted=bool(job.adaptation.peft))
    if plan.backend == "ddp" and plan.world_size > 1 and job.searches_unused != by_default:
        arguments["ddp_find_unused_parameters"] = job.searches_unused
    if plan.backend == "deepspeed":
        arguments["deepspeed"] = deepspeed.through_trainer(job)
    return arguments


def _fsdp(job: Job) -> dict[str, Any]:
    plan = job.plan
    config: dict[str, Any] = {
        "version": 2 if plan.backend == "fsdp2" else 1,
        "reshard_after_forward": plan.reshards,
        "auto_wrap_policy": WRAP_POLICY[plan.wrap_policy.kind],
        **({"transformer_layer_cls_to_wrap": list(job.wrapped_classes)} if job.wrapped_classes else {}),
        **({"min_num_params": plan.wrap_policy.number} if plan.wrap_policy.kind == "size" else {}),
        "cpu_offload": plan.offload == "parameters",
        "activation_checkpointing": plan.checkpointing != "none" and not is_of_model(job),
        "cpu_ram_efficient_loading": True,
        "state_dict_type": f"{plan.saves_as.upper()}_STATE_DICT",
    }
    if plan.backend == "fsdp1":
        config |= {
            "reshard_after_forward": "full_shard",
            "backward_prefetch": PREFETCH_NAMES[plan.backward_prefetch].lower(),
            "forward_prefetch": plan.forward_prefetch,
            "use_orig_params": plan.use_orig_params,
            "sync_module_states": True,
        }
    return config


TARGET = Target(
    name="trainer",
    description="Hugging Face TrainingArguments (Python)",
    file_name=ARGUMENTS_FILE,
    media_type="text/x-python",
    unsupported=unsupported,
    write=write,
    usage=lambda job, file: f"from {PurePath(file).stem} import training_arguments",
    consumer="trainer",
    framework="trainer",
    compiles="regions",
    command=False,
)
