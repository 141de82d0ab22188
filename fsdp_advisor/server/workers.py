"""Processes that compute answers, so that the event loop stays free for other requests."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import fsdp_advisor
from fsdp_advisor.errors import from_payload
from fsdp_advisor.server.errors import ServerBusy
from fsdp_advisor.server.worker_process import Reply

T = TypeVar("T")

_LOG = logging.getLogger(__name__)


class Worker:
    """One child process, started when needed, that runs one call at a time."""

    def __init__(self, *, seconds: float, memory_bytes: int | None) -> None:
        """`seconds` is the time limit of a call, `memory_bytes` the limit of the process's memory."""
        self._seconds = seconds
        self._command = [sys.executable, "-m", "fsdp_advisor.server.worker_process"]
        if memory_bytes is not None:
            self._command.append(str(memory_bytes))
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._lock = threading.Lock()

    def ensure_started(self) -> subprocess.Popen[bytes]:
        """The running process, started if there is none. Raises ServerBusy after `close`."""
        with self._lock:
            if self._closed:
                raise ServerBusy("the server is stopping", hint="try again later")
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    env=environment(),
                    start_new_session=True,  # Ctrl-C in a terminal reaches only the server, which ends its workers
                )
            return self._process

    def call(self, function: Callable[..., T], *arguments: object) -> T:
        """The value of `function(*arguments)`, computed in the process.

        Raises the AdvisorError that the function raises, or ServerBusy if the process runs out of time or memory.
        """
        process = self.ensure_started()
        assert process.stdin is not None and process.stdout is not None
        begun = time.monotonic()
        timer = threading.Timer(self._seconds, process.kill)
        timer.start()
        try:
            pickle.dump(pickle.dumps((function, arguments)), process.stdin)
            process.stdin.flush()
            reply: Reply = pickle.load(process.stdout)
        except (OSError, EOFError, pickle.UnpicklingError):
            process.kill()
            process.wait()
            late = time.monotonic() - begun >= self._seconds
            why = f"took longer than {self._seconds:g} s" if late else "ended early, perhaps for want of memory"
            if not self._closed:
                _LOG.warning("worker process ended", extra={"reason": why})
            raise ServerBusy(f"the computation {why}", hint="try again later, or ask for one strategy") from None
        finally:
            timer.cancel()
        if reply[0] == "error":
            raise from_payload(reply[1])
        if reply[0] == "crash":
            raise RuntimeError(reply[1])
        result: T = reply[1]
        return result

    def close(self) -> None:
        """End the process, whatever it is doing, and start no other."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()
                self._process.wait()


class WorkerPool:
    """Worker processes, and the queue of calls that wait for one."""

    def __init__(self, workers: int, *, max_waiting: int, seconds: float, memory_bytes: int | None = None) -> None:
        """`max_waiting`: the largest number of calls that wait or run; for the others see `Worker`."""
        self._max_waiting, self._waiting = max_waiting, 0
        self._workers = [Worker(seconds=seconds, memory_bytes=memory_bytes) for _ in range(workers)]
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="worker")

    def start(self) -> None:
        """Start every process now, rather than at the first calls."""
        for worker in self._workers:
            worker.ensure_started()

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """As `Worker.call`, in the next free worker. Raises ServerBusy if too many calls wait."""
        if self._waiting >= self._max_waiting:
            raise ServerBusy(f"{self._waiting} requests are waiting already", hint="try again in a few seconds")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._call, function, *arguments)
        finally:
            self._waiting -= 1

    def _call(self, function: Callable[..., T], *arguments: object) -> T:
        worker = self._idle.get()
        try:
            return worker.call(function, *arguments)
        finally:
            self._idle.put(worker)

    def close(self) -> None:
        """End every process; calls under way fail."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()


def environment() -> dict[str, str]:
    """A worker's environment variables: what Python needs to find its packages, and no token of the server's user.

    Workers download nothing, and recordings of strangers' configurations are not kept on disk.
    """
    kept = {n: os.environ[n] for n in ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "LANG", "TMPDIR") if n in os.environ}
    package = str(Path(fsdp_advisor.__file__).parents[1])
    return kept | {
        "PYTHONPATH": os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH")) if p),
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "FSDP_ADVISOR_CACHE": os.devnull,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
