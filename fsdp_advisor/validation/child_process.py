"""One process per case: whatever happens to it, it ends alone, leaves nothing behind, and is recorded as what it was.

Workers of one process are forked from this one, which has imported everything and never touches CUDA, so that a case starts
at once. They are sessions of their own: Ctrl-C reaches this process alone, which ends them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from fsdp_advisor.errors import AdvisorError, MeasurementError
from fsdp_advisor.validation.failures import describe_exit, is_of_host, is_out_of_memory, memory_now, read_out_of_memory
from fsdp_advisor.validation.records import Outcome

Tell = Callable[[str, Any], None]
"""What a worker calls with a name and a plain value as soon as it knows something; what it has told outlives it."""

_NEEDED = (
    "fsdp_advisor.recording",
    "fsdp_advisor.validation.simulate",
    "fsdp_advisor.validation.stand_in",
    "torch.testing._internal.distributed.fake_pg",
    "transformers.modeling_utils",
)
_PR_SET_PDEATHSIG = 1
_MESSAGE = 600
_LOOK_SECONDS = 0.2
_WHAT_NOW = (
    "run it again, or on another --rung; --records FILE keeps the details",
    "run it again with a larger --timeout",
)
_GONE_SECONDS = 10
"""A killed process with a GPU takes a moment to give it back."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a worker ended, and all that it told before. `elsewhere`: rank 0 is on another node, and so is the record."""

    outcome: Outcome
    reported: dict[str, Any] = field(default_factory=dict)
    message: str = ""
    detail: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    exit_status: int = 3
    hint: str = ""
    elsewhere: bool = False

    def error(self) -> MeasurementError:
        """The outcome as an error for a person."""
        log = f"its log is {self.detail['log']}" if "log" in self.detail else ""
        hint = "; ".join(filter(None, (self.hint, log))) or _WHAT_NOW[self.outcome == "timeout"]
        found = MeasurementError(self.message or self.outcome, hint=hint)
        found.exit_status = self.exit_status
        return found


def warm_up() -> None:
    """Import all that a forked worker needs."""
    for name in _NEEDED:
        importlib.import_module(name)
    import torch

    if torch.cuda.is_initialized():
        raise MeasurementError(
            "CUDA is in use in this process, which therefore cannot fork workers that use it",
            hint="validate from a process that has not used the GPU",
        )


def forked(function: Callable[[Tell], None], *, timeout_seconds: float) -> Ended:
    """Run `function(tell)` in a forked child. Never raises for what the child does; Ctrl-C ends it as `interrupted`."""
    began = time.monotonic()
    handle, name = tempfile.mkstemp(prefix="fsdp-advisor-", suffix=".log")
    log = Path(name)
    context = get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    process = context.Process(target=_child, args=(function, ours, theirs, handle, os.getpid()))
    reported: dict[str, Any] = {}
    outcome: Outcome = "crash"
    try:
        process.start()
        theirs.close()
        outcome = _listen(ours, process, reported, began + timeout_seconds)
    except KeyboardInterrupt:
        outcome = "interrupted"
    finally:
        with undisturbed():
            if process.pid is not None:
                _finish(process, outcome)
            ours.close()
            os.close(handle)
    failure = reported.pop("failure", None)
    exit_code = process.exitcode if process.exitcode is not None else 0
    process.close()
    seconds = round(time.monotonic() - began, 3)
    if outcome == "ok" and failure is None:
        log.unlink(missing_ok=True)
        return Ended(outcome="ok", reported=reported, seconds=seconds)
    detail: dict[str, Any] = {"log": str(log)}
    if failure is not None:
        detail |= failure.pop("detail")
        log.unlink(missing_ok=True)
        detail.pop("log")
        return Ended(reported=reported, detail=detail, seconds=seconds, **failure)
    message = {
        "timeout": f"no end after {timeout_seconds:g} s",
        "interrupted": "interrupted",
        "crash": f"the worker was {describe_exit(exit_code)}"
        if exit_code < 0
        else f"the worker ended with {describe_exit(exit_code)}",
    }[outcome]
    if not log.stat().st_size:
        log.unlink()
        detail.pop("log")
    return Ended(outcome=outcome, reported=reported, message=message, detail=detail, seconds=seconds)


