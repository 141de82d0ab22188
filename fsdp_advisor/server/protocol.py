"""uvicorn's HTTP protocol with what the open internet asks for: connections, a request's head and every wait are bounded."""

from __future__ import annotations

import asyncio
from functools import lru_cache
from typing import TYPE_CHECKING

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from fsdp_advisor.server.errors import problem
from fsdp_advisor.server.settings import KIB, Settings

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

MAX_HEAD_BYTES = 64 * KIB
"""Of all that is not body: the address, the headers, the sizes of chunks, the trailers."""


@lru_cache(maxsize=1)
def _settings() -> Settings:
    return Settings()  # uvicorn makes its protocols without arguments of ours, in worker processes too


class HttpProtocol(HttpToolsProtocol):
    """One connection. It is closed when it is one too many, or makes the server wait for long."""

    _heard: asyncio.TimerHandle | None = None  # a request's head is awaited
    _read: asyncio.TimerHandle | None = None  # the other side is to read what was written
    _head_bytes = 0
    _answering: RequestResponseCycle | None = None  # self.cycle is the last of the pipeline

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        if len(self.connections) > _settings().max_connections:
            self._refuse(503, "too many connections", "try again in a few seconds")
        else:
            self._heard = self._patience()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_waits()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes <= MAX_HEAD_BYTES or self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete:
            self._refuse(431, f"the request's head is larger than {MAX_HEAD_BYTES} bytes", "ask for less")
        else:  # a response may have begun
            self._give_up()

    def on_message_begin(self) -> None:
        if self._heard is None:
            self._heard = self._patience()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        _end(self._heard)
        self._heard = None
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._head_bytes = 0
        super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        if self.transport.is_closing():  # nobody is left to ask what stands in the pipeline
            self.pipeline.clear()
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "this is not an HTTP request", "speak HTTP/1.1")

    def pause_writing(self) -> None:
        _end(self._read)
        self._read = self._patience()
        super().pause_writing()

    def resume_writing(self) -> None:
        _end(self._read)
        super().resume_writing()

    # Inside

    def _patience(self) -> asyncio.TimerHandle:
        """From now on the other side has to do something in time."""
        return self.loop.call_later(_settings().receive_seconds, self._give_up)

    def _end_waits(self) -> None:
        _end(self._heard)
        _end(self._read)

    def _give_up(self) -> None:
        self._end_waits()
        self.pipeline.clear()
        if self._answering is not None:
            self._answering.disconnected = True  # it would write on
        self.transport.abort()

    def _refuse(self, status: int, error: str, hint: str) -> None:
        """A response that no application is asked for, and the end."""
        self._end_waits()
        response: Response = problem(status, error, hint, {"Connection": "close"})
        head = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
        self.transport.write(b"HTTP/1.1 %d Refused\r\n%s\r\n%s" % (status, head, bytes(response.body)))
        self.transport.close()


def _end(wait: asyncio.TimerHandle | None) -> None:
    if wait is not None:
        wait.cancel()
