"""Which backends cannot step an optimizer."""

from __future__ import annotations

from fsdp_advisor.job.request import Backend, OptimizerName

_NOT_SHARDS: frozenset[OptimizerName] = frozenset(
    {
        "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit", "lion_32bit", "lion_8bit", "paged_lion_32bit",
        "paged_lion_8bit", "ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "rmsprop_bnb_32bit",
        "rmsprop_bnb_8bit",
    }
)  # fmt: skip
"""bitsandbytes' kernels take no DTensor, which FSDP2's parameters are."""


def unable_backends(optim: OptimizerName) -> frozenset[Backend]:
    """The backends that cannot step the optimizer. `auto` does not choose them.

    >>> sorted(unable_backends("paged_adamw_8bit")), sorted(unable_backends("adamw_torch"))
    (['fsdp2'], [])
    """
    return frozenset({"fsdp2"}) if optim in _NOT_SHARDS else frozenset()
