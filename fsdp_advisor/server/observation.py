"""What operators see: JSON log lines with a request id, and Prometheus metrics. Neither holds what was asked."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextvars import ContextVar
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.multiprocess import MultiProcessCollector

request_id: ContextVar[str] = ContextVar("request_id", default="-")

MULTIPROCESS = "PROMETHEUS_MULTIPROC_DIR"
"""The variable by which prometheus-client finds the folder that worker processes share their figures in."""

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_STANDARD = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": request_id.get(),
        }
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_as_json(level: str) -> None:
    """Log lines of this program and of uvicorn, on standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("fsdp_advisor", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    if level == "info":  # uvicorn's account of starting and stopping is for debugging
        logging.getLogger("uvicorn").setLevel(logging.WARNING)


class Metrics:
    """The server's figures."""

    def __init__(self) -> None:
        shared = os.environ.get(MULTIPROCESS)
        self._registry = registry = CollectorRegistry()
        if shared:
            MultiProcessCollector(registry)  # type: ignore[no-untyped-call]  # of prometheus_client
        else:
            ProcessCollector(registry=registry)
            PlatformCollector(registry=registry)
        own = None if shared else registry
        labels = ("method", "route", "status")
        self.requests = Counter("fsdp_advisor_requests", "Requests answered.", labels, registry=own)
        self.seconds = Histogram(
            "fsdp_advisor_request_seconds", "Time to answer.", ("route",), buckets=BUCKETS, registry=own
        )
        self.in_flight = Gauge(
            "fsdp_advisor_requests_in_flight", "Requests being answered.", registry=own, multiprocess_mode="livesum"
        )
        self.answers = Counter("fsdp_advisor_answers", "Answers kept or computed.", ("kept",), registry=own)
        self.recordings = Counter(
            "fsdp_advisor_recordings", "Configurations recorded, by what came of it.", ("outcome",), registry=own
        )

    def text(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)
