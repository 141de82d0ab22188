"""Responses that clients may keep: an entity tag, how long they are valid, and 304 if the client has them already."""

from __future__ import annotations

import gzip

from starlette.requests import Request
from starlette.responses import Response

from fsdp_advisor.server.answers import Document, entity_tag

MAX_AGE_SECONDS = 3600
"""How long clients may keep a response. It changes only with the version of this program."""


def document_response(request: Request, document: Document) -> Response:
    """A finished document, compressed if the client accepts gzip."""
    headers = {"Vary": "Accept-Encoding"}
    if document.file_name is not None:
        headers["Content-Disposition"] = f'attachment; filename="{document.file_name}"'
    if accepts_gzip := "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
    body = document.gzipped if accepts_gzip else gzip.decompress(document.gzipped)
    return _cacheable(request, body, document.media_type, document.etag, document.lasting, headers)


def body_response(request: Request, body: bytes, media_type: str = "application/json") -> Response:
    """A body that changes only with the version of this program."""
    return _cacheable(request, body, media_type, entity_tag(body), True, {})


def _cacheable(
    request: Request, body: bytes, media_type: str, etag: str, lasting: bool, headers: dict[str, str]
) -> Response:
    headers["ETag"] = etag
    headers["Cache-Control"] = f"public, max-age={MAX_AGE_SECONDS}" if lasting else "no-cache"
    if request.method == "GET" and _matches(request.headers.get("if-none-match", ""), etag):
        headers.pop("Content-Encoding", None)
        return Response(status_code=304, headers=headers | {"Vary": "Accept-Encoding"})
    return Response(body, media_type=media_type, headers=headers)


def _matches(if_none_match: str, etag: str) -> bool:
    """Whether an If-None-Match header names the tag; weak and strong tags are equal here (RFC 9110, 8.8.3.2)."""
    tags = [tag.strip().removeprefix("W/") for tag in if_none_match.split(",")]
    return "*" in tags or etag.removeprefix("W/") in tags
