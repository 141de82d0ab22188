"""The page's names for options, in place of those of the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping

from fsdp_advisor.job.request import RecommendRequest, fields_of

_LABELS = {
    "gpus": "GPUs (total)",
    "nnodes": "Nodes",
    "gpu": "GPU type, or size",
    "micro_batch_size": "Micro-batch",
    "seq_len": "Sequence length",
    "optim": "Optimizer",
    "gradient_accumulation_steps": "Accumulation steps",
    "interconnect": "Network between nodes",
    "find": "Search for",
    "host_memory": "Host memory per node",
    "tokens": "Tokens to train on",
    "price": "Price per GPU hour",
    "wrap": "FSDP units",
    "allocator_conf": "Allocator settings",
    "margin": "Memory left free",
}
_NAMES = {
    "ddp": "DDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3", "hsdp": "HSDP", "fsdp1": "FSDP1",
    "fsdp2": "FSDP2", "deepspeed": "DeepSpeed", "torch": "PyTorch", "trainer": "Trainer", "cpu": "CPU", "nvme": "NVMe",
    "auto": "choose for me", "all": "choose for me",
}  # fmt: skip
_NAMES_OF: Mapping[str, Mapping[str, str]] = {
    "find": {
        "": "the best plan",
        "gpus": "the fewest GPUs",
        "batch": "the largest micro-batch",
        "sequence": "the longest sequence",
        "gpu-type": "the smallest GPU",
    },
    "precision": {"": "usual"},
    "wrap": {"layer": "each layer", "none": "the whole model"},
}
_LISTS = re.compile(r"`?fsdp-advisor (models|gpus)`?")
_OPTION = re.compile(r"--([a-z]+(?:-[a-z]+)*)|^([a-z_]+)(?= (?:must|is) )|\b([a-z]+(?:_[a-z]+)+|nnodes|optim)\b")


def label(option: str) -> str:
    """The label of an option.

    >>> label("seq_len"), label("activation_checkpointing")
    ('Sequence length', 'Activation checkpointing')
    """
    return _LABELS.get(option, option.replace("_", " ").capitalize())


def choice(option: str, value: str) -> str:
    """The name of one of an option's values.

    >>> choice("strategy", "zero3"), choice("find", "gpus"), choice("precision", "bf16")
    ('ZeRO-3', 'the fewest GPUs', 'bf16')
    """
    return _NAMES_OF.get(option, _NAMES).get(value, value)


def words(text: str) -> str:
    """A message with the labels of options instead of their names.

    >>> words("gpus must be at least 1; give --host-memory"), words("seq_len 9 is past the maximum")
    ('“GPUs (total)” must be at least 1; give “Host memory per node”', '“Sequence length” 9 is past the maximum')
    """

    def labelled(match: re.Match[str]) -> str:
        name = next(filter(None, match.groups())).replace("-", "_")
        return f"“{label(name)}”" if name in fields_of(RecommendRequest) else match[0]

    return _OPTION.sub(labelled, _LISTS.sub(r"the list of \1", text))
