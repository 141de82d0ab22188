"""Divides the published runs into those on which constants of the time model may be chosen, those that judge it, and older ones.

Fitted and judged runs were divided before any constant was chosen, by source and not by row, so that both parts had V100, A100 and H100,
PyTorch's and DeepSpeed's engines, one node and many, with and without activation checkpointing and offload. The older runs, all that were
judged on H100s, were set apart later, when an H100 had been measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FITTED = (
    "pytorch/torchtitan",
    "huggingface/transformers",
    "QwenLM/Qwen",
    "Lightning-AI/pytorch-lightning docs/source-fabric",
)
"""Sources on which constants may be chosen, by the beginning of their names. All others judge."""

OLDER = ("mosaicml/llm-foundry", "H100")
"""The runs whose libraries are older than those with which a GPU's rates were measured: llm-foundry's on H100s, with PyTorch 2.1 of 2023.

Hopper's rates are measured with PyTorch 2.11 and CUDA 13. Judged runs on 8 to 96 H100s are closer to the prediction the newer their
libraries are: fms-fsdp's of February 2024 were predicted 10 to 16 % too short (the same jobs on A100s 5 to 11 % too long), one of August
2024 within 1 %. torchtitan's H100s of 500 W became faster, too: eight of them trained Llama 3 8B, compiled, at 6,667 tokens per second and
GPU in December 2024 and at 7,890 in 2026 (pytorch/torchtitan pull 3429).
"""


def part_of(row: Mapping[str, Any]) -> str:
    """`fitted`, `judged` or `older`."""
    if row["source"].startswith(FITTED):
        return "fitted"
    source, gpu = OLDER
    return "older" if row["source"].startswith(source) and gpu in row["gpu"] else "judged"
