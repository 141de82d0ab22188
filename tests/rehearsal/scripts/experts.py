"""Peaks of training steps of mixtures of experts under transformers' Trainer.

Argument: for each job the model's configuration, the implementation of its experts, its precision, micro-batch and length, as JSON.
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from training import SteadyPeak, print_peaks, usual_arguments
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments


def peak_of(job: list[Any]) -> int:
    """The peak of the later steps. The first step differs, because it creates the optimizer's state."""
    config, implementation, precision, batch, length = job
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), experts_implementation=implementation)
    rows = {"input_ids": [list(range(1, length + 1))] * (4 * batch)}
    data = Dataset.from_dict(rows | {"labels": rows["input_ids"]}).with_format("torch")
    found = SteadyPeak()
    arguments = TrainingArguments(**usual_arguments(batch, precision))
    Trainer(model, args=arguments, train_dataset=data, callbacks=[found]).train()
    return found.peak


if __name__ == "__main__":
    print_peaks(peak_of)
