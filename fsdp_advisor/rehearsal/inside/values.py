"""Answers to decisions that a script makes from values on the GPU. Kernels do nothing, so device memory holds zeros."""

from __future__ import annotations

from types import ModuleType
from typing import Any


def answer_transformers(masking_utils: ModuleType) -> None:
    """Position ids on the GPU show no packed sequences. All of them are zero, which would look like packing."""
    original = masking_utils.find_packed_sequence_indices

    def find_packed_sequence_indices(position_ids: Any) -> Any:
        mask = original(position_ids)  # makes the same temporary tensors as on a GPU
        return None if position_ids.is_cuda else mask

    masking_utils.find_packed_sequence_indices = find_packed_sequence_indices  # type: ignore[attr-defined]
