"""Clients that send too much, too slowly or too often, against a server in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from server_process import Serving, problem, received, serving, until

RECEIVE_SECONDS = 2
MAX_CONNECTIONS = 20
HEAD = b"%s %s HTTP/1.1\r\nHost: localhost\r\n"
GET, POST = HEAD % (b"GET", b"/healthz"), HEAD % (b"POST", b"/api/v1/estimate")
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    limits = {"receive_seconds": RECEIVE_SECONDS, "max_connections": MAX_CONNECTIONS, "log_level": "error"}
    with serving(tmp_path_factory.mktemp("server"), **limits) as running:
        yield running
        assert running.stop() == 0 and running.lines == []


REFUSED = {
    "declared body too large": (POST + b"Content-Length: 99999999999\r\n\r\n", 413),
    "chunked body too large": (POST + CHUNKED + (b"10000\r\n" + b"a" * 65536 + b"\r\n") * 5, 413),
    "body that stops": (POST + b"Content-Length: 100\r\n\r\n{", 408),
    "chunks that stop": (POST + CHUNKED + b"5\r\n{", 408),
    "nested too deeply": (POST + b"Content-Length: 200\r\n\r\n" + b"[" * 200, 422),
    "not UTF-8": (POST + b"Content-Length: 2\r\n\r\n\xff\xfe", 400),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_bodies_beyond_the_limits_are_refused(server: Serving, kind: str) -> None:
    sent, status = REFUSED[kind]
    assert problem(server.raw(sent))["status"] == status


NO_HTTP = {
    "TLS": b"\x16\x03\x01\x02\r\n\r\n",
    "negative length": POST + b"Content-Length: -5\r\n\r\n",
    "address beyond 64 KiB": HEAD % (b"GET", b"/?config=" + b"%E3%81%82" * 8_000) + b"\r\n",
}


@pytest.mark.parametrize("kind", NO_HTTP)
def test_what_the_parser_cannot_read_gets_status_400(server: Serving, kind: str) -> None:
    assert server.raw(NO_HTTP[kind]).startswith(b"HTTP/1.1 400 ")


def test_slow_clients_do_not_delay_others(server: Serving) -> None:
    slow = [POST + b"Content-Length: 100\r\n\r\n{", GET, b"", POST + CHUNKED + b"5\r\n{"]
    with ExitStack() as stack:
        for begin in slow:
            stack.enter_context(server.connect()).sendall(begin)
        assert server.get("/api/v1/estimate", params={"model": "7B"}).status_code == 200


def test_more_connections_than_allowed_get_status_503(server: Serving) -> None:
    with ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(server.connect())
        until(lambda: server.raw(GET + b"Connection: close\r\n\r\n").startswith(b"HTTP/1.1 503 "))
    until(lambda: server.raw(GET + b"Connection: close\r\n\r\n").startswith(b"HTTP/1.1 200 "))


def test_a_client_that_leaves_does_no_harm(server: Serving) -> None:
    with server.connect() as connection:
        connection.sendall(POST + b"Content-Length: 100\r\n\r\n{")
    with server.connect() as connection:
        connection.sendall(GET + b"Connection: close\r\n\r\n")
        assert received(connection).endswith(b'{"status":"up"}')
