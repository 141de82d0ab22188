"""Stands in for mamba-ssm's CUDA extension, which its package imports and Mamba-2 does not call."""
