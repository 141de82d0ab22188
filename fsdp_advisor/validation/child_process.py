"""Run a function in a forked child process. However the child ends, none of its processes stays behind.

The parent imports everything first and never initializes CUDA, so that a child starts immediately and may use the GPU. Children
have sessions of their own: Ctrl-C reaches only the parent, which then ends them.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from fsdp_advisor.errors import MeasurementError
from fsdp_advisor.validation.failures import describe_exit
from fsdp_advisor.validation.process_tree import KILL_SECONDS, die_with_parent, interrupts_ignored, kill_tree
from fsdp_advisor.validation.records import Outcome
from fsdp_advisor.validation.run_result import RunResult

Send = Callable[[str, Any], None]
"""Called in the child with a name and a picklable value. Values that were sent survive a crash of the child."""

_PRELOADED = (
    "fsdp_advisor.recording",
    "fsdp_advisor.validation.simulate",
    "fsdp_advisor.validation.stand_in",
    "torch.testing._internal.distributed.fake_pg",
    "transformers.modeling_utils",
)
_POLL_SECONDS = 0.2
_FAILURE, _DONE = "failure", "done"
"""Names under which the child sends its exception and its end."""


def preload() -> None:
    """Import everything that forked children need. Raises MeasurementError if this process already uses CUDA.

    GPUs are hidden during the imports, because some packages that transformers imports, such as torchao 0.18, would initialize CUDA.
    """
    import torch

    with mock.patch.object(torch.cuda, "is_available", return_value=False):
        for name in _PRELOADED:
            importlib.import_module(name)
    if torch.cuda.is_initialized():
        raise MeasurementError(
            "this process uses CUDA, so its forked children cannot",
            hint="validate in a process that has not used the GPU",
        )


def run_in_child(function: Callable[[Send], None], *, timeout_seconds: float) -> RunResult:
    """Run `function(send)` in a forked child. Never raises for what the child does; after Ctrl-C the outcome is "interrupted"."""
    began = time.monotonic()
    handle, name = tempfile.mkstemp(prefix="fsdp-advisor-", suffix=".log")
    log = Path(name)
    context = get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    sys.stdout.flush()
    sys.stderr.flush()
    process = context.Process(target=_child_main, args=(function, receiver, sender, handle, os.getpid()))
    reported: dict[str, Any] = {}
    outcome: Outcome = "crash"
    try:
        process.start()
        sender.close()
        outcome = _receive(receiver, process, reported, began + timeout_seconds)
    except KeyboardInterrupt:
        outcome = "interrupted"
    finally:
        with interrupts_ignored():
            if process.pid is not None:
                _end(process, outcome)
            receiver.close()
            os.close(handle)
    failure: RunResult | None = reported.pop(_FAILURE, None)
    result = failure or RunResult(outcome=outcome, message=_message(outcome, process.exitcode or 0, timeout_seconds))
    process.close()
    if failure is None and outcome != "ok" and log.stat().st_size:
        result = replace(result, detail={"log": str(log)})
    else:
        log.unlink(missing_ok=True)
    return replace(result, reported=reported, seconds=round(time.monotonic() - began, 3))


def _message(outcome: Outcome, exit_code: int, timeout_seconds: float) -> str:
    if outcome == "ok":
        return ""
    if outcome == "timeout":
        return f"it did not end within {timeout_seconds:g} s"
    if outcome == "interrupted":
        return "interrupted"
    return f"the worker {'was' if exit_code < 0 else 'ended with'} {describe_exit(exit_code)}"


def _end(process: BaseProcess, outcome: Outcome) -> None:
    """Wait for the child if it is ending by itself, else kill it; kill its own children in both cases."""
    assert process.pid is not None
    if outcome in ("ok", "crash"):
        process.join(KILL_SECONDS)
    if process.exitcode is None:
        kill_tree(process.pid)
    process.join()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _receive(pipe: Connection, process: BaseProcess, reported: dict[str, Any], deadline: float) -> Outcome:
    """Collect the child's values until it is done, has ended, or time is up."""
    while True:
        ended = process.exitcode is not None  # read first: values sent before the end are still in the pipe
        if not pipe.poll(0 if ended else max(0.0, min(_POLL_SECONDS, deadline - time.monotonic()))):
            if ended:  # the child's own children may keep the pipe open
                return "crash"
            if time.monotonic() >= deadline:
                return "timeout"
            continue
        try:
            name, value = pipe.recv()
        except EOFError:
            return "crash"
        if name == _DONE:
            return "ok"
        reported[name] = value


def _child_main(
    function: Callable[[Send], None], receiver: Connection, pipe: Connection, log: int, parent: int
) -> None:
    os.setsid()
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    receiver.close()
    os.dup2(log, 1)
    os.dup2(log, 2)
    gc.freeze()  # objects from before the fork are neither scanned nor copied
    try:
        function(lambda name, value: pipe.send((name, value)))
    except BaseException as error:
        pipe.send((_FAILURE, RunResult.of_exception(error)))
    pipe.send((_DONE, None))
    pipe.close()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)
