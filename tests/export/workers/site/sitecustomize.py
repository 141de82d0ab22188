"""Imported by every Python process that has this folder on its path: ranks take the CPU for a GPU. See cpu_as_gpu."""

import atexit
import os
import sys


def leave() -> None:
    """End without taking down DeepSpeed and gloo, whose threads sometimes abort a process that is done."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if hasattr(sys, "last_value") else 0)


if "RANK" in os.environ:  # a rank, not its launcher
    import cpu_as_gpu  # noqa: F401

    atexit.register(leave)
