"""Clients that speak HTTP badly, against a server in a process of its own: each is refused or left, and costs no memory."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from server_process import Serving, problem, received, serving

RECEIVE_SECONDS = 1
MOST_CONNECTIONS, MOST_PER_CLIENT = 20, 8
HEAD = b"%s %s HTTP/1.1\r\nHost: localhost\r\n"
GET, POST = HEAD % (b"GET", b"/healthz"), HEAD % (b"POST", b"/api/v1/estimate")
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("server")
    bounds = {"receive_seconds": RECEIVE_SECONDS, "max_connections": MOST_CONNECTIONS, "log_level": "error"}
    with serving(folder, max_connections_per_client=MOST_PER_CLIENT, **bounds) as running:
        yield running
        assert running.stop() == 0 and running.lines == []


REFUSED = {
    "no HTTP": (b"\x16\x03\x01\x02\r\n\r\n", 400),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "CONNECT": (b"CONNECT example.org:80 HTTP/1.1\r\n\r\n", 400),
    "a length below zero": (POST + b"Content-Length: -5\r\n\r\n", 400),
    "two lengths": (POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    "a length beyond all": (POST + b"Content-Length: 99999999999\r\n\r\n", 413),
    "an address without end": (b"GET /?" + b"a" * 200_000, 431),
    "headers without end": (GET + b"".join(b"X-%d: %s\r\n" % (n, b"a" * 100) for n in range(2000)), 431),
    "a body that never comes": (POST + b"Content-Length: 100\r\n\r\n{", 408),
    "chunks without end": (POST + CHUNKED + b"10000\r\n" + b"a" * 65536 + b"\r\n" + b"10000\r\n" * 6, 408),
    "chunks that are too much": (POST + CHUNKED + (b"10000\r\n" + b"a" * 65536 + b"\r\n") * 5, 413),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_in_the_one_shape(server: Serving, kind: str) -> None:
    sent, status = REFUSED[kind]
    assert problem(server.raw(sent))["status"] == status


@pytest.mark.parametrize("said", [b"GET / HT", GET], ids=["half a line", "half a head"])
def test_who_does_not_go_on_is_told_so(server: Serving, said: bytes) -> None:
    assert problem(server.raw(said))["status"] == 408
    whole = GET + b"\r\n"
    first, _, second = server.raw(whole + said).partition(b'{"status":"up"}')
    assert first.startswith(b"HTTP/1.1 200 ") and problem(second)["status"] == 408


@pytest.mark.parametrize("said", [b"", b"\r\n"], ids=["nothing", "an empty line"])
def test_who_says_nothing_is_left(server: Serving, said: bytes) -> None:
    assert server.raw(said) == b""


@pytest.mark.parametrize("head", [GET, POST], ids=["GET", "POST"])
def test_trailers_without_end_take_no_memory(server: Serving, head: bytes) -> None:
    before = server.resident_bytes
    trailers = b"".join(b"T-%d: %s\r\n" % (n, b"a" * 1000) for n in range(1000))
    with server.connect() as connection, pytest.raises(ConnectionError):
        connection.sendall(head + CHUNKED + b"0\r\n")
        for _ in range(1000):
            connection.sendall(trailers)
    assert server.resident_bytes - before < 32 * 2**20


def test_who_asks_and_does_not_read_is_left(server: Serving) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", urlsplit(server.url).port or 0))
        connection.settimeout(10 * RECEIVE_SECONDS)
        asked = HEAD % (b"GET", b"/api/v1/gpus") + b"\r\n"
        with pytest.raises(ConnectionError):
            for _ in range(1000):  # pipelined: 40 MB of answers
                connection.sendall(asked)
                time.sleep(0.01)


def _open(server: Serving, stack: ExitStack, address: str, count: int) -> list[socket.socket]:
    """Connections from an address of this machine, of which it has many."""
    at = urlsplit(server.url)
    return [
        stack.enter_context(socket.create_connection((at.hostname or "", at.port or 0), 30, (address, 0)))
        for _ in range(count)
    ]


@pytest.mark.skipif(sys.platform != "linux", reason="127.0.0.2 is an address of its own on Linux alone")
def test_one_connection_too_many_is_told_so_and_so_is_one_address_with_too_many(server: Serving) -> None:
    with ExitStack() as stack:
        *_, mine = _open(server, stack, "127.0.0.2", MOST_PER_CLIENT + 1)
        refused = received(mine)
        assert (
            problem(refused)["error"] == "too many connections from one address" and b"retry-after: " in refused.lower()
        )
        (other,) = _open(server, stack, "127.0.0.3", 1)
        other.sendall(GET + b"Connection: close\r\n\r\n")
        assert received(other).startswith(b"HTTP/1.1 200 ")  # whoever else comes is answered
        _open(server, stack, "127.0.0.3", MOST_PER_CLIENT)
        *_, last = _open(server, stack, "127.0.0.4", MOST_CONNECTIONS - 2 * MOST_PER_CLIENT + 1)
        assert problem(received(last))["error"] == "too many connections"


def test_who_is_slow_holds_up_nobody(server: Serving) -> None:
    slow = [POST + b"Content-Length: 100\r\n\r\n{", GET, b"", POST + CHUNKED + b"5\r\n{"]
    with ExitStack() as stack:
        waiting = [stack.enter_context(server.connect()) for _ in slow]
        since = time.monotonic()
        for connection, said in zip(waiting, slow, strict=True):
            connection.sendall(said)
        assert server.get("/api/v1/estimate", params={"model": "7B"}).status_code == 200
        answers = [received(connection) for connection in waiting]
        assert RECEIVE_SECONDS * 0.9 < time.monotonic() - since < 10 * RECEIVE_SECONDS
    assert [problem(a)["status"] if a else None for a in answers] == [408, 408, None, 408]


def test_drops_do_not_buy_time(server: Serving) -> None:
    """A head has its time as a whole, and so has a body."""
    for begun in (GET, POST + b"Content-Length: 1000\r\n\r\n"):
        with server.connect() as connection:
            connection.sendall(begun)
            since = time.monotonic()
            with pytest.raises(OSError):
                while time.monotonic() - since < 20:
                    connection.sendall(b"X-Drop: 1\r\n")
                    time.sleep(RECEIVE_SECONDS / 10)
            assert time.monotonic() - since < 10 * RECEIVE_SECONDS


def test_it_still_answers(server: Serving) -> None:
    time.sleep(2 * RECEIVE_SECONDS)
    with server.connect() as connection:
        connection.sendall(GET + b"Connection: close\r\n\r\n")
        assert received(connection).endswith(b'{"status":"up"}')
