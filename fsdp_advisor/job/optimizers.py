"""Which backends cannot step an optimizer, and why."""

from __future__ import annotations

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.request import Backend, Offload, OptimizerName

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
    if optim == "muon":
        return frozenset({"fsdp1", "deepspeed"})
    return frozenset({"fsdp2"}) if optim in _NOT_SHARDS else frozenset()


def optimizer_refusal(optim: OptimizerName, backend: Backend, offload: Offload) -> UsageError | None:
    """Why an optimizer is not modelled with a backend; None if it is."""
    if optim != "muon":
        return None
    if backend == "fsdp1":
        return UsageError("Muon steps matrices, and FSDP1 flattens them", hint="--backend fsdp2")
    if backend == "deepspeed":
        return UsageError("DeepSpeed's Muon is not modelled yet", hint="--backend fsdp2 has torch's")
    if offload != "none":
        return UsageError(
            "Muon needs collectives on the GPU, so its states cannot be offloaded", hint="use --offload none"
        )
    return None
