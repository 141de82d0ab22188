"""Which backends cannot step an optimizer, and why."""

from __future__ import annotations

from collections.abc import Mapping

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.choices import Backend, Offload, OptimizerName

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
    refused: frozenset[Backend] = frozenset(_REFUSED.get(optim, {}))
    return refused | {"fsdp2"} if optim in _NOT_SHARDS else refused


_SCHEDULE_FREE: Mapping[Backend, tuple[str, str]] = {
    "deepspeed": (
        "DeepSpeed steps the optimizer in initialize(), and schedule-free optimizers do not step before train() is called",
        "--backend fsdp2 or fsdp1",
    ),
}
"""Found by running DeepSpeed 0.19.8 through the order of calls that accelerate and the Trainer have."""


_GALORE_FSDP2 = "GaLore under FSDP2 gathers the gradients for its decompositions, which is not modelled"
_APOLLO_FSDP2 = "APOLLO multiplies its random matrix, a plain tensor, with FSDP2's gradients, which are DTensors"


def _low_rank(label: str, fsdp2: str) -> Mapping[Backend, tuple[str, str]]:
    hint = "--strategy ddp, or --optim adamw_torch_8bit, whose state is small too"
    return {
        "fsdp2": (fsdp2, hint),
        "fsdp1": (f"{label} projects matrices, and FSDP1 flattens them", hint),
        "deepspeed": (f"{label} projects matrices, and DeepSpeed flattens them", hint),
    }


def _lomo(label: str) -> Mapping[Backend, tuple[str, str]]:
    hint = "--gpus 1 --strategy ddp, or --optim adamw_torch_8bit"
    sharded = "updates whole parameters in backward, before {} reduces their gradients"
    return {
        "fsdp2": (f"{label} {sharded.format('FSDP2')}", hint),
        "fsdp1": (f"{label} {sharded.format('FSDP1')}", hint),
        "deepspeed": (
            f"accelerate calls DeepSpeed's backward in place of {label}'s, which updates the parameters",
            hint,
        ),
    }


_REFUSED: Mapping[OptimizerName, Mapping[Backend, tuple[str, str]]] = {
    "muon": {
        "fsdp1": ("Muon steps matrices, and FSDP1 flattens them", "--backend fsdp2"),
        "deepspeed": ("DeepSpeed's Muon is not modelled yet", "--backend fsdp2 has torch's"),
    },
    # deepspeed/runtime/engine.py (0.19.8), `basic_optimizer`: ZeRO makes a second Adagrad, and the first stays
    "adagrad": {
        "deepspeed": (
            "DeepSpeed keeps the sums of whole parameters that Adagrad makes at its construction, which is not modelled",
            "--backend fsdp2 or fsdp1; rmsprop keeps as much state and runs with DeepSpeed",
        ),
    },
    "stable_adamw": {
        "fsdp2": (
            "the kernels of StableAdamW take no DTensor, which FSDP2's parameters are",
            "--backend fsdp1, or --optim adamw_torch",
        ),
        "deepspeed": (
            "StableAdamW under DeepSpeed has not been run, and is not modelled",
            "--backend fsdp1; adamw_torch runs with DeepSpeed",
        ),
    },
    # run with galore-torch 1.0 and apollo-torch 1.0.3 on torch 2.13
    "galore_adamw": _low_rank("GaLore", _GALORE_FSDP2),
    "galore_adafactor": _low_rank(
        "GaLore", "GaLore's Adafactor mixes plain tensors with FSDP2's gradients, which are DTensors"
    ),
    "apollo_adamw": _low_rank("APOLLO", _APOLLO_FSDP2),
    "galore_adamw_layerwise": _low_rank("GaLore", _GALORE_FSDP2),
    "apollo_adamw_layerwise": _low_rank("APOLLO", _APOLLO_FSDP2),
    "lomo": _lomo("LOMO"),
    "adalomo": _lomo("AdaLomo"),
    "schedule_free_adamw": _SCHEDULE_FREE,
    "schedule_free_sgd": _SCHEDULE_FREE,
    "schedule_free_radam": _SCHEDULE_FREE,
}
"""The reason and a hint."""


def backend_refusal(optim: OptimizerName, backend: Backend, offload: Offload) -> UsageError | None:
    """Why an optimizer is not modelled with a backend; None if it is."""
    if (refused := _REFUSED.get(optim, {}).get(backend)) is not None:
        return UsageError(refused[0], hint=refused[1])
    if optim == "muon" and offload != "none":
        return UsageError(
            "Muon needs collectives on the GPU, so its states cannot be offloaded", hint="use --offload none"
        )
    return None
