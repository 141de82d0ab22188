"""PyTorch FSDP1."""
