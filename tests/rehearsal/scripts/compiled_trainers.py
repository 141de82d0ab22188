"""The peak of compiled steps of transformers' Trainer, of TRL's, or of a loop with accelerate, on each of several ranks, in bf16-mixed.

Arguments as JSON: the model's configuration, and the job: `library` (`trainer`, `trl` or `accelerate`), `attention`, `task` (of TRL),
`fsdp` (FSDP2 instead of DDP), `checkpointing` (`gradient_checkpointing`; of accelerate `fsdp_activation_checkpointing`), `regions`
(accelerate's regional compilation), `lora` (adapters of queries and values, in fp32), `packs` (their base in 4 bits), `dtype` (in which the
model is loaded), `batch` and `length`.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import sys
from typing import Any

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import TorchDynamoPlugin
from compiled import in_4_bits, launch_nothing, layers_of
from datasets import Dataset
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from training import SteadyPeak, tokenizer, usual_arguments
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Trainer,
    TrainingArguments,
)

ADAPTERS = LoraConfig(task_type="CAUSAL_LM", r=16, target_modules=["q_proj", "v_proj"])


def arguments_of(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a trainer that compiles the model."""
    settings = usual_arguments(job["batch"], "bf16-mixed")
    settings |= {"torch_compile": True, "gradient_checkpointing": job["checkpointing"]}
    if job["fsdp"]:
        layer = type(layers_of(model)[0]).__name__
        wrap = {"auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "transformer_layer_cls_to_wrap": [layer]}
        settings |= {"fsdp": True, "fsdp_config": {"version": 2, "reshard_after_forward": True, **wrap}}
    return settings


def rows_of(job: dict[str, Any]) -> list[list[int]]:
    """The tokens of sixteen micro-batches."""
    return [[token % 50 + 1 for token in range(job["length"])]] * (16 * job["batch"])


def of_trainer(model: Any, job: dict[str, Any]) -> int:
    found = SteadyPeak()
    rows = rows_of(job)
    data = Dataset.from_dict({"input_ids": rows, "labels": rows}).with_format("torch")
    arguments = TrainingArguments(**arguments_of(model, job))
    Trainer(model, args=arguments, train_dataset=data, callbacks=[found]).train()
    return found.peak


def label_tokens(last: int = 0) -> None:
    """Set masks that compiled code computes, because kernels do nothing here and TRL's loss selects tokens by such a mask. Scalars are
    False.

    `last`: how many tokens at the end of a sequence have labels; 0: all.
    """
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def run(self: Any, *values: Any, **_: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor) and value.dtype == torch.bool:
                value.data.zero_()  # `data`: not counted as a change of the tensor
                if value.dim():
                    value.data[..., -last:] = True

    CachingAutotuner.run = run


def of_preferences(model: Any, job: dict[str, Any]) -> int:
    from preferences import TRAINERS, examples

    found = SteadyPeak()
    configuration, trainer_class = TRAINERS[job["task"]]
    models = [model] if job["task"] == "reward" or job["lora"] else [model, copy.deepcopy(model).eval()]
    arguments = configuration(**arguments_of(model, job), max_length=job["length"])
    data = Dataset.from_dict(examples(job["task"], 16 * job["batch"], job["length"]))
    adapters = ADAPTERS if job["lora"] else None
    trainer = trainer_class(
        *models, args=arguments, train_dataset=data, processing_class=tokenizer(), peft_config=adapters
    )
    trainer.add_callback(found)
    trainer.train()
    return found.peak


def of_trl(model: Any, job: dict[str, Any]) -> int:
    from trl import SFTConfig, SFTTrainer

    if job["task"] != "sft":
        return of_preferences(model, job)
    found = SteadyPeak()
    arguments = SFTConfig(**arguments_of(model, job), max_length=job["length"])
    trainer = SFTTrainer(
        model,
        args=arguments,
        train_dataset=Dataset.from_dict({"input_ids": rows_of(job)}),
        processing_class=tokenizer(),
    )
    trainer.add_callback(found)
    trainer.train()
    return found.peak


def of_accelerate(model: Any, job: dict[str, Any]) -> int:
    sharded = None
    if job["fsdp"]:
        layer = type(layers_of(model)[0]).__name__
        sharded = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=[layer],
            reshard_after_forward=True,
            activation_checkpointing=job["checkpointing"],
        )
    accelerator = Accelerator(
        mixed_precision="bf16",
        fsdp_plugin=sharded,
        dynamo_plugin=TorchDynamoPlugin(backend="inductor", use_regional_compilation=job["regions"]),
    )
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    trained, optimizer = accelerator.prepare(model.train(), optimizer)
    tokens = torch.zeros(job["batch"], job["length"], dtype=torch.long, device="cuda")
    peak = 0
    for step in range(4):
        gc.collect()  # the compiler's cycles of references keep tensors
        torch.cuda.reset_peak_memory_stats()
        accelerator.backward(trained(input_ids=tokens, labels=tokens, use_cache=False).loss)
        optimizer.step()
        optimizer.zero_grad()
        peak = max(peak, torch.cuda.max_memory_allocated()) if step > 1 else 0
    return peak


def main() -> None:
    config, job = map(json.loads, sys.argv[1:])
    launch_nothing()
    if job["library"] == "trl":
        label_tokens()
    os.environ["ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION"] = str(job["regions"])  # as accelerate's launcher does
    settings = AutoConfig.for_model(**config)
    if job["task"] == "reward":
        settings.num_labels = 1
    auto = AutoModelForSequenceClassification if job["task"] == "reward" else AutoModelForCausalLM
    if job["packs"]:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        model = in_4_bits(settings, attn_implementation=job["attention"])
        if job["library"] == "trainer":
            model = prepare_model_for_kbit_training(model, use_gradient_checkpointing=job["checkpointing"])
    else:
        model = auto.from_config(settings, dtype=getattr(torch, job["dtype"]), attn_implementation=job["attention"])
    if job["lora"] and job["task"] == "sft":  # without a reference, which the other trainers make themselves
        model = get_peft_model(model, ADAPTERS)
    peak = {"trainer": of_trainer, "trl": of_trl, "accelerate": of_accelerate}[job["library"]](model, job)
    print(json.dumps({"rank": int(os.environ["RANK"]), "peak": peak}))


if __name__ == "__main__":
    main()
