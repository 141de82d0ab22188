"""Peaks of training steps of models with Mamba layers and mamba-ssm, under transformers' Trainer.

Argument: for each job the model's configuration, its precision, micro-batch and length, as JSON. mamba-ssm's own Python code runs.
Triton's launches, which do nothing here, are left out with their compilation; a search for launch parameters takes the first ones.
causal-conv1d and a part of mamba-ssm are CUDA extensions: tests/rehearsal/packages stands in for them.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from training import SteadyPeak, print_peaks, usual_arguments
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

CALLED = ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn", "mamba_selective_scan")
"""transformers' functions that call the package, whichever a model has."""


def peak_of(config: dict[str, Any], precision: str, batch: int, length: int) -> int:
    """The peak of the steps after the first, which makes the optimizer's state."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    code = sys.modules[type(model).__module__]
    called = next(function for name in CALLED if (function := getattr(code, name, None)) is not None)
    modules = {getattr(cell.cell_contents, "__module__", "") for cell in called.__closure__}
    assert modules & {"mamba_ssm.ops.triton.ssd_combined", "mamba_ssm.ops.selective_scan_interface"}, modules
    rows = {"input_ids": [list(range(1, length + 1))] * (4 * batch)}
    data = Dataset.from_dict(rows | {"labels": rows["input_ids"]}).with_format("torch")
    found = SteadyPeak()
    arguments = TrainingArguments(**usual_arguments(batch, precision))
    Trainer(model, args=arguments, train_dataset=data, callbacks=[found]).train()
    return found.peak


def first_configuration(tuner: Any, *_: Any, **__: Any) -> None:
    tuner.best_config = tuner.configs[0]


def main() -> None:
    JITFunction.run = lambda *args, **kwargs: None
    Autotuner.run = first_configuration
    sys.path.append(str(Path(__file__).parents[1] / "packages"))
    print_peaks(lambda job: peak_of(*job))


if __name__ == "__main__":
    main()
