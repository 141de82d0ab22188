"""Keeps DeepSpeed from compiling an operator that runs over gloo never call."""

from __future__ import annotations

import importlib
from typing import Any


def skip_shm_operator() -> None:
    """Keep DeepSpeed from compiling its shared-memory operator. Call it before `deepspeed.init_distributed`.

    Compiling takes a minute, and over gloo the operator is never called. Source: DeepSpeed 0.19, comm/torch.py, build_shm_op.
    """
    deepspeed: Any = importlib.import_module("deepspeed")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
