"""A configuration of TRL's script for the plan's task: the settings of the plan, and an example data set to replace.

Source: TRL 1.16.0, scripts/{sft,dpo,kto,reward,grpo}.py, scripts/utils.py (`TrlParser`),
trainer/{sft,dpo,kto,reward,grpo,base,model}_config.py.
"""

from __future__ import annotations

from typing import Any

from fsdp_advisor.errors import assert_never
from fsdp_advisor.export import accelerate, trainer
from fsdp_advisor.export.adapters import lora, lora_limit, weights
from fsdp_advisor.export.batches import UNTRUNCATED_NOTE, trl_keys
from fsdp_advisor.export.checkpointing import checkpointing_limit
from fsdp_advisor.export.constants import NVME_NOTE, PACKAGES, TRL_FILE
from fsdp_advisor.export.header import yaml_text
from fsdp_advisor.export.job import Job
from fsdp_advisor.export.limits import NO_MODEL
from fsdp_advisor.export.losses import loss_limit
from fsdp_advisor.export.model_arguments import experts_limit
from fsdp_advisor.export.script import torchrun_line
from fsdp_advisor.export.target import Target
from fsdp_advisor.job.adaptation import LORA_LISTS, LORA_OPTIONS, TASK_TYPES
from fsdp_advisor.job.choices import TrainingTask
from fsdp_advisor.job.generation import Generation
from fsdp_advisor.job.plan import Plan

DATASET_NOTE = "dataset_name is an example: replace it with your own"
LOSS_NOTE = "TRL computes the loss without all logits at once, so it needs less memory than predicted; the framework trl predicts it"
RATE_NOTE = "learning_rate is ten times TRL's default, as its documentation advises for adapters"
QUANTIZED_NOTE = (
    "TRL keeps adapters on a quantized base in bf16 and does not store the other weights in fp32, so it needs less"
    " memory than predicted"
)


_DATA_SETS: dict[TrainingTask, str] = {
    "sft": "trl-lib/Capybara",
    "dpo": "trl-lib/ultrafeedback_binarized",
    "kto": "trl-lib/kto-mix-14k",
    "reward": "trl-lib/ultrafeedback_binarized",
    "grpo": "trl-lib/DeepMath-103K",
}
"""Task -> data set of TRL's own example."""
_DATA_SET_OF_IMAGES = "trl-lib/llava-instruct-mix"
"""Data set of TRL's example of supervised fine-tuning with images."""
_LEARNING_RATES: dict[TrainingTask, tuple[float, float]] = {
    "sft": (2e-5, 2e-4),
    "dpo": (1e-6, 1e-5),
    "kto": (1e-6, 1e-5),
    "reward": (1e-4, 1e-3),
    "grpo": (1e-6, 1e-5),
}
"""Task -> learning rates of a whole model, which is TRL's default, and of adapters, which is ten times as much. Source: trl 1.16,
trainer/*_config.py; TRL's documentation, peft_integration.md, "Learning Rate Considerations".
"""


def unsupported(job: Job) -> str | None:
    """Why TRL cannot train the job; None if it can. TRL trains through the Trainer."""
    if (limit := _task_limit(job)) is not None:
        return limit
    if trainer.replicated(job.plan):
        return "its configuration file has no mesh of replicas; use the target trainer"
    return (
        loss_limit(job, "trl")
        or experts_limit(job)
        or checkpointing_limit(job, "reentrant", "every", "selective-trl", offloads=("trl",))
        or lora_limit(job)
        or accelerate.unsupported(job, "trl")
    )


def _task_limit(job: Job) -> str | None:
    """Why TRL's script for the plan's task cannot train the model. The one for supervised fine-tuning loads the class of model that the
    checkpoint names, and its processor. Source: trl 1.16, trainer/sft_trainer.py, `__init__`; trainer/utils.py, `create_model_from_path`.
    """
    task, images = job.plan.task, job.plan.images
    if job.task == "image-text-to-text" and task == "sft":
        has_limit = images is not None and images.max_pixels
        return "its script has no option for the largest image; leave --image-max-pixels out" if has_limit else None
    if job.task != ("sequence-classification" if task == "reward" else "causal-lm"):
        return f"its {task} script trains only causal language models" if job.task else NO_MODEL
    return None


def write(job: Job) -> tuple[str, tuple[str, ...]]:
    """The configuration, and notes on what it cannot set."""
    return yaml_text(_config(job), job, *PACKAGES["trl"]), tuple(notes(job))


