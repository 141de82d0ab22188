"""Clients that speak HTTP badly, against a server in a process of its own: each is refused or left, and costs no memory."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import urlsplit

import psutil
import pytest

RECEIVE_SECONDS = 1
MOST_CONNECTIONS = 20
HEAD = b"%s %s HTTP/1.1\r\nHost: localhost\r\n"
GET, POST = HEAD % (b"GET", b"/healthz"), HEAD % (b"POST", b"/api/v1/estimate")
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


@dataclass
class Server:
    process: subprocess.Popen[str]
    port: int

    def connect(self) -> socket.socket:
        made = socket.create_connection(("127.0.0.1", self.port), timeout=30)
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made

    @property
    def resident_bytes(self) -> int:
        return int(psutil.Process(self.process.pid).memory_info().rss)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    bounds = {"RECEIVE_SECONDS": RECEIVE_SECONDS, "MAX_CONNECTIONS": MOST_CONNECTIONS, "LOG_LEVEL": "error"}
    process = subprocess.Popen(
        [sys.executable, "-m", "fsdp_advisor", "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **{f"FSDP_ADVISOR_{name}": str(value) for name, value in bounds.items()}},
    )
    assert process.stdout is not None
    port = urlsplit(process.stdout.readline().split()[3]).port
    assert port is not None
    yield Server(process, port)
    process.terminate()
    assert process.wait(timeout=20) == 0


def _heard(connection: socket.socket) -> bytes:
    """All that comes until the other side ends it."""
    heard = b""
    try:
        while part := connection.recv(65536):
            heard += part
    except ConnectionError:
        pass
    return heard


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
def test_refused_in_the_one_shape(server: Server, kind: str) -> None:
    sent, status = REFUSED[kind]
    with server.connect() as connection:
        connection.sendall(sent)
        head, _, body = _heard(connection).partition(b"\r\n\r\n")
    assert head.split()[1] == str(status).encode()
    assert set(json.loads(body)) == {"error", "hint", "status"} and json.loads(body)["status"] == status


@pytest.mark.parametrize("said", [b"", b"GET / HT", GET], ids=["nothing", "half a line", "half a head"])
def test_who_does_not_go_on_is_left(server: Server, said: bytes) -> None:
    with server.connect() as connection:
        connection.sendall(said)
        assert _heard(connection) == b""


@pytest.mark.parametrize("head", [GET, POST], ids=["GET", "POST"])
def test_trailers_without_end_take_no_memory(server: Server, head: bytes) -> None:
    before = server.resident_bytes
    trailers = b"".join(b"T-%d: %s\r\n" % (n, b"a" * 1000) for n in range(1000))
    with server.connect() as connection, pytest.raises(ConnectionError):
        connection.sendall(head + CHUNKED + b"0\r\n")
        for _ in range(1000):
            connection.sendall(trailers)
    assert server.resident_bytes - before < 32 * 2**20


def test_who_asks_and_does_not_read_is_left(server: Server) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.settimeout(10 * RECEIVE_SECONDS)
        asked = HEAD % (b"GET", b"/api/v1/gpus") + b"\r\n"
        with pytest.raises(ConnectionError):
            for _ in range(1000):  # pipelined: 40 MB of answers
                connection.sendall(asked)
                time.sleep(0.01)


def test_one_connection_too_many_is_told_so(server: Server) -> None:
    open_ones = [server.connect() for _ in range(MOST_CONNECTIONS)]
    try:
        with server.connect() as connection:
            head, _, body = _heard(connection).partition(b"\r\n\r\n")
        assert head.split()[1] == b"503" and json.loads(body)["status"] == 503
    finally:
        for connection in open_ones:
            connection.close()


def test_it_still_answers(server: Server) -> None:
    time.sleep(2 * RECEIVE_SECONDS)
    with server.connect() as connection:
        connection.sendall(GET + b"Connection: close\r\n\r\n")
        assert _heard(connection).endswith(b'{"status":"up"}')
