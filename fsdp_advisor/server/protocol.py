"""uvicorn's HTTP protocol with what the open internet asks for: connections, a request's head and every wait are bounded."""

from __future__ import annotations

import asyncio
from functools import lru_cache

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from fsdp_advisor.server.errors import problem
from fsdp_advisor.server.settings import KIB, Settings

MAX_HEAD_BYTES = 64 * KIB
"""Of the address and the headers together."""


@lru_cache(maxsize=1)
def _settings() -> Settings:
    return Settings()  # uvicorn makes its protocols without arguments of ours, in worker processes too


class HttpProtocol(HttpToolsProtocol):
    """One connection. It is closed when it is one too many, or makes the server wait for long."""

    _patience: asyncio.TimerHandle | None = None
    _head_bytes = 0
    _in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > _settings().max_connections:
            self._refuse(503, "too many connections", "try again in a few seconds")
        else:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._go_on()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes", "ask for less")

    def on_message_begin(self) -> None:
        self._in_head = True
        if self._patience is None:
            self._wait()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._go_on()
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not an HTTP request", "speak HTTP/1.1")

    def pause_writing(self) -> None:
        self._wait()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._go_on()
        super().resume_writing()

    # Inside

    def _wait(self) -> None:
        """From now on the other side has to do something in time."""
        self._go_on()
        self._patience = self.loop.call_later(_settings().receive_seconds, self._lose_patience)

    def _go_on(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _lose_patience(self) -> None:
        self._patience = None
        self.transport.abort()

    def _refuse(self, status: int, error: str, hint: str) -> None:
        """A response that no application is asked for, and the end."""
        self._go_on()
        response: Response = problem(status, error, hint, {"Connection": "close"})
        head = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
        self.transport.write(b"HTTP/1.1 %d Refused\r\n%s\r\n%s" % (status, head, bytes(response.body)))
        self.transport.close()