def notes(job: Job) -> list[str]:
    """What a configuration of TRL cannot set for this job, one sentence each."""
    found = [DATASET_NOTE, *accelerate.difference_notes(job.plan)]
    if job.plan.loss_code == "full" and job.plan.task != "reward":
        found.append(LOSS_NOTE)
    if job.adaptation.quantization and job.adaptation.prepared:
        found.append(QUANTIZED_NOTE)
    if job.adaptation.method:
        found.append(RATE_NOTE)
    if job.plan.images is not None:
        found.append(
            "a sample has its images in a column images, and its text in messages or in prompt and completion; both together are at most"
            f" {job.plan.seq_len} tokens (max_length)"
        )
    if job.plan.padding_free and job.plan.packing == "none":
        found.append(UNTRUNCATED_NOTE.format(job.plan.seq_len))
    if job.offloads_to_nvme:
        found.append(NVME_NOTE)
    if job.plan.evaluation is not None:
        found.append("the data set needs a split named test, on which TRL's script evaluates")
    if (generation := job.plan.generation) is not None:
        found.append(
            f"reward_funcs is an example; TRL does not shorten prompts, so leave out those of more than "
            f"{job.plan.seq_len - generation.completion_length} tokens"
        )
        if generation.generator == "server":
            found.append(f"start vLLM's server on other GPUs first: trl vllm-serve --model {job.model_name}")
    return found


def _config(job: Job) -> dict[str, Any]:
    plan = job.plan
    arguments = trainer.arguments(job)
    checkpointing = bool(arguments.pop("activation_checkpointing", False))
    return {
        "model_name_or_path": job.model_name,
        "dtype": weights(job),
        "attn_implementation": plan.attention,
        "dataset_name": _DATA_SETS[plan.task] if plan.images is None else _DATA_SET_OF_IMAGES,
        "output_dir": "./outputs",
        **({"max_length": plan.seq_len} if plan.generation is None else {}),
        **_of_task(plan),
        **({} if plan.router_aux_loss_coef is None else {"router_aux_loss_coef": plan.router_aux_loss_coef}),
        "bf16": False,  # TRL's default is true
        "gradient_checkpointing": checkpointing,  # TRL's default is true
        **(
            {"gradient_checkpointing_kwargs": arguments.pop("activation_checkpointing_kwargs")} if checkpointing else {}
        ),
        **({"activation_offloading": True} if plan.activation_offload else {}),
        **arguments,
        "learning_rate": _LEARNING_RATES[plan.task][bool(job.adaptation.method)],
        **_adapter(job),
    }


def _of_task(plan: Plan) -> dict[str, Any]:
    """The settings that only the plan's task has. They also identify the task when the file is read: `beta` means DPO, the weights KTO,
    the coefficient a reward model.
    """
    match plan.task:
        case "sft":
            return trl_keys(plan)
        case "dpo" | "kto":
            weights = {"desirable_weight": 1.0, "undesirable_weight": 1.0} if plan.task == "kto" else {}
            return {"beta": 0.1, **weights, "precompute_ref_log_probs": plan.reference == "none"}
        case "reward":
            return {"center_rewards_coefficient": None}
        case "grpo":
            assert plan.generation is not None
            return {"reward_funcs": ["accuracy_reward"], **_generation(plan.generation)}
        case _:
            assert_never(plan.task)


def _generation(generation: Generation) -> dict[str, Any]:
    """The settings of GRPO's completions."""
    settings: dict[str, Any] = {
        "num_generations": generation.completions_per_prompt,
        "max_completion_length": generation.completion_length,
        "beta": generation.beta,
        "num_iterations": generation.iterations,
        **({"steps_per_generation": generation.steps} if generation.steps is not None else {}),
    }
    if generation.generator == "transformers":
        return settings
    settings |= {"use_vllm": True, "vllm_mode": generation.generator}
    if generation.generator == "colocate":
        settings |= {
            "vllm_gpu_memory_utilization": generation.memory_utilization,
            "vllm_enable_sleep_mode": generation.sleeps,
            "vllm_tensor_parallel_size": generation.tensor_parallel,
            **({} if generation.max_length is None else {"vllm_max_model_length": generation.max_length}),
        }
    return settings


def _adapter(job: Job) -> dict[str, Any]:
    quantization = job.adaptation.quantization
    if not job.adaptation.peft:
        return {}
    config: dict[str, Any] = {"use_peft": True}
    if job.plan.task == "reward":  # PEFT then also trains the score layer
        config["lora_task_type"] = TASK_TYPES[job.task or ""]
    for name, value in lora(job).items():
        listed = name in LORA_LISTS and isinstance(value, str)
        config[LORA_OPTIONS[name]] = [value] if listed else value
    if "load_in_8bit" in quantization:
        config["load_in_8bit"] = True
    elif quantization:
        config |= {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": quantization["bnb_4bit_quant_type"],
            "use_bnb_nested_quant": quantization["bnb_4bit_use_double_quant"],
            "bnb_4bit_quant_storage": quantization["bnb_4bit_quant_storage"],
        }
    return config


TARGET = Target(
    name="trl",
    description="configuration of TRL's sft, dpo, kto, reward or grpo (YAML)",
    file_name=TRL_FILE,
    media_type="application/yaml",
    unsupported=unsupported,
    write=write,
    usage=lambda job, file: torchrun_line(job, f"-m trl.scripts.{job.plan.task} --config {file}"),
    consumer="trl",
    framework="trl",
    compiles="regions",
)
