"""Broadcast the first failure of any rank to all ranks, through a key of the TCPStore at which they meet.

Without it, a rank that waits for a failed one waits until its library's timeout and never learns the reason.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any

from fsdp_advisor.validation.choices import FAILED
from fsdp_advisor.validation.failures import is_lost_connection
from fsdp_advisor.validation.run_result import RunResult

JOIN_SECONDS = 600.0
"""How long ranks wait for each other at the start, as torchrun's agents do."""
SEE_OTHER_NODE = "the reason is in the output of its own node, or in the log named there"

_KEY = "fsdp-advisor/failure"
_POLL_SECONDS = 1.0
_CAUSE_SECONDS = 3.0
"""How long a rank that has lost a connection waits for the other rank's failure."""
_KEEP_ALIVE_SECONDS = 3.0
"""How long a failed rank stays alive, so that the others of its node read the failure before the launcher ends them."""


class FailureBroadcaster:
    """Ends this rank soon after any rank fails, so that all learn the reason. A context manager around everything that a rank does.

    An exception here, a failure of another rank or the end of the time limit ends this process. `on_failure(result)` is called
    once, from any thread, and returns the process's exit status. `keep_alive_after_failure`: ranks run on other nodes, or under a
    launcher that ends all of them as soon as one ends.
    """

    def __init__(
        self,
        rank: int,
        on_failure: Callable[[RunResult], int],
        *,
        keep_alive_after_failure: bool,
        timeout_seconds: float | None = None,
    ) -> None:
        self._rank, self._on_failure = rank, on_failure
        self._keep_alive = keep_alive_after_failure
        self._began, self._timeout_seconds = time.monotonic(), timeout_seconds
        self._store: Any = None
        self._stopped = threading.Event()
        self._exiting = threading.RLock()

    def __enter__(self) -> FailureBroadcaster:
        threading.Thread(target=self._poll, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is not None:
            # a polling thread that is exiting ends the process here: this error may be its consequence
            with self._exiting:
                self._exit(self._cause(error))

    def connect(self) -> None:
        """Connect to the store, once the ranks have met. A second connection is not blocked by a waiting collective."""
        import torch.distributed as dist

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = dist.TCPStore(address, port, is_master=False, timeout=timedelta(seconds=30))  # type: ignore[attr-defined]  # documented, but not in __all__

    def stop(self) -> None:
        """Stop polling. Call it before the ranks leave the group, because the store ends with rank 0."""
        self._stopped.set()

    def _poll(self) -> None:
        while not self._stopped.wait(_POLL_SECONDS):
            if (late := self._timed_out()) is not None:
                self._exit(self._publish(late))
            elif (failure := self._published()) is not None and not self._stopped.is_set():
                self._exit(failure)

    def _timed_out(self) -> RunResult | None:
        """A failure if the time for the run, or for the ranks to meet, is over."""
        if self._timeout_seconds is None:
            return None
        met = self._store is not None
        seconds = self._timeout_seconds if met else min(self._timeout_seconds, JOIN_SECONDS)
        if time.monotonic() < self._began + seconds:
            return None
        if met:
            return RunResult(outcome="timeout", message=f"it did not end within {seconds:g} s")
        endpoint = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        return RunResult(
            outcome="error",
            message=f"the ranks did not meet at {endpoint} within {seconds:g} s",
            hint="check that all ranks were started and that no other program uses this port; MASTER_ADDR and MASTER_PORT set another",
        )

    def _published(self) -> RunResult | None:
        """The first failure of any rank, if there is one."""
        if self._store is None:
            return None
        try:
            return RunResult(**json.loads(self._store.get(_KEY))) if self._store.check([_KEY]) else None
        except Exception:  # the store ended with rank 0
            return RunResult(
                outcome="crash", message="rank 0 has ended, or its node is unreachable", hint=SEE_OTHER_NODE
            )

    def _publish(self, failure: RunResult) -> RunResult:
        """Publish this rank's failure unless there is one already. Returns the one that was first."""
        failure = replace(failure, rank=self._rank)
        if self._store is None:
            return failure
        try:
            return RunResult(**json.loads(self._store.compare_set(_KEY, "", json.dumps(failure.as_dict()))))
        except Exception:  # the store ended with rank 0
            return failure

    def _cause(self, error: BaseException) -> RunResult:
        """The failure behind this rank's exception: another rank's if this one lost a connection."""
        failure = RunResult.of_exception(error)
        if not is_lost_connection(error):
            return self._publish(failure)
        deadline = time.monotonic() + _CAUSE_SECONDS
        while (published := self._published()) is None and self._store is not None and time.monotonic() < deadline:
            time.sleep(0.1)
        lost = RunResult(
            outcome="crash", message="lost the connection to another rank", hint=SEE_OTHER_NODE, detail=failure.detail
        )
        return published or self._publish(lost)

    def _exit(self, failure: RunResult) -> None:
        with self._exiting:  # never released: the process ends here
            status = FAILED
            try:
                status = self._on_failure(failure)
            finally:
                for stream in (sys.stdout, sys.stderr):
                    if stream is not None:
                        stream.flush()
                if self._keep_alive and self._store is not None:
                    time.sleep(_KEEP_ALIVE_SECONDS)
                os._exit(status)
