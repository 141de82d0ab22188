"""The settings of activation checkpointing in exported files.

Source: transformers 5.23, modeling_utils.py (`activation_checkpointing_enable`) and trainer.py; trl 1.16, trainer/sft_trainer.py.
"""

from __future__ import annotations

from typing import Any

from fsdp_advisor.export.job import Job
from fsdp_advisor.job.checkpointing import CheckpointingCode, OffloadCode, every_nth_layer

MAX_CALL = 116
"""The largest number of characters of a call in one line of a script."""
_OFFLOAD = ", offload=torch.cuda.is_available()"
"""The argument that offloads. It is false without an accelerator, because PyTorch then has no pinned memory."""


def checkpointing_limit(job: Job, *possible: CheckpointingCode, offloads: tuple[OffloadCode, ...] = ()) -> str | None:
    """Why a consumer that supports only the policies `possible`, besides checkpointing of all layers or none, cannot train the job.

    `offloads`: the implementations of activation offload that it supports.
    """
    plan = job.plan
    if plan.offload_code not in ("none", *offloads):
        whose = {
            "inputs": "transformers' offload of inputs of layers",
            "saved": "PyTorch's save_on_cpu",
            "trl": "TRL's activation offload",
        }
        return f"it does not have {whose[plan.offload_code]}"
    if plan.checkpointing in ("none", "full", *possible):
        return None
    if plan.checkpointing == "selective" and "every" in possible:
        return "selective checkpointing needs a function, which its arguments cannot name; use the target fsdp2 or ddp"
    return f"it has no activation checkpointing {plan.activation_checkpointing}; use --activation-checkpointing full"


def script_checkpointing_limit(job: Job) -> str | None:
    """Why a training script in plain PyTorch cannot checkpoint as the job does. None if it can."""
    return checkpointing_limit(job, "reentrant", "every", "selective", offloads=("inputs", "saved"))


def checkpointing_note(job: Job) -> str:
    """A note on what the user's own script has to do, because the configuration cannot."""
    where = "; a bundle (-o DIR/) has this function" if job.plan.checkpointing == "selective" else ""
    return f"checkpoint the layers in the script: {' '.join(checkpointing_call(job).split())}{where}"


def is_of_model(job: Job) -> bool:
    """Whether transformers has to checkpoint the layers, because accelerate's FSDP plugin does not."""
    adapters = bool(job.adaptation.peft)
    by_plugin = job.plan.plugin_checkpoints(adapters=adapters, partly_frozen=adapters or bool(job.adaptation.freeze))
    return job.plan.checkpointing != "none" and not by_plugin


def keywords(job: Job) -> dict[str, Any]:
    """The Trainer's `activation_checkpointing_kwargs`."""
    plan = job.plan
    every = every_nth_layer(plan.activation_checkpointing)
    return {
        "use_reentrant": plan.checkpointing == "reentrant",
        **({"every_n_layers": every} if every else {}),
        **({"offload": True} if plan.offload_code == "inputs" else {}),
        **({"selective": True} if plan.checkpointing == "selective-trl" else {}),
    }


def checkpointing_call(job: Job) -> str:
    """The line of a script that checkpoints the layers of `model`; empty without checkpointing."""
    plan = job.plan
    if plan.checkpointing == "none":
        return ""
    arguments = {"use_reentrant": str(plan.checkpointing == "reentrant")}
    if plan.checkpointing == "selective":
        arguments |= {"early_stop": "False", "context_fn": "selective"}
    first = "{" + ", ".join(f'"{name}": {value}' for name, value in arguments.items()) + "}"
    every = every_nth_layer(plan.activation_checkpointing)
    rest = (f", every_n_layers={every}" if every else "") + (_OFFLOAD if plan.offload_code == "inputs" else "")
    call = f"model.activation_checkpointing_enable({first}{rest})"
    return call if len(call) <= MAX_CALL else call.replace("(", "(\n        ", 1)[:-1] + "\n    )"


def saves_on_host(job: Job) -> bool:
    """Whether a script runs its forward under PyTorch's `save_on_cpu`."""
    return job.plan.offload_code == "saved"
