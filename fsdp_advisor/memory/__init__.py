"""The memory of a step: states, a schedule per backend, and the replay of tapes under a schedule. Pure arithmetic."""
