"""Runs the server from its settings until a signal ends it."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable

import uvicorn

from fsdp_advisor.errors import AdvisorError, UsageError
from fsdp_advisor.server.app import create_app
from fsdp_advisor.server.settings import Settings

BACKLOG = 2048
"""Connections that may wait to be accepted."""
KEEP_ALIVE_SECONDS = 15


def run(settings: Settings, announce: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM, then finish the requests under way. Calls `announce` with the address.

    Raises UsageError if the address is not available, AdvisorError if the application does not start.
    """
    listener = _listen(settings)
    config = uvicorn.Config(
        create_app(settings),
        ws="none",
        log_config=None,
        access_log=False,
        server_header=False,
        limit_concurrency=settings.max_connections,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=settings.graceful_seconds,
    )
    server = uvicorn.Server(config)
    # After its shutdown uvicorn raises the signal again. With this handler both signals end in a KeyboardInterrupt.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        announce(_url(settings, listener))  # the socket listens: connections wait until the event loop runs
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        return
    finally:
        listener.close()
    if not server.started:
        raise AdvisorError("the server did not start", hint="see the log lines above")


def _listen(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        return socket.create_server((settings.host, settings.port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = str(error.strerror or error).partition(" (while")[0]
        hint = "another address or port, or --port 0 for any that is free"
        raise UsageError(f"cannot listen on {settings.host}:{settings.port}: {reason}", hint=hint) from None


def _url(settings: Settings, listener: socket.socket) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"http://{host}:{listener.getsockname()[1]}{settings.root_path}"
