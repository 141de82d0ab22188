"""Answers that can be asked for again: a tag of their content, how long they hold, and 304 where nothing has changed."""

from __future__ import annotations

import hashlib

from starlette.requests import Request
from starlette.responses import Response

HOUR = 3600
"""Seconds. An answer changes only with the version of this program."""


def tag(body: bytes) -> str:
    """A weak entity tag: the same for every content coding."""
    return f'W/"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'


def reply(
    request: Request,
    body: bytes,
    media_type: str = "application/json",
    *,
    max_age: int | None = HOUR,
    etag: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """`body` with ETag and Cache-Control, or 304 where the asker has it. `max_age` None: to be asked for each time."""
    etag = etag or tag(body)
    shared = {
        "ETag": etag,
        "Cache-Control": "no-cache" if max_age is None else f"public, max-age={max_age}",
        **(headers or {}),
    }
    if "Content-Encoding" in shared:  # of what it compresses itself the middleware says so
        shared["Vary"] = "Accept-Encoding"
    if request.method == "GET" and _names(request.headers.get("if-none-match", ""), etag):
        return Response(status_code=304, headers={**shared, "Vary": "Accept-Encoding"})
    return Response(body, media_type=media_type, headers=shared)


def _names(header: str, etag: str) -> bool:
    opaque = etag.removeprefix("W/")
    return header.strip() == "*" or any(part.strip().removeprefix("W/") == opaque for part in header.split(","))
