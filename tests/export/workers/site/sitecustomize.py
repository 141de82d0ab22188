"""Imported by every Python process that has this folder on its path: ranks take the CPU for a GPU. See cpu_as_gpu."""

import os

if "RANK" in os.environ:  # a rank, not its launcher
    import cpu_as_gpu  # noqa: F401
