"""From settings to a running server, and to its end."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress

import uvicorn
from uvicorn.supervisors import Multiprocess

from fsdp_advisor.errors import AdvisorError, UsageError
from fsdp_advisor.server.observation import MULTIPROCESS, log_as_json
from fsdp_advisor.server.protocol import HttpProtocol
from fsdp_advisor.server.settings import Settings

FACTORY = "fsdp_advisor.server.app:create_app"
BACKLOG = 2048
"""Connections that may wait to be accepted."""

Announce = Callable[[str], None]


def run(settings: Settings, announce: Announce) -> None:
    """Serve until SIGINT or SIGTERM; requests under way are ended first. `announce` is told the address, once it answers.

    Raises UsageError where the address cannot be listened on, AdvisorError where the application does not start.
    """
    listener = _listener(settings)
    url = _url(settings, listener)
    os.environ.update(settings.environment())  # where worker processes find them
    shared = _shared_metrics(settings)
    log_as_json(settings.log_level)
    config = uvicorn.Config(
        FACTORY,
        factory=True,
        host=settings.host,
        port=listener.getsockname()[1],
        workers=settings.workers,
        http=HttpProtocol,
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=15,
        timeout_graceful_shutdown=settings.graceful_seconds,
    )
    try:
        started = (
            _alone(config, listener, url, announce) if settings.workers == 1 else _many(config, listener, url, announce)
        )
    finally:
        listener.close()
        if shared is not None:
            shutil.rmtree(shared, ignore_errors=True)
    if not started:
        raise AdvisorError("the server did not start", hint="the log lines above say why")


def _listener(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        why = str(error.strerror or error).partition(" (while")[0]
        hint = "another address or port, or --port 0 for any that is free"
        raise UsageError(f"cannot listen on {settings.host}:{settings.port}: {why}", hint=hint) from None


def _url(settings: Settings, listener: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listener.getsockname()[1]}{settings.root_path}"


def _alone(config: uvicorn.Config, listener: socket.socket, url: str, announce: Announce) -> bool:
    """One process. uvicorn ends gracefully, then raises the signal anew: here it has done its work."""
    server = _Server(config, lambda: announce(url))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt):
        server.run(sockets=[listener])
        return server.started
    return True


def _many(config: uvicorn.Config, listener: socket.socket, url: str, announce: Announce) -> bool:
    workers = _Workers(config, [listener], lambda: announce(url))
    workers.run()
    return workers.ready


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()


class _Workers(Multiprocess):
    """Processes that share the listener; one that dies is replaced."""

    START_SECONDS = 60.0

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket], ready: Callable[[], None]) -> None:
        super().__init__(config, sockets)
        self._ready, self.ready = ready, False

    def init_processes(self) -> None:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches workers too, while they still import
        try:
            super().init_processes()
        finally:
            signal.signal(signal.SIGINT, before)
        self.ready = self.processes[0].wait_until_ready(self.START_SECONDS, self.should_exit)
        if self.ready:
            self._ready()


def _shared_metrics(settings: Settings) -> str | None:
    """Where worker processes keep their figures, so that /metrics is of them all; None where nothing can be written."""
    if settings.workers == 1 or MULTIPROCESS in os.environ:
        return None
    with suppress(OSError):
        os.environ[MULTIPROCESS] = folder = tempfile.mkdtemp(prefix="fsdp-advisor-metrics-")
        return folder
    return None
