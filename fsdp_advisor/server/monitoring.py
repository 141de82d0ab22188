"""Monitoring for operators: JSON log lines with a request id, Prometheus metrics, and health. None of them contains users' jobs."""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST, Counter, Gauge, Histogram, generate_latest
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from fsdp_advisor.model import catalog
from fsdp_advisor.server.errors import Problem, problem

request_id: ContextVar[str] = ContextVar("request_id", default="-")

# Metrics

BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

REQUESTS = Counter("fsdp_advisor_requests", "Requests answered.", ("method", "route", "status"))
REQUEST_SECONDS = Histogram("fsdp_advisor_request_seconds", "Time to answer.", ("route",), buckets=BUCKETS)
IN_FLIGHT = Gauge("fsdp_advisor_requests_in_flight", "Requests being answered.")
ANSWERS = Counter("fsdp_advisor_answers", "Answers, by whether they were kept from before.", ("kept",))

# Logs

_STANDARD_FIELDS = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class JsonFormatter(logging.Formatter):
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
        line |= {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def log_as_json(level: str) -> None:
    """Send the log lines of this program and of uvicorn to standard error, as JSON."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    for name in ("fsdp_advisor", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    if level == "info":  # uvicorn's lines about starting and stopping are for debugging
        logging.getLogger("uvicorn").setLevel(logging.WARNING)


# Routes


class Health(BaseModel):
    status: str


class Ready(BaseModel):
    status: str
    models: int


router = APIRouter(tags=["operation"])
_NOT_STORED = {"Cache-Control": "no-store"}


@router.get("/healthz", summary="Whether the server is up")
async def healthz(response: Response) -> Health:
    response.headers.update(_NOT_STORED)
    return Health(status="up")


@router.get(
    "/readyz", summary="Whether the catalog is loaded", response_model=Ready, responses={503: {"model": Problem}}
)
async def readyz(response: Response) -> Ready | Response:
    try:
        models = len(await run_in_threadpool(catalog.entries))
    except Exception:  # whatever is wrong with the catalog's file, no question can be answered
        return problem(503, "the catalog cannot be read", "is the installation complete?")
    response.headers.update(_NOT_STORED)
    return Ready(status="ready", models=models)


@router.get("/metrics", summary="Figures for Prometheus", response_class=Response,
            responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})  # fmt: skip
async def metrics() -> Response:
    return Response(generate_latest(), media_type=CONTENT_TYPE_LATEST, headers=_NOT_STORED)
