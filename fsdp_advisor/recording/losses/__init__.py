"""Losses that are computed without the whole logits: one module for each library; `fused` has what they share."""
