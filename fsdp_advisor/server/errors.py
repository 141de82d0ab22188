"""The server's errors, all of which have one shape: {"error", "hint", "status"}. Browsers that request a page get an error page."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import compile_path

from fsdp_advisor.errors import MAX_MESSAGE, AdvisorError
from fsdp_advisor.server.rendering import HTML, render
from fsdp_advisor.server.request_models import complaint

_HINTS = {
    400: "the body must be a JSON object in UTF-8",
    404: "the routes are listed at /docs",
    405: "the routes and their methods are listed at /docs",
    408: "send the whole request sooner",
    413: "a config.json has a few kilobytes",
    415: "send JSON, with Content-Type: application/json",
    422: "a config.json has a few levels",
}


class Problem(BaseModel):
    """An error, and what to do about it."""

    error: str = Field(examples=["unknown model 'meta-lama/Llama-2-7b-hf'"])
    hint: str = Field(examples=["did you mean meta-llama/Llama-2-7b-hf?"])
    status: int = Field(examples=[404])


class ServerBusy(AdvisorError):
    """The server has no time or memory for a request now."""

    http_status = 503
    retry_after_seconds = 5


class RequestRefused(AdvisorError):
    """A request that is refused before it reaches a route, such as one with too large a body."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message, hint=_HINTS[status])
        self.http_status = status


def problem(status: int, error: str, hint: str, headers: Mapping[str, str] | None = None) -> Response:
    """A response in the shape of every error."""
    body = {"error": shortened(error), "hint": shortened(hint), "status": status}
    return Response(
        json.dumps(body, ensure_ascii=True),
        status_code=status,
        media_type="application/json",
        headers={"Cache-Control": "no-store", **(headers or {})},
    )


def shortened(text: str) -> str:
    """The text on one line, without control characters, at most MAX_MESSAGE long."""
    flat = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))
    return flat if len(flat) <= MAX_MESSAGE else flat[: MAX_MESSAGE - 4] + " ..."


def error_response(error: AdvisorError, headers: Mapping[str, str] | None = None) -> Response:
    """An AdvisorError as a response."""
    retry = {"Retry-After": str(error.retry_after_seconds)} if isinstance(error, ServerBusy) else {}
    return problem(error.http_status, error.message, rest_words(error.hint), {**retry, **(headers or {})})


_OPTION = re.compile(r"(?<!\S)--([a-z][a-z-]*)")


def rest_words(hint: str) -> str:
    """A hint about the command line, with the names that the REST API uses.

    >>> rest_words("see fsdp-advisor estimate --help")
    'see /docs'
    >>> rest_words("--micro-batch-size 4, or --attention eager")
    'micro_batch_size 4, or attention eager'
    """
    for command_line, rest in (
        ("see fsdp-advisor estimate --help", "see /docs"),
        ("`fsdp-advisor models`", "/api/v1/models"),
        ("`fsdp-advisor gpus`", "/api/v1/gpus"),
        ("fsdp-advisor gpus", "/api/v1/gpus"),
        ("fsdp-advisor models", "/api/v1/models"),
    ):
        hint = hint.replace(command_line, rest)
    return _OPTION.sub(lambda option: option[1].replace("-", "_"), hint)


def validation_error(errors: Sequence[Any]) -> AdvisorError:
    """The first of FastAPI's validation errors, worded as on the command line."""
    first = dict(errors[0])
    if first["type"] == "json_invalid":
        return AdvisorError("the body is not valid JSON", hint='send an object such as {"model": "7B", "gpus": 8}')
    place, *names = first["loc"]
    if not names and place == "body" and first["type"] != "value_error":
        return AdvisorError("the body is not a JSON object", hint="with Content-Type: application/json")
    return complaint({**first, "loc": tuple(n for n in names if isinstance(n, (str, int)))})


def _allowed_methods(request: Request) -> str:
    """The methods that a path allows. Starlette reports those of one route only, but here each method has its own route."""
    asked = _route_path(request)
    paths = request.app.openapi()["paths"].items()
    methods = {m.upper() for path, operations in paths if compile_path(path)[0].match(asked) for m in operations}
    return ", ".join(sorted(methods))


def _route_path(request: Request) -> str:
    path: str = request.scope["path"]
    return path.removeprefix(request.scope.get("root_path", ""))


def _wants_page(request: Request) -> bool:
    """Whether a browser asks for a page: browsers, unlike programs, prefer HTML to everything else."""
    path = _route_path(request)
    is_data = path.startswith("/api/") or path.endswith(".json")
    return not is_data and request.headers.get("accept", "").startswith("text/html")


def add_handlers(app: FastAPI) -> None:
    """Give all errors that routes raise the same shape. Unforeseen exceptions are left to `middleware.RequestLog`."""

    @app.exception_handler(AdvisorError)
    async def _advisor(request: Request, error: AdvisorError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(validation_error(error.errors()))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        what = {404: "no such page", 405: f"{request.method} is not possible here"}.get(error.status_code, error.detail)
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = _allowed_methods(request) or headers.get("Allow", "GET")
        hint = _HINTS.get(error.status_code, "see /docs")
        if not _wants_page(request):
            return problem(error.status_code, what, hint, headers)
        root = request.scope.get("root_path", "")
        page = render("problem.html", root, _route_path(request), error=what, hint=hint, status=error.status_code)
        return Response(page, error.status_code, {"Cache-Control": "no-store", "Vary": "Accept", **headers}, HTML)
