"""Reads Liger's loss and kernels from the keywords of its patch, which scripts and the Trainer's `liger_kernel_config` have.

Source: liger-kernel 0.8.5, transformers/monkey_patch.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdp_advisor.configs.collect import Collector


def set_liger(found: Collector, kernels: Mapping[str, Any], *, trl: bool = False) -> None:
    """Set Liger's loss and its other kernels, which are on unless a keyword switches them off. TRL leaves Liger's loss out."""
    has_loss = bool(kernels.get("fused_linear_cross_entropy", True)) and not trl
    others = {bool(kernels.get(name, True)) for name in ("rope", "rms_norm", "swiglu", "geglu")}
    if others == {True} and found.options.get("task", "sft") == "sft":
        found.options["use_liger_kernel"] = True
        if not has_loss and not trl:
            found.options["loss"] = "full"
        return
    if has_loss:
        found.options["loss"] = "liger"
    if True in others:
        found.omits("Liger's other kernels are modelled only as a whole and for supervised training; they save memory")
