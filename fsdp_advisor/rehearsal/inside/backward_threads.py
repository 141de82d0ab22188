"""Lets PyTorch's backward threads finish before the interpreter ends.

A backward keeps a copy of its context variables for its threads. The thread that finishes last may drop the last reference, for which it
needs Python's GIL. If the interpreter is ending by then, Python before 3.14 ends the thread, and C++ aborts the process ("terminate called
without an active exception"). On a GPU the kernels of the last step leave the thread more time than a rehearsal does.

Source: torch/autograd/graph.py, `_engine_run_backward`, and torch/csrc/PyInterpreter.cpp, `decref` (2.13); pytorch issue 190489.
"""

from __future__ import annotations

import atexit
import contextvars
import time
import weakref
from types import SimpleNamespace
from typing import Any

LONGEST_WAIT_SECONDS = 10.0
"""How long the exit waits. PyTorch's own wait for its backward threads has the same limit (torch/csrc/autograd/engine.cpp, `stop`)."""


def finish_before_exit(module: Any) -> None:
    """Make the exit wait for the last backward. `module` is torch.autograd.graph, which has just been imported."""
    if not hasattr(module, "contextvars"):
        return  # PyTorch 2.11 and older keep no context
    last: weakref.ref[contextvars.Context] | None = None

    def copy_context() -> contextvars.Context:
        nonlocal last
        copied = contextvars.copy_context()
        last = weakref.ref(copied)
        return copied

    def wait() -> None:
        until = time.monotonic() + LONGEST_WAIT_SECONDS
        while last is not None and last() is not None and time.monotonic() < until:
            time.sleep(0.001)  # gives the GIL to the thread

    module.contextvars = SimpleNamespace(copy_context=copy_context)
    atexit.register(wait)
