"""Which engine cannot step which optimizer, and why: the one table that planning, estimates, exports and measurements read.

What a consumer calls an optimizer, or why it has no name for it, is in the optimizer's own file (`policies.optimizers`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.choices import Backend, Framework, Offload, OptimizerName
from fsdp_advisor.job.frameworks import BACKEND_NAMES


class Limit(NamedTuple):
    """Why an engine cannot step an optimizer, and what to use instead."""

    reason: str
    hint: str


_BITSANDBYTES: Mapping[Backend, Limit] = {
    # bitsandbytes 0.50.2 on a parameter of fully_shard (torch 2.13): its operators have no sharding strategy; axolotl refuses it too
    "fsdp2": Limit(
        "bitsandbytes' kernels do not accept DTensors, and FSDP2's parameters are DTensors",
        "--backend fsdp1, or another --optim, such as adamw_torch_8bit",
    ),
}
_SCHEDULE_FREE: Mapping[Backend, Limit] = {
    # DeepSpeed 0.19.8, run through the order of calls that accelerate and the Trainer have
    "deepspeed": Limit(
        "DeepSpeed steps the optimizer in initialize(), and schedule-free optimizers do not step before train() is called",
        "--backend fsdp2 or fsdp1",
    ),
}


def _low_rank(label: str, fsdp2: str) -> Mapping[Backend, Limit]:
    """The limits of GaLore and APOLLO. Source: galore-torch 1.0 and apollo-torch 1.0.3, run on torch 2.13."""
    hint = "--strategy ddp, or --optim adamw_torch_8bit, whose state is small too"
    return {
        "fsdp2": Limit(fsdp2, hint),
        "fsdp1": Limit(f"{label} projects matrices, and FSDP1 flattens them", hint),
        "deepspeed": Limit(f"{label} projects matrices, and DeepSpeed flattens them", hint),
    }


def _lomo(label: str) -> Mapping[Backend, Limit]:
    hint = "--gpus 1 --strategy ddp, or --optim adamw_torch_8bit"
    sharded = f"{label} updates whole parameters in backward, before {{}} reduces their gradients"
    replaced = f"accelerate calls DeepSpeed's backward in place of {label}'s, which updates the parameters"
    return {
        "fsdp2": Limit(sharded.format("FSDP2"), hint),
        "fsdp1": Limit(sharded.format("FSDP1"), hint),
        "deepspeed": Limit(replaced, hint),
    }


def _only_ddp(label: str) -> Mapping[Backend, Limit]:
    """The limits of an optimizer that was compared with its package only on whole (unsharded) parameters."""
    reason, hint = f"{label} under {{}} has not been run, and is not modelled", "--strategy ddp, or another --optim"
    return {backend: Limit(reason.format(name), hint) for backend, name in BACKEND_NAMES.items() if backend != "ddp"}


def _cpu_offload() -> Mapping[Backend, Limit]:
    """The limits of torchao's CPUOffloadOptimizer.

    Source: torchao 0.18, optim/cpu_offload.py: hooks of `register_post_accumulate_grad_hook`, "for single-GPU training".
    """
    hint = "--gpus 1 --strategy ddp, or --offload optimizer"
    own = "{} sets the gradients of its shards itself, and CPUOffloadOptimizer sees only those that autograd sets"
    return {
        "fsdp2": Limit(own.format("FSDP2"), hint),
        "fsdp1": Limit(own.format("FSDP1"), hint),
        "deepspeed": Limit("DeepSpeed steps flat partitions, which CPUOffloadOptimizer does not know", hint),
    }


_GALORE = _low_rank("GaLore", "GaLore under FSDP2 gathers the gradients for its decompositions, which is not modelled")
_GALORE_8BIT = _low_rank("GaLore", _BITSANDBYTES["fsdp2"].reason)
_GALORE_ADAFACTOR = _low_rank(
    "GaLore", "GaLore's Adafactor mixes plain tensors with FSDP2's gradients, which are DTensors"
)
_APOLLO = _low_rank(
    "APOLLO", "APOLLO multiplies its random matrix, a plain tensor, with FSDP2's gradients, which are DTensors"
)

LIMITS: Mapping[OptimizerName, Mapping[Backend, Limit]] = {
    "adafactor": {
        # torch 2.13 under fully_shard: no sharding strategy for `aten.pow_.Scalar` and `aten._foreach_mul_.List`; transformers 5.23 adds
        # means of DTensors to the plain tensors of its state
        "fsdp2": Limit(
            "Adafactor, torch's as of 2.13 and transformers' as of 5.23, does not run on FSDP2's shards",
            "--backend fsdp1, or another --optim",
        ),
    },
    # deepspeed/runtime/engine.py (0.19.8), `basic_optimizer`: ZeRO makes a second Adagrad, and the first stays
    "adagrad": {
        "deepspeed": Limit(
            "Adagrad makes sums of whole parameters when it is constructed, which DeepSpeed keeps; that is not modelled",
            "--backend fsdp2 or fsdp1; rmsprop keeps as much state and runs with DeepSpeed",
        ),
    },
    "stable_adamw": {
        "fsdp2": Limit(
            "StableAdamW's kernels do not accept DTensors, and FSDP2's parameters are DTensors",
            "--backend fsdp1, or --optim adamw_torch",
        ),
        "deepspeed": Limit(
            "StableAdamW under DeepSpeed has not been run, and is not modelled",
            "--backend fsdp1; adamw_torch runs with DeepSpeed",
        ),
    },
    "muon": {
        "fsdp1": Limit("Muon steps matrices, and FSDP1 flattens them", "--backend fsdp2"),
    },
    "schedule_free_adamw": _SCHEDULE_FREE,
    "schedule_free_sgd": _SCHEDULE_FREE,
    "schedule_free_radam": _SCHEDULE_FREE,
    "galore_adamw": _GALORE,
    "galore_adamw_layerwise": _GALORE,
    "galore_adamw_8bit": _GALORE_8BIT,
    "galore_adamw_8bit_layerwise": _GALORE_8BIT,
    "galore_adafactor": _GALORE_ADAFACTOR,
    "apollo_adamw": _APOLLO,
    "apollo_adamw_layerwise": _APOLLO,
    "adamw_cpu_offload": _cpu_offload(),
    "grokadamw": _only_ddp("GrokAdamW"),
    "adam_mini": _only_ddp("Adam-mini"),
    "lomo": _lomo("LOMO"),
    "adalomo": _lomo("AdaLomo"),
    "adamw_bnb_8bit": _BITSANDBYTES,
    "paged_adamw_8bit": _BITSANDBYTES,
    "paged_adamw_32bit": _BITSANDBYTES,
    "lion_32bit": _BITSANDBYTES,
    "lion_8bit": _BITSANDBYTES,
    "paged_lion_32bit": _BITSANDBYTES,
    "paged_lion_8bit": _BITSANDBYTES,
    "ademamix": _BITSANDBYTES,
    "ademamix_8bit": _BITSANDBYTES,
    "paged_ademamix_32bit": _BITSANDBYTES,
    "paged_ademamix_8bit": _BITSANDBYTES,
    "rmsprop_bnb_32bit": _BITSANDBYTES,
    "rmsprop_bnb_8bit": _BITSANDBYTES,
}
"""The limits of each optimizer by engine. An engine that is not listed steps the optimizer."""

OFFLOAD_LIMITS: Mapping[OptimizerName, Limit] = {
    "muon": Limit(
        "torch.optim.Muon needs collectives on the GPU, so its states cannot be offloaded",
        "use --backend deepspeed, or --offload none",
    ),
}
"""Why the states of an optimizer cannot be offloaded. The states of optimizers that are not listed can, and those of DeepSpeed's Muon."""


