"""Peaks of training steps of models with Mamba-2 layers and mamba-ssm, under transformers' Trainer.

Argument: for each job the model's configuration, its precision, micro-batch and length, as JSON. mamba-ssm's own Python code runs.
Triton's launches, which do nothing here, are left out with their compilation; a search for launch parameters takes the first ones.
causal-conv1d is a CUDA extension: a stand-in allocates what its Python code does.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from datasets import Dataset
from training import SteadyPeak, print_peaks, usual_arguments
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction


def causal_conv1d_fwd_function(x: torch.Tensor, *_: Any) -> torch.Tensor:
    """causal-conv1d 1.7, cpp_functions.py."""
    assert x.stride(1) == 1, "a layout without a copy"
    return torch.empty_like(x)


def causal_conv1d_bwd_function(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, grad: torch.Tensor, _1: Any, _2: Any, _3: Any,
    dx: torch.Tensor | None, *_: Any,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """causal-conv1d 1.7, cpp_functions.py."""
    assert grad.stride(1) == x.stride(1) == 1, "the C++ code would copy the gradient"
    dx = torch.empty_like(x) if dx is None else dx
    dweight = torch.zeros_like(weight, dtype=torch.float32)
    dbias = None if bias is None else torch.zeros_like(bias, dtype=torch.float32)
    return dx, dweight.type_as(weight), None if dbias is None or bias is None else dbias.type_as(bias), None


def peak_of(config: dict[str, Any], precision: str, batch: int, length: int) -> int:
    """The peak of the steps after the first, which makes the optimizer's state."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    calls = sys.modules[type(model).__module__].mamba2_split_conv1d_scan_combined.__closure__
    modules = {getattr(cell.cell_contents, "__module__", "") for cell in calls}
    assert "mamba_ssm.ops.triton.ssd_combined" in modules, modules
    rows = {"input_ids": [list(range(1, length + 1))] * (4 * batch)}
    data = Dataset.from_dict(rows | {"labels": rows["input_ids"]}).with_format("torch")
    found = SteadyPeak()
    arguments = TrainingArguments(**usual_arguments(batch, precision))
    Trainer(model, args=arguments, train_dataset=data, callbacks=[found]).train()
    return found.peak


def first_configuration(tuner: Any, *_: Any, **__: Any) -> None:
    tuner.best_config = tuner.configs[0]


def without_extension() -> ModuleType:
    """mamba-ssm without its `__init__`, which imports the CUDA extension of Mamba-1."""
    spec = find_spec("mamba_ssm")
    assert spec is not None
    package = ModuleType("mamba_ssm")
    package.__spec__, package.__path__ = spec, list(spec.submodule_search_locations or ())
    return package


def main() -> None:
    JITFunction.run = lambda *args, **kwargs: None
    Autotuner.run = first_configuration
    package, functions = ModuleType("causal_conv1d"), ModuleType("causal_conv1d.cpp_functions")
    package.causal_conv1d_fn = None
    functions.causal_conv1d_fwd_function = causal_conv1d_fwd_function
    functions.causal_conv1d_bwd_function = causal_conv1d_bwd_function
    functions.causal_conv1d_update_function = None
    sys.modules |= {
        "causal_conv1d": package,
        "causal_conv1d.cpp_functions": functions,
        "mamba_ssm": without_extension(),
    }
    print_peaks(lambda job: peak_of(*job))


if __name__ == "__main__":
    main()
