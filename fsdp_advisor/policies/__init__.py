"""Decisions of a training job that every engine applies in the same way: optimizer, precision, gradient clipping."""
