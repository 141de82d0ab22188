"""An axolotl configuration: the settings of the plan, and an example data set to replace.

Source: axolotl 0.19.0, src/axolotl/utils/schemas/{config,fsdp,model,training,validation}.py (the schema that it publishes),
utils/trainer.py (`setup_fsdp_envs`, `setup_deepspeed_env`), utils/config/__init__.py (`resolve_dtype`).
"""

from __future__ import annotations

from typing import Any

from fsdp_advisor.configs.axolotl import LORA_KERNEL_KEYS, LORA_KEYS
from fsdp_advisor.export import accelerate, deepspeed, trainer
from fsdp_advisor.export.adapters import lora, lora_limit
from fsdp_advisor.export.axolotl_images import images_keys, images_limit, images_notes
from fsdp_advisor.export.batches import axolotl_keys as batch_keys
from fsdp_advisor.export.batches import axolotl_limit
from fsdp_advisor.export.checkpointing import checkpointing_limit
from fsdp_advisor.export.constants import AXOLOTL_FILE, NVME_NOTE, PACKAGES, WRAP_POLICY
from fsdp_advisor.export.evaluation import evaluation_limit
from fsdp_advisor.export.header import yaml_text
from fsdp_advisor.export.job import Job
from fsdp_advisor.export.limits import needs_fsdp2
from fsdp_advisor.export.losses import axolotl_keys, loss_limit
from fsdp_advisor.export.model_arguments import experts_limit
from fsdp_advisor.export.script import torchrun_line
from fsdp_advisor.export.target import Target
from fsdp_advisor.job.lora_kernels import kernels_not_modelled
from fsdp_advisor.job.plan import Plan

DATASETS_NOTE = "datasets is an example: replace it with your own"

PRECISION = {
    "fp32": {"bf16": False, "fp16": False},
    "bf16": {"bf16": True, "fp16": False},  # only with DeepSpeed: its own section sets the dtype of the masters
    "bf16-mixed": {"bf16": True, "fp16": False},
    "fp16-mixed": {"bf16": False, "fp16": True},
}


def unsupported(job: Job) -> str | None:
    """Why axolotl cannot train the job; None if it can. axolotl trains through the Trainer and accelerate."""
    plan = job.plan
    if (limit := images_limit(job)) is not None:
        return limit
    if plan.backend == "fsdp1":
        return f"it no longer supports FSDP1; {needs_fsdp2(plan)}"
    if plan.precision == "bf16" and plan.backend != "deepspeed":
        return "it always treats bf16 as mixed precision; use --precision bf16-mixed"
    if job.adaptation.freeze and plan.images is None:
        return "it names the parameters to train, not those to freeze"
    if job.adaptation.peft and "target_modules" not in job.adaptation.peft:
        return "it needs the modules that get adapters: use --lora-target-modules"
    return (
        loss_limit(job, "liger", "cce")
        or experts_limit(job)
        or axolotl_limit(job)
        or checkpointing_limit(job, *(("reentrant",) if plan.backend != "fsdp2" else ()))
        or evaluation_limit(job)
        or lora_limit(job, freezes=plan.images is not None)
        or accelerate.unsupported(job, "axolotl")
    )


def write(job: Job) -> tuple[str, tuple[str, ...]]:
    """The configuration, and notes on what it cannot set."""
    notes = [DATASETS_NOTE, *images_notes(job), *accelerate.difference_notes(job.plan)]
    if job.plan.mixed and not (job.plan.stores_half or job.adaptation.quantization or job.plan.backend == "deepspeed"):
        notes.append("axolotl loads the weights in 16 bits, so it needs less memory than predicted for fp32 weights")
    if (missing := kernels_not_modelled(job.plan, job.adaptation)) is not None:
        notes.append(
            f"axolotl's kernels for adapters are off, as estimated, because they are not modelled with {missing}; without the keys "
            "lora_*_kernel they are on and keep fewer activations"
        )
    if job.plan.use_liger_kernel:
        notes.append("leave liger_rope out for GLM-4, whose positions Liger does not compute")
    if job.offloads_to_nvme:
        notes.append(NVME_NOTE)
    return yaml_text(_config(job), job, *PACKAGES["axolotl"]), tuple(notes)


