"""Peaks of training steps of mixtures of experts under transformers' Trainer.

Argument: for each job the model's configuration, the implementation of its experts, its precision, micro-batch and length, as JSON.
"""

from __future__ import annotations

from typing import Any

from training import peak_of_trainer, print_peaks
from transformers import AutoConfig, AutoModelForCausalLM


def peak_of(job: list[Any]) -> int:
    """The peak of the later steps. The first step differs, because it creates the optimizer's state."""
    config, implementation, precision, batch, length = job
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), experts_implementation=implementation)
    return peak_of_trainer(model, list(range(1, length + 1)), batch, precision)


if __name__ == "__main__":
    print_peaks(peak_of)
