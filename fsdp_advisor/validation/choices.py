"""Names and numbers that the command line and runs share. Imports nothing, so commands start without torch."""

from __future__ import annotations

from typing import Literal

Mode = Literal["simulate", "stand-in", "measure"]
"""How a case is validated: PyTorch's engines on fake tensors; one GPU as rank 0 of any world size; real ranks."""
CommandMode = Literal["simulate", "rehearse", "stand-in", "measure"]
"""The modes of `validate`. ``rehearse``: stand-in on PyTorch's CUDA build without a GPU (the package `rehearsal`)."""
Device = Literal["cuda", "cpu"]
FAILED = 3
"""Exit status of a run that failed."""
