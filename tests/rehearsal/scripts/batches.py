"""Peaks of training steps whose batches are packed, padding-free or padded, as TRL's SFTTrainer and the Trainer make them.

Arguments: the model's configuration, and for each job its batch, attention, precision, micro-batch, length and whether the model is
compiled, as JSON.
"""

from __future__ import annotations

from typing import Any

import torch
from compiled import launch_nothing
from compiled_trainers import label_tokens
from datasets import Dataset
from training import SteadyPeak, print_peaks, tokenizer, usual_arguments
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer


def lengths_of(kind: str, batch: int, length: int) -> list[int]:
    """The lengths of the data set's sequences. A micro-batch has all of them, so each step has the same."""
    if "packed" in kind:
        return [length // 2] * (2 * batch)
    if "padded" in kind:
        return [length, *[length * 6 // 10] * (batch - 1)]
    return [length] * batch


def peak_of(model: Any, kind: str, precision: str, batch: int, length: int, compiled: bool) -> int:
    rows = {"input_ids": [list(range(1, n + 1)) for n in lengths_of(kind, batch, length)]}
    found = SteadyPeak()
    usual = {**usual_arguments(batch, precision), "torch_compile": compiled}
    trainer: Trainer
    if kind.startswith("trl"):
        batches: dict[str, Any] = {"max_length": length}
        if kind == "trl packed":
            batches |= {"packing": True}
        elif kind == "trl padding-free":
            batches = {"padding_free": True, "max_length": None}
        arguments = SFTConfig(**usual, **batches, gradient_checkpointing=False)
        trainer = SFTTrainer(model, args=arguments, train_dataset=Dataset.from_dict(rows), processing_class=tokenizer())
        trainer.add_callback(found)
    else:
        collator = (
            DataCollatorWithFlattening()
            if "flattened" in kind
            else DataCollatorForLanguageModeling(tokenizer(), mlm=False)
        )
        data = Dataset.from_dict(rows)
        trainer = Trainer(
            model, args=TrainingArguments(**usual), train_dataset=data, data_collator=collator, callbacks=[found]
        )
    trainer.train()
    return found.peak


def measured(config: dict[str, Any], job: tuple[str, str, str, int, int, bool]) -> int:
    kind, attention, precision, batch, length, compiled = job
    if compiled:
        launch_nothing()
        label_tokens()
    settings = AutoConfig.for_model(**config)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(settings, dtype=dtype, attn_implementation=attention)
    return peak_of(model, kind, precision, batch, length, compiled)


if __name__ == "__main__":
    print_peaks(measured)
