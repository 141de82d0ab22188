"""Peaks of training steps whose feed-forward networks run in shards of the sequence by Liger's or axolotl's code.

Argument: for each job the model's configuration, the implementation, the engine, the precision, the checkpointing, whether adapters are
trained, the micro-batch, the length, the shards and the micro-batches of a step, as JSON.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from compiled import prepared
from peft import LoraConfig, get_peft_model
from training import peak_of_steps, print_peaks
from transformers import AutoConfig, AutoModelForCausalLM


def of_axolotl() -> Any:
    """axolotl's `TiledMLP`, without the rest of the package, which needs further packages."""
    (folder,) = importlib.util.find_spec("axolotl").submodule_search_locations  # type: ignore[union-attr]  # it is installed
    spec = importlib.util.spec_from_file_location("tiled", Path(folder, "monkeypatch", "tiled_mlp", "base.py"))
    module = importlib.util.module_from_spec(spec)  # type: ignore[arg-type]  # it is a file
    spec.loader.exec_module(module)  # type: ignore[union-attr]  # it is a file
    return module.TiledMLP


def tile(model: Any, code: str, shards: int) -> None:
    """Tile each network as axolotl's patch does: the class's forward over `shards` of the sequence."""
    # imported here, because it initializes CUDA, after which a process cannot fork
    from liger_kernel.ops import apply_tiled_mlp

    by_axolotl = of_axolotl() if code == "axolotl" else None

    for layer in model.model.layers:
        whole = type(layer.mlp).forward

        def tiled(self, x, whole=whole):  # type: ignore[no-untyped-def]  # as the class's forward
            if by_axolotl is None:
                return apply_tiled_mlp(whole, self, x, num_shards=shards)
            trained = [p for p in self.parameters() if p.requires_grad]
            return by_axolotl.apply(whole, self, x, shards, trained)

        layer.mlp.forward = tiled.__get__(layer.mlp)


def peak_of(
    config: dict[str, Any], code: str, engine: str, precision: str, checkpointing: str, adapts: bool, batch: int, length: int,
    shards: int, accumulation: int,
) -> int:  # fmt: skip
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=dtype).train()
    if checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    tile(model, code, shards)
    if adapts:
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
        if code == "axolotl":  # as its loader of models does
            model.enable_input_require_grads()
    return peak_of_steps(prepared(model, engine, precision), precision, engine, batch, length, accumulation)


def measured(job: list[Any]) -> int:
    return peak_of(*job)


if __name__ == "__main__":
    print_peaks(measured)
