"""Peaks of the Trainer's own evaluation between training steps, and of the steps.

Arguments: the model's configuration and the job's settings, as JSON. Settings: `trainer` (or `trl`), `precision`, micro-batches, length,
`keeps` (whether there is a compute_metrics), `batches` (of evaluation, for each rank), and further arguments of the Trainer.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from datasets import Dataset
from training import SteadyPeak, tokenizer, usual_arguments
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments


class EvaluationPeak(SteadyPeak):
    """A callback that also measures the peak of the last evaluation, which follows an optimizer step."""

    evaluated = reserved = 0

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.evaluated, self.reserved = torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()


def trainer_of(model: Any, job: dict[str, Any], found: EvaluationPeak) -> Trainer:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    length, batch, evaluated = job["length"], job["per_device_train_batch_size"], job["per_device_eval_batch_size"]
    usual = usual_arguments(batch, job["precision"]) | {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": evaluated,
    }
    usual |= job.get("arguments", {})

    def rows(count: int) -> Dataset:
        ids = [list(range(1, length + 1))] * count
        return Dataset.from_dict({"input_ids": ids} | ({} if job["trainer"] == "trl" else {"labels": ids}))

    sets = {"train_dataset": rows(4 * batch * ranks), "eval_dataset": rows(job["batches"] * evaluated * ranks)}
    metrics = {"compute_metrics": lambda prediction: {"count": len(prediction.predictions)}} if job["keeps"] else {}
    if job["trainer"] == "trl":
        from trl import SFTConfig, SFTTrainer

        arguments = SFTConfig(**usual, max_length=length)
        trainer: Trainer = SFTTrainer(model, args=arguments, processing_class=tokenizer(), **sets, **metrics)
    else:
        sets = {name: data.with_format("torch") for name, data in sets.items()}
        trainer = Trainer(model, args=TrainingArguments(**usual), **sets, **metrics)
    trainer.add_callback(found)
    return trainer


def main() -> None:
    config, job = (json.loads(word) for word in sys.argv[1:])
    dtype = torch.bfloat16 if job["precision"] == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    found = EvaluationPeak()
    trainer_of(model, job, found).train()
    values = {
        "rank": int(os.environ.get("RANK", "0")),
        "allocated": found.peak,
        "evaluated": found.evaluated,
        "reserved": found.reserved,
    }
    print(json.dumps(values))


if __name__ == "__main__":
    main()
