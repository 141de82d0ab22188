"""Reads configurations of TRL's sft script, as that script does."""

import json
import sys

from trl import (
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    SFTConfig,
    TrlParser,
    get_peft_config,
    get_quantization_config,
)


def read(path):
    parser = TrlParser((ScriptArguments, SFTConfig, ModelConfig, DatasetMixtureConfig))
    script, arguments, model, _ = parser.parse_args_and_config(["--config", path])
    adapter, quantization = get_peft_config(model), get_quantization_config(model)
    return {
        "dataset": script.dataset_name,
        "model": model.model_name_or_path,
        "dtype": model.dtype,
        "seq_len": arguments.max_length,
        "micro_batch_size": arguments.per_device_train_batch_size,
        "bf16": arguments.bf16,
        "checkpointing": arguments.gradient_checkpointing,
        "fsdp_version": (arguments.fsdp_config or {}).get("version") if arguments.fsdp else None,
        "deepspeed_stage": arguments.deepspeed["zero_optimization"]["stage"] if arguments.deepspeed else None,
        "optim": str(arguments.optim.value),
        "rank": adapter and adapter.r,
        "alpha": adapter and adapter.lora_alpha,
        "modules": adapter and (sorted(adapter.target_modules) if not isinstance(adapter.target_modules, str) else adapter.target_modules),
        "quantization": quantization and quantization.to_diff_dict(),
    }  # fmt: skip


print("FOUND", json.dumps({path: read(path) for path in sys.argv[1:]}), flush=True)
