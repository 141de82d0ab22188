"""Ending processes together with all their descendants, and surviving a second Ctrl-C while doing so."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

KILL_SECONDS = 10
"""How long to wait for a killed process. One that uses a GPU needs a moment to release it."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Ask Linux to kill this process when its parent `parent` ends for any reason."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before the request
        os._exit(1)


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants, including those in sessions of their own. Returns when they have ended.

    All are stopped before any is killed, so that none starts another process and none is orphaned meanwhile.
    """
    stopped: set[int] = set()
    while new := {pid, *descendants(pid)} - stopped:
        for one in new:
            _signal(one, signal.SIGSTOP)
        stopped |= new
    for one in stopped:
        _signal(one, signal.SIGKILL)
    deadline = time.monotonic() + KILL_SECONDS
    while any(map(is_alive, stopped)) and time.monotonic() < deadline:
        time.sleep(0.01)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """All child processes, their children and so on, from /proc. Empty on systems without /proc."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = entry.read_text()
            parent = int(text[text.rindex(")") + 2 :].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found: list[int] = []
    pending = [pid]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


@contextlib.contextmanager
def ended_like_ctrl_c() -> Iterator[None]:
    """Context in which SIGTERM and SIGHUP (a closed terminal) raise KeyboardInterrupt.

    Otherwise Python would end immediately, and the processes that it started would go on. A signal that is ignored, as under nohup, stays
    so.
    """
    before = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        with contextlib.suppress(ValueError):  # signal handlers can be set only in the main thread
            if signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def interrupts_ignored() -> Iterator[None]:
    """Context that ignores Ctrl-C, so that a second one does not interrupt the clean-up after the first."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # signal handlers can be set only in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
