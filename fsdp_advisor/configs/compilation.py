"""Reads the settings of torch.compile: the Trainer's `torch_compile`, and accelerate's settings that begin with `dynamo_`.

Source: transformers 5.23.0, training_args.py, `__post_init__`; accelerate 1.15.0, commands/launch.py, utils/launch.py,
utils/dataclasses.py, TorchDynamoPlugin.
"""

from __future__ import annotations

from typing import Any

from fsdp_advisor.configs.collect import Collector, active, truth

_MODES = {
    "reduce-overhead": "CUDA graphs keep the memory of the whole step",
    "max-autotune": "CUDA graphs keep the memory of the whole step",
    "max-autotune-no-cudagraphs": "products may run in other kernels",
}
"""The modes besides the default one, and what the estimate leaves out of them. Source: torch 2.13, _inductor/__init__.py,
list_mode_options.
"""


def read_torch_compile(found: Collector) -> None:
    """Set the compilation from the Trainer's arguments, in which a backend or a mode switches it on, too."""
    backend, mode = (found.take(f"torch_compile_{name}") for name in ("backend", "mode"))
    asked = found.peek("torch_compile")
    found.take("torch_compile")
    if truth(asked or False) or asked == "auto" or backend or mode:
        _set(found, backend or "inductor", mode)


def read_dynamo(found: Collector) -> None:
    """Set the compilation from accelerate's keys. Without a backend they compile nothing, but regions also apply to the Trainer's
    `torch_compile`, because the launcher sets a variable for them.
    """
    backend, mode = found.take("dynamo_backend"), found.take("dynamo_mode")
    if found.flag("dynamo_use_regional_compilation"):
        found.options["regions"] = True
    for name in ("fullgraph", "dynamic"):
        found.take(f"dynamo_use_{name}")  # the shapes of a batch are the same in each step
    if not active(backend if not isinstance(backend, str) else backend.lower()):
        return
    _set(found, backend, mode)


def _set(found: Collector, backend: Any, mode: Any) -> None:
    """Set the compilation of the whole model by Inductor, which is the only backend that is modelled."""
    if str(backend).lower() != "inductor":
        found.omits(f"torch.compile with backend {backend}; the estimate is of steps that are not compiled")
        return
    found.options["compile"] = "model"
    if (left_out := _MODES.get(str(mode))) is not None:
        found.omits(f"torch.compile with mode {mode}, in which {left_out}; the estimate is of its default mode")


def resolve_regions(options: dict[str, Any]) -> None:
    """Replace the compilation of the whole model by that of layers if accelerate's regional compilation is on."""
    if options.pop("regions", False) and options.get("compile") == "model":
        options["compile"] = "layer"
