"""Compares predictions with runs of PyTorch's own engines, on fake tensors or on real ones. Imports torch."""
