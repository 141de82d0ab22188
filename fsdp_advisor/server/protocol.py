"""uvicorn's HTTP protocol with what the open internet asks for: connections, a request's head and every wait are bounded."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from ipaddress import ip_address
from typing import TYPE_CHECKING

from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from fsdp_advisor.server.errors import RETRY_AFTER_SECONDS, problem
from fsdp_advisor.server.settings import KIB, Settings

if TYPE_CHECKING:
    from uvicorn._types import ASGI3Application

MAX_HEAD_BYTES = 64 * KIB
"""Of all that is not body: the address, the headers, the sizes of chunks, the trailers."""


@lru_cache(maxsize=1)
def _settings() -> Settings:
    return Settings()  # uvicorn makes its protocols without arguments of ours, in worker processes too


_connections: Counter[str] = Counter()
"""How many connections each client has here."""


def client_of(address: str) -> str:
    """Whom an address belongs to: of IPv6, one household has a whole /64.

    >>> client_of("192.0.2.7"), client_of("2001:db8::1:7"), client_of("::ffff:192.0.2.7"), client_of("")
    ('192.0.2.7', '2001:db8::', '192.0.2.7', '')
    """
    try:
        ip = ip_address(address)
    except ValueError:
        return address
    if ip.version == 4:
        return str(ip)
    return str(ip.ipv4_mapped or ip_address(ip.packed[:8] + bytes(8)))


class HttpProtocol(HttpToolsProtocol):
    """One connection. It is closed when it is one too many, or makes the server wait for long."""

    _from = ""  # whose it is
    _heard: asyncio.TimerHandle | None = None  # a request's head is awaited
    _in_head = False
    _read: asyncio.TimerHandle | None = None  # the other side is to read what was written
    _head_bytes = 0
    _answering: RequestResponseCycle | None = None  # self.cycle is the last of the pipeline

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._from = client_of(self.client[0] if self.client else "")
        _connections[self._from] += 1
        if len(self.connections) > _settings().max_connections:
            self._refuse(503, "too many connections", "try again in a few seconds")
        elif _connections[self._from] > _settings().max_connections_per_client:
            self._refuse(503, "too many connections from one address", "use fewer at a time")
        else:
            self._heard = self._patience(self._not_heard)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_waits()
        _connections[self._from] -= 1
        if not _connections[self._from]:
            del _connections[self._from]
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
        self._in_head = True
        if self._heard is None:
            self._heard = self._patience(self._not_heard)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        _end(self._heard)
        self._heard, self._in_head = None, False
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
        self._read = self._patience(self._give_up)
        super().pause_writing()

    def resume_writing(self) -> None:
        _end(self._read)
        super().resume_writing()

    # Inside

    def _patience(self, end: Callable[[], None]) -> asyncio.TimerHandle:
        """From now on the other side has to do something in time."""
        return self.loop.call_later(_settings().receive_seconds, end)

    def _not_heard(self) -> None:
        if self._in_head and (self.cycle is None or self.cycle.response_complete):
            seconds = _settings().receive_seconds
            self._refuse(408, f"the request's head was not whole after {seconds:g} s", "send it faster")
        else:
            self._give_up()

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
        headers = {"Connection": "close"} | ({"Retry-After": str(RETRY_AFTER_SECONDS)} if status == 503 else {})
        response: Response = problem(status, error, hint, headers)
        head = b"".join(name + b": " + value + b"\r\n" for name, value in response.raw_headers)
        self.transport.write(b"HTTP/1.1 %d Refused\r\n%s\r\n%s" % (status, head, bytes(response.body)))
        self.transport.close()


def _end(wait: asyncio.TimerHandle | None) -> None:
    if wait is not None:
        wait.cancel()
