"""Losses that are computed without the whole logits: one module for each library, and what they share."""