_MUON_IN_AXOLOTL = Limit(
    "axolotl refuses Muon with DeepSpeed",  # axolotl 0.19.0, utils/schemas/validation.py, check_muon_deepspeed_fsdp
    "--backend fsdp2",
)


def limit_of(optim: OptimizerName, backend: Backend, framework: Framework) -> Limit | None:
    """Why the engine cannot step the optimizer under the framework; None if it can.

    >>> limit_of("adafactor", "fsdp2", "torch").hint, limit_of("adafactor", "fsdp1", "torch")
    ('--backend fsdp1, or another --optim', None)
    """
    if (optim, backend, framework) == ("muon", "deepspeed", "axolotl"):
        return _MUON_IN_AXOLOTL
    return LIMITS.get(optim, {}).get(backend)


def unable_backends(optim: OptimizerName, framework: Framework) -> frozenset[Backend]:
    """The backends that cannot step the optimizer under the framework. `auto` does not choose them.

    >>> sorted(unable_backends("paged_adamw_8bit", "torch")), sorted(unable_backends("adamw_torch", "torch"))
    (['fsdp2'], [])
    """
    return frozenset(b for b in BACKEND_NAMES if limit_of(optim, b, framework) is not None)


def optimizer_refusal(
    optim: OptimizerName, backend: Backend, offload: Offload, framework: Framework
) -> UsageError | None:
    """Why a plan of the optimizer, backend and offload has no estimate; None if it has one."""
    limit = limit_of(optim, backend, framework)
    if limit is None and offload != "none" and (optim, backend) != ("muon", "deepspeed"):
        limit = OFFLOAD_LIMITS.get(optim)
    return None if limit is None else UsageError(limit.reason, hint=limit.hint)


def uses_bitsandbytes(optim: OptimizerName) -> bool:
    """Whether the optimizer's step is an operator of bitsandbytes.

    >>> uses_bitsandbytes("adamw_bnb_8bit"), uses_bitsandbytes("adamw_torch_8bit")
    (True, False)
    """
    return LIMITS.get(optim) in (_BITSANDBYTES, _GALORE_8BIT)
