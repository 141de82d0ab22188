"""Imported by every Python process that has this folder on its path. It makes ranks treat the CPU as a GPU (see cpu_as_gpu)."""

import atexit
import os
import sys


def leave() -> None:
    """End without a normal exit, in which threads of DeepSpeed and gloo sometimes abort the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if hasattr(sys, "last_value") else 0)


if "RANK" in os.environ:  # a rank, not its launcher
    import cpu_as_gpu  # noqa: F401

    atexit.register(leave)
