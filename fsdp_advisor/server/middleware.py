"""Middleware around every route: request id, log line and metrics; security headers; limits of a request's body."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from uuid import uuid4

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fsdp_advisor.model.config import json_depth_exceeds
from fsdp_advisor.server.errors import RequestRefused, error_response, problem
from fsdp_advisor.server.monitoring import IN_FLIGHT, REQUEST_SECONDS, REQUESTS, request_id
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
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"})

_LOG = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


def add(app: FastAPI, settings: Settings) -> None:
    """Add all middleware to an application. The last added is the outermost."""
    app.add_middleware(GZipMiddleware, minimum_size=500, compresslevel=6)
    app.add_middleware(BodyLimits, settings=settings)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["Content-Type"],
        )
    app.add_middleware(SecurityHeaders)
    app.add_middleware(RequestLog)
    app.add_middleware(RequestPath, root_path=settings.root_path)


class RequestPath:
    """Puts `root_path` before paths from which a proxy has removed it, and routes HEAD as GET: uvicorn drops the body."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app, self.root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if path == self.root_path:
                path += "/"
            elif not path.startswith(self.root_path + "/"):
                path = self.root_path + path
            asked = scope["method"]
            method = "GET" if asked == "HEAD" else asked
            scope = {**scope, "root_path": self.root_path, "path": path, "method": method, "asked_method": asked}
        await self.app(scope, receive, send)


class RequestLog:
    """Gives each request an id, writes a log line, and counts it in the metrics. An unforeseen exception becomes status 500."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        given = Headers(scope=scope).get("x-request-id", "")
        identity = given if _REQUEST_ID.fullmatch(given) else uuid4().hex
        request_id.set(identity)  # each request is a task with its own context
        begun, status = time.perf_counter(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = identity
            await send(message)

        try:
            with IN_FLIGHT.track_inprogress():
                await self.app(scope, receive, send_with_id)
        except Exception:
            _LOG.exception("request failed", extra={"method": scope["method"]})
            if status:  # the response has begun
                raise
            response = problem(500, "internal error", f"please report it, with the request id {identity}")
            await SecurityHeaders(response)(scope, receive, send_with_id)
        finally:
            _record(scope, status, time.perf_counter() - begun)


def _record(scope: Scope, status: int, seconds: float) -> None:
    method = scope["asked_method"] if scope["asked_method"] in METHODS else "other"
    route = getattr(scope.get("route"), "path", "other")  # never the path itself, which may contain the user's job
    REQUESTS.labels(method, route, str(status)).inc()
    REQUEST_SECONDS.labels(route).observe(seconds)
    fields = {"method": method, "route": route, "status": status, "milliseconds": round(seconds * 1e3, 2)}
    _LOG.info("request", extra=fields)


class SecurityHeaders:
    """Adds security headers, which deny a page everything that it does not need."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS:
                    headers.setdefault(name, value)
            await send(message)

        await self.app(scope, receive, send_with_headers if scope["type"] == "http" else send)


class BodyLimits:
    """Reads a request's body before its route does, and refuses one that is too large, too slow or nested too deeply."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self.app, self.settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope) if scope["type"] == "http" else {}
        length = headers.get("content-length", "0")
        if length == "0" and "transfer-encoding" not in headers:
            return await self.app(scope, receive, send)
        try:
            body = await self._read(receive, int(length) if length.isdecimal() else 0)
        except RequestRefused as error:
            return await error_response(error, {"Connection": "close"})(scope, receive, send)
        unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_body() -> Message:
            return unread.pop() if unread else await receive()

        return await self.app(scope, receive_body, send)

    async def _read(self, receive: Receive, content_length: int) -> bytes:
        limit, seconds, levels = (
            self.settings.max_body_bytes,
            self.settings.receive_seconds,
            self.settings.max_json_depth,
        )
        if content_length > limit:
            raise RequestRefused(413, f"the body is larger than {limit} bytes")
        try:
            body = await asyncio.wait_for(_read_body(receive, limit), seconds)
        except asyncio.TimeoutError:
            raise RequestRefused(408, f"the body did not arrive within {seconds:g} s") from None
        try:
            text = body.decode()
        except UnicodeDecodeError:
            raise RequestRefused(400, "the body is not UTF-8") from None
        if "\0" in text:  # UTF-16 or UTF-32, which json.loads would read
            raise RequestRefused(400, "the body is not UTF-8")
        if json_depth_exceeds(body, levels):
            raise RequestRefused(422, f"the body is nested deeper than {levels} levels")
        return body


async def _read_body(receive: Receive, limit: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestRefused(400, "the request ended before its body was complete")
        body += message.get("body", b"")
        if len(body) > limit:
            raise RequestRefused(413, f"the body is larger than {limit} bytes")
        if not message.get("more_body", False):
            return bytes(body)
