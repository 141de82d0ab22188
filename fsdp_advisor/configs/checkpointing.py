"""The keyword `use_reentrant` of activation checkpointing, which several consumers pass on."""

from __future__ import annotations

from fsdp_advisor.configs.collect import Collector


def set_reentrant(found: Collector) -> None:
    """Choose reentrant checkpoints of all layers. Those of some layers are estimated without."""
    if found.options.get("activation_checkpointing") == "full":
        found.options["activation_checkpointing"] = "reentrant"
    else:
        found.omits("use_reentrant with checkpoints of some layers or operators; the estimate has use_reentrant: false")
