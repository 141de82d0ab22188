"""Holding predictions against runs: PyTorch's own engines under fake tensors, or for real. Imports torch."""
