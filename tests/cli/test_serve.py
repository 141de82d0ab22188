"""`serve` as a process: it answers, says where, and stops on request."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from matrix import in_turn, taken

from fsdp_advisor.cli.serve import OPTIONS
from fsdp_advisor.server.settings import Settings

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from conftest import Cli  # which folder's, depends on what is run

SECONDS = 300
"""Within this time everything happens that a test waits for, also on a busy machine."""

SERVE = [sys.executable, "-m", "fsdp_advisor", "serve"]


def environment(**extra: str) -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "PORT" and not k.startswith("FSDP_ADVISOR_")} | extra


@contextmanager
def serving(*options: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server that has announced its address, and the address."""
    process = subprocess.Popen(
        [*SERVE, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(**variables),
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("fsdp-advisor answers on http://"), line
        yield process, line.split()[3]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def get(url: str, path: str) -> tuple[int, bytes]:
    at = urlsplit(url)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=SECONDS)
    connection.request("GET", path)
    response = connection.getresponse()
    body = response.read()
    connection.close()
    return response.status, body


@pytest.mark.parametrize("how", taken([signal.SIGTERM], [signal.SIGINT]))
def test_it_answers_and_stops(how: signal.Signals) -> None:
    with serving("--port", "0") as (process, url):
        assert get(url, "/healthz")[0] == 200
        process.send_signal(how)
        out, err = process.communicate(timeout=SECONDS)
        assert (process.returncode, out) == (0, "")
        assert [json.loads(line)["message"] for line in err.splitlines()] == ["request"]


@pytest.mark.parametrize("how", taken([signal.SIGINT], [signal.SIGTERM]))
def test_worker_processes_stop_with_it(how: signal.Signals) -> None:
    """Ctrl-C signals the whole process group, a service manager's SIGTERM the first process only."""
    with serving("--workers", "2", "--log-level", "warning", FSDP_ADVISOR_PORT="0") as (process, url):
        assert get(url, "/healthz")[0] == 200
        (os.killpg if how == signal.SIGINT else os.kill)(process.pid, how)
        assert process.communicate(timeout=SECONDS) == ("", "")
        assert process.returncode == 0


@in_turn(1, of=2)  # on even days tests/server/test_serving.py does this
def test_a_request_under_way_is_answered_before_the_end() -> None:
    with serving("--port", "0", "--workers", "1") as (process, url):
        at = urlsplit(url)
        with socket.create_connection((at.hostname or "", at.port or 0), timeout=SECONDS) as slow:
            body = b'{"model": "meta-llama/Llama-2-7b-hf", "gpus": 4}'
            head = f"POST /api/v1/estimate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            slow.sendall(head.encode() + body[:9])
            assert get(url, "/healthz")[0] == 200  # by now the server has read what was sent
            process.send_signal(signal.SIGTERM)
            slow.sendall(body[9:])
            assert slow.recv(12) == b"HTTP/1.1 200"
        process.communicate(timeout=SECONDS)
        assert process.returncode == 0


def test_a_port_that_is_taken(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ran = cli("serve", "--port", str(port))
    assert (ran.status, ran.out) == (2, "")
    assert ran.err == (
        f"fsdp-advisor: cannot listen on 127.0.0.1:{port}: Address already in use\n"
        "hint: another address or port, or --port 0 for any that is free\n"
    )


@pytest.mark.parametrize(
    ("options", "variables", "complaint"),
    [
        (["--port", "x"], {}, "--port must be a whole number, not x"),
        (["--port", "65536"], {}, "--port must be at most 65535, not 65536"),
        (["--workers", "0"], {}, "--workers must be at least 1, not 0"),
        (["--log-level", "loud"], {}, "--log-level must be debug, info, warning or error, not loud"),
        (["--host", "no host"], {}, "cannot listen on no host:8000: "),
        (["--prot", "1"], {}, "no such option: --prot"),
        ([], {"PORT": "-1"}, "PORT must be at least 0, not -1"),
        ([], {"FSDP_ADVISOR_MAX_WAITING": "0"}, "FSDP_ADVISOR_MAX_WAITING must be at least 1, not 0"),
    ],
)
def test_a_bad_value_of_serve_is_refused_in_two_lines(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, options: list[str], variables: dict[str, str], complaint: str
) -> None:
    monkeypatch.delenv("PORT", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    ran = cli("serve", *options)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.startswith(f"fsdp-advisor: {complaint}")
    assert len(ran.err.splitlines()) == 2


def test_there_is_an_option_for_every_setting() -> None:
    assert list(OPTIONS) == list(Settings.model_fields)
    for name, (_, default, _) in OPTIONS.items():
        field = Settings.model_fields[name]
        own = {False: "off", "": "none", (): "none"}.get(
            field.default, f"{field.default:g}" if isinstance(field.default, float) else field.default
        )
        assert default == str(own), name


def test_an_option_wins_over_its_variable_and_that_over_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PORT", "1")
    assert Settings().port == 1
    monkeypatch.setenv("FSDP_ADVISOR_PORT", "2")
    assert Settings().port == 2
    assert Settings(port="3").port == 3  # type: ignore[arg-type]  # text, as from the command line


def test_other_commands_import_no_server() -> None:
    code = (
        "import sys; from fsdp_advisor.cli import main; main(['gpus', '--json']);"
        "sys.exit(bool({'fastapi', 'uvicorn', 'pydantic_settings', 'starlette'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, cwd=Path(sys.prefix))
