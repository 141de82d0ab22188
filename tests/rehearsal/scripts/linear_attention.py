"""Peaks of training steps of models with flash-linear-attention and causal-conv1d, under transformers' Trainer.

Argument: for each job the model's configuration, its precision, micro-batch and length, as JSON. Triton's launches, which do nothing
here, are left out with their compilation. causal-conv1d is a CUDA extension: tests/rehearsal/packages stands in for it.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
from fla.ops.utils.cache import CachedAutotuner
from training import peak_of_trainer
from transformers import AutoConfig, AutoModelForCausalLM
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

CALLED = {
    "torch_chunk_gated_delta_rule": "fla.ops.gated_delta_rule.chunk",
    "chunk_kimi_delta_attention": "fla.ops.kda.chunk",
}
"""Name of a function in transformers' models -> the module of the package's function that it must call."""


def peak_of(config: dict[str, Any], precision: str, batch: int, length: int) -> int:
    """The peak of the steps after the first, which makes the optimizer's state."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    code = sys.modules[type(model).__module__]
    name, of_package = next((name, place) for name, place in CALLED.items() if hasattr(code, name))
    modules = {getattr(cell.cell_contents, "__module__", "") for cell in getattr(code, name).__closure__}
    assert of_package in modules, modules
    return peak_of_trainer(model, list(range(1, length + 1)), batch, precision)


def main() -> None:
    for launcher in (JITFunction, Autotuner, CachedAutotuner):
        launcher.run = lambda *args, **kwargs: None
    sys.path.append(str(Path(__file__).parents[1] / "packages"))
    peaks = {}
    for name, job in json.loads(sys.argv[1]).items():
        peaks[name] = peak_of(*job)
        gc.collect()
    print("FOUND", json.dumps(peaks))


if __name__ == "__main__":
    main()
