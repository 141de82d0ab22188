"""A user's request: its options, their validation, and one plan per strategy."""
