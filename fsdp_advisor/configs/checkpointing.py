"""The keyword `use_reentrant` of activation checkpointing, which several consumers' files have."""

from __future__ import annotations

from fsdp_advisor.configs.collect import Collector
from fsdp_advisor.errors import UsageError


def set_reentrant(found: Collector) -> None:
    """Set activation checkpointing to reentrant checkpoints of all layers. Selective checkpointing is estimated with
    `use_reentrant: false`, and reported as not modelled.

    Raises UsageError for reentrant checkpoints of every n-th layer, whose backward is not modelled.
    """
    policy = str(found.options.get("activation_checkpointing"))
    if policy.startswith("every-"):
        raise UsageError(
            f"{found.file}: use_reentrant with every_n_layers: {policy.removeprefix('every-')} is not modelled",
            hint="set use_reentrant: false, or leave every_n_layers out",
        )
    if policy == "full":
        found.options["activation_checkpointing"] = "reentrant"
    else:
        found.omits("use_reentrant with selective checkpointing; the estimate assumes use_reentrant: false")
