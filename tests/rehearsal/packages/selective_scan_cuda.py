"""A stand-in for mamba-ssm's CUDA extension, which the package imports and Mamba-2 does not call."""
