"""A real server in a separate process, and raw bytes to and from it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

SECONDS = 600.0
"""The longest time that a test waits for anything, even on a busy machine."""


@dataclass(frozen=True)
class Serving:
    """A running server, and the file that its log goes to."""

    process: subprocess.Popen[str]
    url: str
    log: Path

    def connect(self) -> socket.socket:
        """A connection that sends without delay."""
        at = urlsplit(self.url)
        made = socket.create_connection((at.hostname or "", at.port or 0), timeout=SECONDS)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    def get(self, path: str, **options: Any) -> httpx.Response:
        """The response to a GET request, over a new connection."""
        return httpx.get(self.url + path, trust_env=False, timeout=SECONDS, **options)

    def post(self, path: str, json: object) -> httpx.Response:
        """The response to a POST request with a JSON body."""
        return httpx.post(self.url + path, json=json, trust_env=False, timeout=SECONDS)

    def raw(self, sent: bytes) -> bytes:
        """Everything that the server sends back to these bytes, over a new connection."""
        with self.connect() as connection:
            connection.sendall(sent)
            return received(connection)

    @property
    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    @property
    def lines(self) -> list[dict[str, Any]]:
        """The log so far."""
        return [json.loads(line) for line in self.log.read_text().splitlines()]

    def stop(self, how: signal.Signals = signal.SIGTERM) -> int:
        """The exit status."""
        self.process.send_signal(how)
        return self.process.wait(timeout=SECONDS)


@contextmanager
def serving(folder: Path, **settings: object) -> Iterator[Serving]:
    """A server on a free port of this machine, with one worker unless the settings have more. Its log goes into the folder."""
    variables = {f"FSDP_ADVISOR_{name.upper()}": str(value) for name, value in {"workers": 1, **settings}.items()}
    environment = {k: v for k, v in os.environ.items() if k != "PORT" and not k.startswith("FSDP_ADVISOR_")}
    log = folder / "log"
    with log.open("w") as described:
        process = subprocess.Popen(
            [sys.executable, "-m", "fsdp_advisor", "serve", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=described,
            text=True,
            env=environment | variables,
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said.startswith("fsdp-advisor answers on http://"), (said, log.read_text())
            yield Serving(process, said.split()[3], log)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def received(connection: socket.socket) -> bytes:
    """Everything until the other side closes."""
    heard = b""
    try:
        while part := connection.recv(65536):
            heard += part
    except ConnectionError:
        pass
    return heard


def problem(answer: bytes) -> dict[str, Any]:
    """The body of an error response, in the shape that all errors have."""
    head, _, body = answer.partition(b"\r\n\r\n")
    found: dict[str, Any] = json.loads(body)
    assert set(found) == {"error", "hint", "status"} and head.split()[1] == str(found["status"]).encode(), answer
    return found


def until(happens: Callable[[], bool]) -> None:
    """Wait until a condition holds."""
    deadline = time.monotonic() + SECONDS
    while not happens():
        assert time.monotonic() < deadline
        time.sleep(0.05)
