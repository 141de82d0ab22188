"""What stands around every route: identity, log line and metrics; security headers; limits. Plain ASGI, from the outside in."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from dataclasses import dataclass
from uuid import uuid4

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fsdp_advisor.server.errors import RETRY_AFTER_SECONDS, problem
from fsdp_advisor.server.observation import Metrics, request_id
from fsdp_advisor.server.settings import Settings

CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "font-src 'self'",
        "connect-src 'self'",
        "form-action 'self'",
        "base-uri 'none'",
        "frame-ancestors 'none'",
    )
)
SECURITY_HEADERS = (
    ("Content-Security-Policy", CONTENT_SECURITY_POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Permissions-Policy", "camera=(), geolocation=(), microphone=()"),
)
UNLIMITED = frozenset({"/healthz", "/readyz", "/metrics"})
"""Paths that a busy server answers too."""

_LOG = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_TOKEN = re.compile(rb'"(?:[^"\\]+|\\.)*"?|[\[\]{}]', re.DOTALL)


def surround(app: FastAPI, settings: Settings) -> None:
    """Put the layers around an application: the last added is the outermost."""
    metrics: Metrics = app.state.metrics
    app.add_middleware(GZipMiddleware, minimum_size=500, compresslevel=6)
    app.add_middleware(Limits, settings=settings, metrics=metrics)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Content-Type"],
        )
    app.add_middleware(SecurityHeaders)
    app.add_middleware(Observation, metrics=metrics, root_path=settings.root_path)


class Observation:
    """Gives each request an id, a log line and its place in the metrics; what nobody foresaw becomes status 500.

    HEAD is answered as GET is, without the body. A proxy may take `root_path` off the addresses it hands on, or leave it.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics, root_path: str) -> None:
        self.app, self.metrics, self.root_path = app, metrics, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        identity = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        token = request_id.set(identity)
        if self.root_path:
            path = scope["path"] if scope["path"] != self.root_path else self.root_path + "/"
            whole = path if path.startswith(self.root_path + "/") else self.root_path + path
            scope = {**scope, "root_path": self.root_path, "path": whole}
        method, started, status = scope["method"], time.perf_counter(), 500
        begun = False

        async def observed(message: Message) -> None:
            nonlocal status, begun
            if message["type"] == "http.response.start":
                status, begun = message["status"], True
                MutableHeaders(scope=message)["X-Request-ID"] = identity
            elif method == "HEAD":
                message = {**message, "body": b""}
            await send(message)

        if method == "HEAD":
            scope = {**scope, "method": "GET"}
        try:
            await self.app(scope, receive, observed)
        except Exception:
            _LOG.exception("request failed", extra={"method": method})
            if begun:
                raise
            hint = f"please report it, with the request id {identity}"
            await SecurityHeaders(problem(500, "internal error", hint))(scope, receive, observed)
        finally:
            seconds = time.perf_counter() - started
            route = getattr(scope.get("route"), "path", "other")
            self.metrics.requests.labels(method if method in _METHODS else "other", route, str(status)).inc()
            self.metrics.seconds.labels(route).observe(seconds)
            if _LOG.isEnabledFor(logging.INFO):
                fields = {"method": method, "route": route, "status": status, "milliseconds": round(seconds * 1e3, 2)}
                _LOG.info("request", extra=fields)
            request_id.reset(token)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"})


class SecurityHeaders:
    """Headers that tell a browser to trust this page with nothing that it does not need."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS:
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, secured if scope["type"] == "http" else send)


class Limits:
    """At most so many requests at once, each of them small, not nested deeply, and whole in time."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self.app, self.settings, self.metrics = app, settings, metrics
        self.in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].removeprefix(self.settings.root_path) in UNLIMITED:
            return await self.app(scope, receive, send)
        if self.in_flight >= self.settings.max_in_flight:
            headers = {"Retry-After": str(RETRY_AFTER_SECONDS)}
            error = f"{self.settings.max_in_flight} requests are being answered"
            return await problem(503, error, "try again in a few seconds", headers)(scope, receive, send)
        self.in_flight += 1
        self.metrics.in_flight.set(self.in_flight)
        try:
            whole = await self._whole(scope, receive)
            if isinstance(whole, Refused):
                return await problem(whole.status, whole.error, whole.hint, {"Connection": "close"})(
                    scope, receive, send
                )
            return await self.app(scope, whole, send)
        finally:
            self.in_flight -= 1
            self.metrics.in_flight.set(self.in_flight)

    async def _whole(self, scope: Scope, receive: Receive) -> Receive | Refused:
        """The request's body, read and looked at, as something to receive from; or why it is refused."""
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        if length == "0" and "transfer-encoding" not in headers:
            return receive
        limit = self.settings.max_body_bytes
        too_large = Refused(413, f"the body is larger than {limit} bytes", "a config.json is a few kilobytes")
        if not length.isdecimal() or int(length) > limit:
            return too_large
        try:
            body = await asyncio.wait_for(_read(receive, limit), self.settings.receive_seconds)
        except asyncio.TimeoutError:
            seconds = self.settings.receive_seconds
            return Refused(408, f"the request was not whole after {seconds:g} s", "send it faster")
        if body is None:
            return Refused(400, "the request ended before it was whole", "send as many bytes as Content-Length says")
        if len(body) > limit:
            return too_large
        if b"\0" in body:  # UTF-16 and UTF-32, of which the depth cannot be seen
            return Refused(400, "the body is not UTF-8", "JSON is sent as UTF-8")
        if depth_exceeds(body, self.settings.max_json_depth):
            levels = self.settings.max_json_depth
            return Refused(422, f"the body is nested deeper than {levels} levels", "a config.json has a few levels")
        message: Message = {"type": "http.request", "body": body, "more_body": False}
        unread = [message]

        async def whole() -> Message:
            return unread.pop() if unread else await receive()

        return whole


@dataclass(frozen=True, slots=True)
class Refused:
    """Why a request goes no further."""

    status: int
    error: str
    hint: str


async def _read(receive: Receive, limit: int) -> bytes | None:
    """The body, or the part of it that is past the limit; None where the sender has gone."""
    parts, size = [], 0
    while size <= limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if not message.get("more_body", False):
            break
    return b"".join(parts)


def depth_exceeds(body: bytes, levels: int) -> bool:
    """Whether JSON text nests deeper; found without parsing it.

    >>> depth_exceeds(b'[[1], "[[["]', 2), depth_exceeds(b"[[[", 2)
    (False, True)
    """
    if body.count(b"[") + body.count(b"{") <= levels:
        return False
    depth = 0
    for token in _TOKEN.finditer(body):
        if token[0] in b"[{":
            depth += 1
            if depth > levels:
                return True
        elif token[0] in b"]}":
            depth -= 1
    return False
