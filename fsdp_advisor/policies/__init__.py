"""Decisions of a training job that every engine applies in the same way: the optimizer, gradient clipping."""
