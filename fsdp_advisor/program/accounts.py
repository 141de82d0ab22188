"""The accounts of live memory, the phases of a step, and the CUDA streams on which storages are allocated."""

from __future__ import annotations

from enum import IntEnum
from typing import Literal


class Account(IntEnum):
    """The account to which a storage's bytes belong. The names in ACCOUNTS are the keys of `at_peak`."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER = 2
    UNSHARDED_PARAMETERS = 3
    UNSHARDED_GRADIENTS = 4
    COMMUNICATION = 5
    ACTIVATIONS = 6
    LOSS = 7
    TEMPORARIES = 8
    OTHER = 9
    DEQUANTIZATION = 10
    WORKSPACE = 11
    """Workspaces of kernels: they count as allocated memory, but not as tensors."""


ACCOUNTS = {
    "parameters": "weights kept from step to step",
    "gradients": "gradients kept until the optimizer step",
    "optimizer": "optimizer state, master weights included",
    "unsharded_parameters": "gathered units; autocast's casts",
    "unsharded_gradients": "whole gradients, not yet reduced",
    "communication": "buckets and buffers of collectives",
    "activations": "saved in forward for backward",
    "loss": "logits and what the loss makes of them",
    "temporaries": "allocated and freed within one phase",
    "other": "the batch, buffers",
    "dequantization": "copies of packed weights, unpacked for products",
}
"""The accounts of tensors and their descriptions, in the order of `Account`."""

GROUPS = {
    "states": ("parameters", "gradients", "optimizer"),
    "gathered": ("unsharded_parameters", "unsharded_gradients", "communication"),
    "activations": ("activations",),
    "loss": ("loss",),
    "other": ("temporaries", "other", "dequantization"),
}
"""The accounts in the groups that bars show. Every account is in one group."""

Phase = Literal["forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("forward", "backward", "optimizer")
JobPhase = Literal["load", "first_step", "steady_step", "generate", "score", "train", "evaluate", "save"]
"""A phase of a job. `generate`, `score` and `train` are those of GRPO's step."""


class Stream(IntEnum):
    """The CUDA streams of PyTorch's engines. A cached block is only reused on the stream it was allocated on."""

    COMPUTE = 0
    COPY_IN = 1
    ALL_GATHER = 2
    REDUCE_SCATTER = 3
    PRE_UNSHARD = 4
    ALL_REDUCE = 5


STREAM_NAMES = {
    Stream.COMPUTE: "compute",
    Stream.COPY_IN: "all-gather copy-in",
    Stream.ALL_GATHER: "all-gather",
    Stream.REDUCE_SCATTER: "reduce-scatter",
    Stream.PRE_UNSHARD: "pre-unshard",
    Stream.ALL_REDUCE: "all-reduce",
}