def _config(job: Job) -> dict[str, Any]:
    plan = job.plan
    return {
        "base_model": job.model_name,
        "datasets": [{"path": "yahma/alpaca-cleaned", "type": "alpaca"}],
        "output_dir": "./outputs",
        "sequence_len": plan.seq_len,
        **batch_keys(plan),
        **images_keys(job),
        "micro_batch_size": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "num_epochs": 1,
        "learning_rate": job.learning_rate,
        **_optimizer(plan),
        **PRECISION[plan.precision],
        "tf32": False,
        "attn_implementation": plan.attention,
        **axolotl_keys(job),
        **_tiled_mlp(plan),
        **_adapter(job),
        **_engine(job),
    }


def _tiled_mlp(plan: Plan) -> dict[str, Any]:
    """axolotl's keys for feed-forward networks in shards. Without a number, a shard has 32,768 tokens."""
    if plan.tiled_mlp == "none":
        return {}
    return {"tiled_mlp": True, **({"tiled_mlp_num_shards": int(plan.tiled_mlp)} if plan.tiled_mlp != "auto" else {})}


def _optimizer(plan: Plan) -> dict[str, Any]:
    named = trainer.named_optimizer(plan)
    modules = named.targets.replace("-", "_") if isinstance(named.targets, str) else named.targets
    targets = {"optim_target_modules": modules} if modules else {}
    return {"optimizer": named.name, **({"optim_args": dict(named.options)} if named.options else {}), **targets}


_OF_BITSANDBYTES = ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "bnb_4bit_quant_storage")


def _adapter(job: Job) -> dict[str, Any]:
    quantization = job.adaptation.quantization
    if not job.adaptation.peft:
        return {}
    config: dict[str, Any] = {"adapter": "qlora" if "load_in_4bit" in quantization else "lora"}
    config |= {LORA_KEYS[name]: value for name, value in lora(job).items()}
    config |= {key: part in job.lora_kernels for key, part in LORA_KERNEL_KEYS.items()}
    if config["lora_target_modules"] == "all-linear":
        del config["lora_target_modules"]
        config["lora_target_linear"] = True
    if "load_in_8bit" in quantization:
        config["load_in_8bit"] = True
    elif quantization:
        config |= {"load_in_4bit": True, "bnb_config_kwargs": {name: quantization[name] for name in _OF_BITSANDBYTES}}
        if "quantize_moe_experts" in quantization:
            config["quantize_moe_experts"] = True
    return config


def _engine(job: Job) -> dict[str, Any]:
    plan = job.plan
    checkpointing = plan.activation_checkpointing != "none"
    if plan.backend == "fsdp2":
        sharding = {
            "fsdp_version": 2,
            "dp_shard_size": plan.shard_degree,
            **({"dp_replicate_size": plan.replica_degree} if plan.replica_degree > 1 else {}),
            "fsdp_config": {
                "auto_wrap_policy": WRAP_POLICY[plan.wrap_policy.kind],
                **({"transformer_layer_cls_to_wrap": ",".join(job.wrapped_classes)} if job.wrapped_classes else {}),
                "reshard_after_forward": plan.reshards,
                "offload_params": plan.offload == "parameters",
                "activation_checkpointing": checkpointing,
                "cpu_ram_efficient_loading": True,
                "state_dict_type": f"{plan.saves_as.upper()}_STATE_DICT",
            },
        }
        if plan.gradient_accumulation_steps > 1 and not plan.defers_reduction:
            sharding["accelerator_config"] = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        return sharding
    recompute: dict[str, Any] = {"gradient_checkpointing": checkpointing}
    if checkpointing:
        recompute["gradient_checkpointing_kwargs"] = {"use_reentrant": plan.checkpointing == "reentrant"}
    if job.searches_unused:
        recompute["ddp_find_unused_parameters"] = True
    if plan.backend == "deepspeed":
        return recompute | {"deepspeed": deepspeed.through_trainer(job)}
    return recompute


def usage(job: Job, file: str) -> str:
    """The command that starts every rank of a node. Source: axolotl 0.19.0, cli/main.py and cli/utils/train.py."""
    return f"axolotl train {file} --launcher torchrun -- " + torchrun_line(job, "").removeprefix("torchrun ").rstrip()


TARGET = Target(
    name="axolotl",
    description="axolotl configuration (YAML)",
    file_name=AXOLOTL_FILE,
    media_type="application/yaml",
    unsupported=unsupported,
    write=write,
    usage=usage,
    consumer="axolotl",
    framework="axolotl",
    tiles=True,
)
