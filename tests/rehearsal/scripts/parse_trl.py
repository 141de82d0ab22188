"""Reads configurations of TRL's scripts, as these scripts do. Arguments: TASK=PATH."""

import json
import sys

from trl import (
    DatasetMixtureConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    ModelConfig,
    RewardConfig,
    ScriptArguments,
    SFTConfig,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)
from trl.scripts.grpo import GRPOScriptArguments

CONFIGURATIONS = {"sft": SFTConfig, "dpo": DPOConfig, "kto": KTOConfig, "reward": RewardConfig, "grpo": GRPOConfig}
OF_GRPO = (
    "num_generations", "max_completion_length", "beta", "num_iterations", "steps_per_generation", "use_vllm", "vllm_mode",
    "vllm_gpu_memory_utilization", "vllm_enable_sleep_mode", "vllm_tensor_parallel_size", "vllm_max_model_length",
)  # fmt: skip
OF_EVALUATION = ("per_device_eval_batch_size", "prediction_loss_only", "eval_accumulation_steps")


def read(task, path):
    script_arguments = GRPOScriptArguments if task == "grpo" else ScriptArguments
    parser = TrlParser((script_arguments, CONFIGURATIONS[task], ModelConfig, DatasetMixtureConfig))
    script, arguments, model, _ = parser.parse_args_and_config(["--config", path])
    adapter, quantization = get_peft_config(model), get_quantization_config(model)
    return {
        "dataset": script.dataset_name,
        "model": model.model_name_or_path,
        "dtype": model.dtype,
        "seq_len": getattr(arguments, "max_length", None),
        "completions": {name: getattr(arguments, name, None) for name in OF_GRPO},
        "micro_batch_size": arguments.per_device_train_batch_size,
        "bf16": arguments.bf16,
        "checkpointing": arguments.gradient_checkpointing,
        "fsdp_version": (arguments.fsdp_config or {}).get("version") if arguments.fsdp else None,
        "deepspeed_stage": arguments.deepspeed["zero_optimization"]["stage"] if arguments.deepspeed else None,
        "optim": str(arguments.optim.value),
        "learning_rate": (arguments.learning_rate, CONFIGURATIONS[task].learning_rate),
        "rank": adapter and adapter.r,
        "adapted_task": adapter and adapter.task_type,
        "alpha": adapter and adapter.lora_alpha,
        "modules": adapter and (sorted(adapter.target_modules) if not isinstance(adapter.target_modules, str) else adapter.target_modules),
        "quantization": quantization and quantization.to_diff_dict(),
        "offloads": getattr(arguments, "activation_offloading", None),
        "evaluation": {name: getattr(arguments, name) for name in OF_EVALUATION} | {"eval_strategy": str(arguments.eval_strategy.value)},
        "precomputes": getattr(arguments, "precompute_ref_log_probs", None),
    }  # fmt: skip


jobs = [word.split("=", 1) for word in sys.argv[1:]]
print("FOUND", json.dumps({path: read(task, path) for task, path in jobs}), flush=True)
