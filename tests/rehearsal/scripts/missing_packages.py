"""Peaks of training steps of models whose packages of kernels are not installed, under transformers' Trainer.

Argument: for each job the model's configuration, its precision, micro-batch and length, and the import names of the missing packages, as
JSON. Triton's launches of the other packages, which do nothing here, are left out with their compilation.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from training import peak_of_trainer, print_peaks
from transformers import AutoConfig, AutoModelForCausalLM
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction


def peak_of(config: dict[str, Any], precision: str, batch: int, length: int, missing: list[str]) -> int:
    """The peak of the steps after the first, which makes the optimizer's state."""
    # the allocator then splits every block, so that the peak does not depend on which blocks it reuses
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    sys.modules.update(dict.fromkeys(missing))  # an import of these raises ImportError
    if "fla" not in missing:
        from fla.ops.utils.cache import CachedAutotuner

        CachedAutotuner.run = lambda *args, **kwargs: None
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype)
    return peak_of_trainer(model, list(range(1, length + 1)), batch, precision)


def main() -> None:
    for launcher in (JITFunction, Autotuner):
        launcher.run = lambda *args, **kwargs: None
    sys.path.append(str(Path(__file__).parents[1] / "packages"))
    print_peaks(lambda job: peak_of(*job))


if __name__ == "__main__":
    main()
