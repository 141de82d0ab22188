"""DeepSpeed ZeRO-1, 2 and 3."""