def _finish(process: BaseProcess, outcome: Outcome) -> None:
    """Wait for the child's end, and see to it unless it is ending by itself; its own children go with it."""
    assert process.pid is not None
    if outcome in ("ok", "crash"):
        process.join(_GONE_SECONDS)
    if process.exitcode is None:
        kill_tree(process.pid)
    process.join()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _listen(pipe: Connection, process: BaseProcess, reported: dict[str, Any], deadline: float) -> Outcome:
    """Gather what the child tells until it says that it is done, has ended, or time is up."""
    while True:
        ended = process.exitcode is not None  # asked first: what it told before it ended is still in the pipe
        if not pipe.poll(0 if ended else max(0.0, min(_LOOK_SECONDS, deadline - time.monotonic()))):
            if ended:  # its own children may keep the pipe open
                return "crash"
            if time.monotonic() >= deadline:
                return "timeout"
            continue
        try:
            name, value = pipe.recv()
        except EOFError:
            return "crash"
        if name == "done":
            return "ok"
        reported[name] = value


def _child(function: Callable[[Tell], None], ours: Connection, pipe: Connection, log: int, parent: int) -> None:
    os.setsid()
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ours.close()
    os.dup2(log, 1)
    os.dup2(log, 2)
    gc.freeze()  # what was imported before the fork need not be looked at, nor copied
    try:
        function(lambda name, value: pipe.send((name, value)))
    except BaseException as error:
        pipe.send(("failure", failure_of(error)))
    pipe.send(("done", None))
    pipe.close()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def failure_of(error: BaseException) -> dict[str, Any]:
    """An exception as fields of `Ended`."""
    message = " ".join(str(error).split())[:_MESSAGE]
    if isinstance(error, AdvisorError):
        return {
            "outcome": "error",
            "message": error.message,
            "hint": error.hint,
            "exit_status": error.exit_status,
            "detail": {},
        }
    if is_out_of_memory(error):
        host = is_of_host(error)
        detail: dict[str, Any] = {"memory": "host" if host else "gpu", **read_out_of_memory(str(error))}
        detail = detail if "free_bytes" in detail else {**memory_now(host=host), **detail}
        return {"outcome": "oom", "message": message or "out of memory", "detail": detail, "exit_status": 1}
    if isinstance(error, (KeyboardInterrupt, SystemExit)):
        return {"outcome": "interrupted", "message": "interrupted", "detail": {}}
    where = "".join(traceback.format_exception(type(error), error, error.__traceback__))[-4000:]
    return {"outcome": "error", "message": f"{type(error).__name__}: {message}", "detail": {"traceback": where}}


def die_with_parent(parent: int) -> None:
    """Ask Linux to end this process when its parent ends, however that comes about."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before we could ask
        os._exit(1)


def kill_tree(pid: int) -> None:
    """End a process and all that came of it, sessions of their own included; back when they have gone.

    All are halted before any is ended, so that none starts another meanwhile, and none is orphaned out of sight.
    """
    halted: set[int] = set()
    while fresh := {pid, *descendants(pid)} - halted:
        for one in fresh:
            _signal(one, signal.SIGSTOP)
        halted |= fresh
    for one in halted:
        _signal(one, signal.SIGKILL)
    until = time.monotonic() + _GONE_SECONDS
    while any(map(_alive, halted)) and time.monotonic() < until:
        time.sleep(0.01)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, from /proc; nothing where there is none."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            text = entry.read_text()
            parent = int(text[text.rindex(")") + 2 :].split()[1])
            children.setdefault(parent, []).append(int(entry.parent.name))
    found: list[int] = []
    waiting = [pid]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += below
        waiting += below
    return found


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A second Ctrl-C does not keep the first from being finished."""
    try:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread, which signals do not reach
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
