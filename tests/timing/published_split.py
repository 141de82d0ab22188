"""Which published sources the constants of the time model may be chosen on, and which judge it.

Fixed before any constant was chosen, by source and not by row, so that both parts hold V100, A100 and H100, PyTorch's and
DeepSpeed's engines, one node and many, with and without activation checkpointing and offload.
"""

from __future__ import annotations

FITTED = (
    "pytorch/torchtitan",
    "huggingface/transformers",
    "QwenLM/Qwen",
    "Lightning-AI/pytorch-lightning docs/source-fabric",
)
"""Sources on which constants may be chosen, by the beginning of their names. All others judge."""


def part_of(source: str) -> str:
    """`fitted` or `judged`."""
    return "fitted" if source.startswith(FITTED) else "judged"
