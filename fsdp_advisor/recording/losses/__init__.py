"""Losses that are computed without the whole logits: one module per library; `fused` has their common code."""
