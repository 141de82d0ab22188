"""The first failure of any rank, on whichever node, is told to all of them: it is kept where they met, and each looks there.

Without it a rank that waits for one that has gone waits until its library gives up, and never learns why.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from types import TracebackType
from typing import Any

from fsdp_advisor.validation.child_process import failure_of
from fsdp_advisor.validation.failures import is_lost_rank

_KEY = "fsdp-advisor/failure"
_LOOK_SECONDS = 1.0
_CAUSE_SECONDS = 3.0
"""How long a rank that has lost another one waits to hear why."""
_LINGER_SECONDS = 3.0
"""How long a rank that has failed stays, so that those of its node hear of it before their launcher ends them."""
MEET_SECONDS = 600.0
"""How long ranks wait for each other to come, as torchrun's own agents do."""
ELSEWHERE = "why it ended stands in the output of its own node, or in the log named there"

Failure = dict[str, Any]
"""Fields of `Ended`, and the rank that they are of."""


class Alarm:
    """Around all that a rank does: whatever ends it, or another rank, or time running out, ends this process by `leave`.

    `leave(failure)` is called once, from any thread, and returns the process's exit status. `lingers` says that ranks are
    elsewhere, or that a launcher we know nothing of ends them all when one ends.
    """

    def __init__(
        self, rank: int, leave: Callable[[Failure], int], *, lingers: bool, timeout_seconds: float | None = None
    ) -> None:
        self._rank, self._leave, self._lingers = rank, leave, lingers
        self._began, self._timeout_seconds = time.monotonic(), timeout_seconds
        self._store: Any = None
        self._over = threading.Event()
        self._leaving = threading.RLock()

    def __enter__(self) -> Alarm:
        threading.Thread(target=self._listen, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        if error is not None:
            with self._leaving:  # unless it is the listening thread that leaves, which closes what this one waits for
                self._end(self._cause(error))

    def connect(self) -> None:
        """To be called once the ranks have met: by a connection of its own, which a collective's waiting does not block."""
        import torch.distributed as dist

        at, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self._store = dist.TCPStore(at, port, is_master=False, timeout=timedelta(seconds=30))  # type: ignore[attr-defined]  # documented, but not in __all__

    def stop(self) -> None:
        """To be called before the ranks part, for they take the store with them."""
        self._over.set()

    def _listen(self) -> None:
        while not self._over.wait(_LOOK_SECONDS):
            if (late := self._late()) is not None:
                self._end(self._tell(late))
            elif (heard := self._heard()) is not None and not self._over.is_set():
                self._end(heard)

    def _late(self) -> Failure | None:
        """Time is up for the whole, or for the others to come."""
        if self._timeout_seconds is None:
            return None
        seconds = self._timeout_seconds if self._store is not None else min(self._timeout_seconds, MEET_SECONDS)
        if time.monotonic() < self._began + seconds:
            return None
        if self._store is not None:
            return {"outcome": "timeout", "message": f"no end after {seconds:g} s"}
        return {
            "outcome": "error",
            "message": f"the ranks did not meet at {os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} in {seconds:g} s",
            "hint": "are all of them started, and is that port rank 0's alone? MASTER_ADDR and MASTER_PORT name another",
        }

    def _heard(self) -> Failure | None:
        """The first failure that any rank has told."""
        if self._store is None:
            return None
        try:
            return dict(json.loads(self._store.get(_KEY))) if self._store.check([_KEY]) else None
        except Exception:  # the store went with whom it lived with
            return {"outcome": "crash", "message": "rank 0 has ended, or its node is out of reach", "hint": ELSEWHERE}

    def _tell(self, failure: Failure) -> Failure:
        """Keep a failure of this rank for all to see; the one that was first."""
        failure = {"rank": self._rank, **failure}
        if self._store is None:
            return failure
        try:
            return dict(json.loads(self._store.compare_set(_KEY, "", json.dumps(failure))))
        except Exception:  # nobody is left to be told
            return failure

    def _cause(self, error: BaseException) -> Failure:
        """Why this rank fails: for having lost another one, what that one told, if it could."""
        if not is_lost_rank(error):
            return self._tell(failure_of(error))
        until = time.monotonic() + _CAUSE_SECONDS
        while (heard := self._heard()) is None and self._store is not None and time.monotonic() < until:
            time.sleep(0.1)
        lost = {"outcome": "crash", "message": "lost the connection to another rank", "hint": ELSEWHERE}
        return heard or self._tell({**lost, "detail": failure_of(error)["detail"]})

    def _end(self, failure: Failure) -> None:
        with self._leaving:  # for good: the process ends in here
            status = 3
            try:
                status = self._leave(failure)
            finally:
                for stream in (sys.stdout, sys.stderr):
                    if stream is not None:
                        stream.flush()
                if self._lingers and self._store is not None:
                    time.sleep(_LINGER_SECONDS)
                os._exit(status)
