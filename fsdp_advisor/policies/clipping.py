"""Gradient clipping by norm."""

from __future__ import annotations

CLIP_NORM_BYTES = 4
"""Clipping computes the norm of each gradient, an fp32 scalar. Source: torch/nn/utils/clip_grad.py, _get_total_norm."""
