"""The question: what a user asks, checked, and one plan per strategy."""
