"""Hostile requests: every refusal has the same shape and reveals nothing about the host."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from matrix import in_turn
from starlette.testclient import TestClient

ESTIMATE = "/api/v1/estimate"
PATHS = [
    "/etc/passwd",
    "./config.json",
    "../../etc/passwd",
    "file:///etc/passwd",
    "~/model",
    "C:\\model",
    "/proc/self/environ",
]
BAD: list[tuple[str, str, dict[str, Any]]] = [
    *(("GET", ESTIMATE, {"params": {"model": path}}) for path in PATHS),
    *(("POST", ESTIMATE, {"json": {"model": path}}) for path in PATHS),
    ("GET", ESTIMATE, {}),
    ("GET", ESTIMATE, {"params": {"model": "<script>alert(1)</script>"}}),
    ("GET", ESTIMATE, {"params": {"model": "7B", "gpus": 10**30}}),
    ("GET", ESTIMATE, {"params": {"model": "7B", "gpus": -1}}),
    ("GET", ESTIMATE, {"params": {"model": "7B", "gpus": "nan"}}),
    ("GET", ESTIMATE, {"params": {"model": "7B", "colour": "red"}}),
    ("GET", ESTIMATE, {"params": {"model": "7B", "gpu": "x" * 500}}),
    ("GET", ESTIMATE, {"params": {"model": "meta-llama/Llama-2-7b-hf", "allocator_conf": "nonsense:1"}}),
    ("GET", "/api/v1/recommend", {"params": {"model": "meta-llama/Llama-2-7b-hf", "find": "everything"}}),
    ("GET", "/api/v1/recommend", {"params": {"model": "../x"}}),
    ("GET", "/api/v1/export/nothing", {"params": {"model": "7B"}}),
    ("GET", "/api/v1/export/fsdp2", {"params": {"model": "/etc/passwd", "strategy": "zero3"}}),
    ("GET", "/api/v1/export/fsdp2", {"params": {"model": "meta-llama/Llama-2-7b-hf", "gpus": 4, "strategy": "zero1"}}),
    ("POST", ESTIMATE, {"content": b"{"}),
    ("POST", ESTIMATE, {"content": b"[1, 2]"}),
    ("POST", ESTIMATE, {"content": '{"model": "7B"}'.encode("utf-16")}),
    ("POST", ESTIMATE, {"content": ('{"\u2278": 1, "config": ' + "[" * 9000 + "]" * 9000 + "}").encode("utf-16-le")}),
    ("POST", ESTIMATE, {"content": b'{"config": {"model_type": "llama", "\\ud800": {"hidden_size": "\\udfff"}}}'}),
    ("GET", ESTIMATE, {"params": {"model": "7B", "gpu": "1e400GiB"}}),
    ("GET", "/api/v1/recommend", {"params": {"model": "7B", "host_memory": "1e400GiB"}}),
    ("GET", "/api/v1/recommend", {"params": {"model": "7B", "tokens": "1e400"}}),
    ("GET", "/api/v1/recommend", {"params": {"model": "7B", "price": "inf", "margin": "nan"}}),
    ("POST", ESTIMATE, {"content": b"\xff\xfe"}),
    ("POST", ESTIMATE, {"content": b'{"model": "' + b"x" * 300_000 + b'"}'}),
    ("POST", ESTIMATE, {"content": b'{"config": ' + b"[" * 5000 + b"]" * 5000 + b"}"}),
    ("POST", ESTIMATE, {"content": b'{"config": ' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}"}),
    ("POST", ESTIMATE, {"json": {"config": {"model_type": "llama"}, "model": "7B"}}),
    ("POST", ESTIMATE, {"json": {"config": {"model_type": "/etc/passwd"}}}),
    ("POST", ESTIMATE, {"json": {"config": {"model_type": "llama", "hidden_size": 10**18}}}),
    ("POST", ESTIMATE, {"json": {"config": {"auto_map": {"AutoModel": "evil.Model"}, "model_type": "evil"}}}),
    ("DELETE", ESTIMATE, {}),
    ("GET", "/nothing", {}),
    ("GET", "/static/../pyproject.toml", {}),
    ("GET", "/static/%2e%2e/%2e%2e/pyproject.toml", {}),
]  # fmt: skip


@pytest.mark.parametrize(("method", "url", "sent"), BAD, ids=lambda value: str(value)[:60])
def test_every_refusal_has_the_same_shape(client: TestClient, method: str, url: str, sent: dict[str, Any]) -> None:
    got = client.request(method, url, **sent)
    assert 400 <= got.status_code < 500, got.text
    problem = got.json()
    assert set(problem) == {"error", "hint", "status"} and problem["status"] == got.status_code
    assert problem["error"] and problem["hint"]
    for described in ("Traceback", "site-packages", "fsdp_advisor/", "root:x"):
        assert described not in got.text


@pytest.mark.parametrize("url", ["/", ESTIMATE + "?model=7B", "/nothing", "/docs", "/static/page.css"])
def test_every_response_has_the_security_headers(client: TestClient, url: str) -> None:
    headers = client.get(url).headers
    policy = headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert headers["x-content-type-options"] == "nosniff" and "referrer-policy" in headers
    assert "access-control-allow-origin" not in client.get(url, headers={"Origin": "https://example.org"}).headers


def test_markup_in_a_name_is_escaped(client: TestClient) -> None:
    page = client.get("/", params={"model": "<script>alert(1)</script>"})
    assert "<script>alert(1)" not in page.text and "&lt;script&gt;" in page.text


@in_turn(1, of=2)
def test_a_thousand_requests_are_answered_or_refused_with_retry_after(client: TestClient) -> None:
    def ask(n: int) -> tuple[int, bool]:
        got = client.get(ESTIMATE, params={"model": "meta-llama/Llama-2-7b-hf", "gpus": 1 + n % 7, "strategy": "zero3"})
        return got.status_code, "retry-after" in got.headers

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(ask, range(1000)))
    assert {status for status, _ in answers} <= {200, 503}
    assert all(described for status, described in answers if status == 503)
    assert sum(status == 200 for status, _ in answers) > 0


@in_turn(2, of=3)
def test_the_server_never_imports_torch() -> None:
    code = (
        "import sys; from starlette.testclient import TestClient; from fsdp_advisor.server.app import create_app\n"
        "with TestClient(create_app()) as c:\n"
        "    assert c.get('/').status_code == 200\n"
        "    assert c.get('/api/v1/recommend?model=meta-llama/Llama-2-7b-hf&gpus=8&strategy=ddp').status_code == 200\n"
        "print([m for m in ('torch', 'transformers', 'deepspeed', 'accelerate') if m in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip().splitlines()[-1] == "[]"


def test_the_openapi_document_is_json(client: TestClient) -> None:
    assert json.loads(client.get("/openapi.json").text)["info"]["title"] == "fsdp-advisor"
