"""Every error that leaves the server has one shape: {"error", "hint", "status"}. Nothing of the host is in it.

Where a browser asks for a page that there is not, the same words are a page.
"""

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

from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.server.rendering import HTML, render
from fsdp_advisor.server.request_models import complaint

RETRY_AFTER_SECONDS = 2
"""Where the number of requests or connections is all that stands in the way."""
LONGEST_TEXT = 400
"""Characters of a message; hostile input is quoted in it."""

_HINTS = {
    400: "the body must be a JSON object",
    404: "the routes are listed at /docs",
    405: "the routes and their methods are listed at /docs",
    408: "send the whole request sooner",
    413: "a config.json is a few kilobytes",
    415: "send JSON, with Content-Type: application/json",
}


class Problem(BaseModel):
    """What went wrong, and what to do about it."""

    error: str = Field(examples=["unknown model 'meta-lama/Llama-2-7b-hf'"])
    hint: str = Field(examples=["did you mean meta-llama/Llama-2-7b-hf?"])
    status: int = Field(examples=[404])


class ServerBusy(AdvisorError):
    """More was asked at once than this server does at once."""

    http_status = 503
    retry_after_seconds = 5


def problem(status: int, error: str, hint: str, headers: Mapping[str, str] | None = None) -> Response:
    """The one shape of an error."""
    body = {"error": shortened(error), "hint": shortened(hint), "status": status}
    return Response(
        json.dumps(body, ensure_ascii=True),
        status_code=status,
        media_type="application/json",
        headers={"Cache-Control": "no-store", **(headers or {})},
    )


def shortened(text: str) -> str:
    """On one line, printable, of bounded length."""
    flat = "".join(c if c.isprintable() else "�" for c in " ".join(text.split()))
    return flat if len(flat) <= LONGEST_TEXT else flat[: LONGEST_TEXT - 4] + " ..."


def refusal(error: AdvisorError) -> Response:
    """An AdvisorError as a response."""
    headers = {"Retry-After": str(error.retry_after_seconds)} if isinstance(error, ServerBusy) else None
    return problem(error.http_status, error.message, rest_words(error.hint), headers)


_OPTION = re.compile(r"(?<!\S)--([a-z][a-z-]*)")


def rest_words(hint: str) -> str:
    """A hint that speaks of the command line, in the words of a query string.

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


def explained(errors: Sequence[Any]) -> AdvisorError:
    """The first of FastAPI's complaints, in the words of the command line."""
    first = dict(errors[0])
    if first["type"] == "json_invalid":
        return AdvisorError("the body is not valid JSON", hint='send an object such as {"model": "7B", "gpus": 8}')
    place, *names = first["loc"]
    if not names and place == "body":
        return AdvisorError("the body is not a JSON object", hint="with Content-Type: application/json")
    return complaint({**first, "loc": tuple(n for n in names if isinstance(n, (str, int)))})


def _methods(request: Request) -> list[str]:
    """What the route can do: its path may stand there once for each method."""
    asked = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    routes = request.app.openapi()["paths"].items()
    return sorted(m.upper() for path, able in routes if compile_path(path)[0].match(asked) for m in able)


def is_program(request: Request) -> bool:
    """Whether an error is told in JSON: on the routes of the API, and wherever HTML is not preferred by name."""
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    if path.startswith("/api/") or path.endswith(".json"):
        return True
    accepted = request.headers.get("accept", "")
    return _preference(accepted, "text/html") <= _preference(accepted, "application/json")


def _preference(accepted: str, kind: str) -> float:
    """How much an Accept header prefers a media type that it names; 0 of one that it does not.

    >>> _preference("text/html, application/json;q=0.9", "application/json"), _preference("*/*", "text/html")
    (0.9, 0.0)
    """
    for part in accepted.split(","):
        named, *parameters = (word.strip().lower() for word in part.split(";"))
        if named == kind:
            quality = next((p.removeprefix("q=") for p in parameters if p.startswith("q=")), "1")
            return float(quality) if re.fullmatch(r"[01](\.\d{0,3})?", quality) else 0.0
    return 0.0


def add_handlers(app: FastAPI) -> None:
    """Errors of every origin become the one shape; what nobody foresaw is the middleware's."""

    @app.exception_handler(AdvisorError)
    async def _advisor(request: Request, error: AdvisorError) -> Response:
        return refusal(error)

    @app.exception_handler(RequestValidationError)
    async def _invalid(request: Request, error: RequestValidationError) -> Response:
        return refusal(explained(error.errors()))

    @app.exception_handler(HTTPException)
    async def _http(request: Request, error: HTTPException) -> Response:
        what = {404: "no such page", 405: f"{request.method} is not possible here"}.get(error.status_code, error.detail)
        headers = dict(error.headers or {})
        if error.status_code == 405:
            headers["Allow"] = ", ".join(_methods(request)) or headers.get("Allow", "GET")
        hint = _HINTS.get(error.status_code, "see /docs")
        if is_program(request):
            return problem(error.status_code, what, hint, headers)
        page = render(request, "problem.html", error=what, hint=hint, status=error.status_code)
        return Response(page, error.status_code, {"Cache-Control": "no-store", "Vary": "Accept", **headers}, HTML)
