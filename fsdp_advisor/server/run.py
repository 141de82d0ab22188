"""From settings to a running server."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress

import uvicorn

from fsdp_advisor.server.observation import MULTIPROCESS
from fsdp_advisor.server.protocol import HttpProtocol
from fsdp_advisor.server.settings import Settings

FACTORY = "fsdp_advisor.server.app:create_app"


def run(settings: Settings) -> None:
    """Serve until told to stop; requests under way are ended first."""
    os.environ.update(settings.environment())  # where worker processes find them
    shared = _shared_metrics(settings)
    try:
        uvicorn.run(
            FACTORY,
            factory=True,
            host=settings.host,
            port=settings.port,
            workers=settings.workers,
            http=HttpProtocol,
            ws="none",
            root_path=settings.root_path,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=15,
            timeout_graceful_shutdown=settings.graceful_seconds,
            h11_max_incomplete_event_size=16 * 1024,
        )
    finally:
        if shared is not None:
            shutil.rmtree(shared, ignore_errors=True)


def _shared_metrics(settings: Settings) -> str | None:
    """Where worker processes keep their figures, so that /metrics is of them all; None where nothing can be written."""
    if settings.workers == 1 or MULTIPROCESS in os.environ:
        return None
    with suppress(OSError):
        os.environ[MULTIPROCESS] = folder = tempfile.mkdtemp(prefix="fsdp-advisor-metrics-")
        return folder
    return None
