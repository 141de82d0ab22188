"""A real server as its operator meets it: log, metrics, a full queue, pasted configurations, shutdown."""

from __future__ import annotations

import json
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from matrix import in_turn, taken
from server_process import SECONDS, Serving, problem, received, serving, until

pytestmark = pytest.mark.slow

LLAMA = "meta-llama/Llama-2-7b-hf"
ESTIMATE = "/api/v1/estimate"
POST = b"POST /api/v1/estimate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
JOB = json.dumps({"model": LLAMA, "gpus": 8}).encode()
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 256}
LAYERS = [f"{kind}_attention" for kind in random.Random(1).choices(("full", "sliding"), k=1024)]
ENDLESS = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1024, "head_dim": 16,
           "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "layer_types": LAYERS}  # fmt: skip
"""Takes minutes to record: no two runs of its layers are the same."""


def in_flight(server: Serving) -> float:
    """Requests being answered, apart from the one that asks for the metrics."""
    found = re.search(r"^fsdp_advisor_requests_in_flight (\S+)$", server.get("/metrics").text, re.MULTILINE)
    assert found is not None
    return float(found[1]) - 1


def paste(server: Serving, config: dict[str, object]) -> httpx.Response:
    job = {"gpus": 2, "strategy": "zero3", "gpu": "24GiB", "micro_batch_size": 1}
    return server.post(ESTIMATE, {"config": config, **job})


# Log and metrics


@in_turn(1, of=2)
def test_every_request_is_one_log_line_without_what_was_asked(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        answers = [
            server.get(
                ESTIMATE, params={"model": LLAMA}, headers={"X-Request-ID": "abc-1", "Authorization": "Bearer secret"}
            ),
            server.get("/nothing/secret?secret=1", headers={"X-Request-ID": 'a"}', "Cookie": "secret"}),
            server.get(ESTIMATE, params={"model": "secret/secret"}),
            server.get("/healthz", headers={"X-Request-ID": "secret" * 20}),
        ]
        assert server.stop() == 0
    assert [a.status_code for a in answers] == [200, 404, 404, 200]
    assert answers[0].headers["x-request-id"] == "abc-1"
    assert all(re.fullmatch("[0-9a-f]{32}", a.headers["x-request-id"]) for a in answers[1:])
    lines = server.lines
    assert [line["request_id"] for line in lines] == [a.headers["x-request-id"] for a in answers]
    assert [(line["method"], line["route"], line["status"]) for line in lines] == [
        ("GET", ESTIMATE, 200), ("GET", "other", 404), ("GET", ESTIMATE, 404), ("GET", "/healthz", 200),
    ]  # fmt: skip
    for line in lines:
        assert set(line) == {
            "time", "level", "logger", "message", "request_id", "method", "route", "status", "milliseconds",
        }  # fmt: skip
        assert line["message"] == "request" and line["milliseconds"] >= 0
    assert "llama" not in server.log.read_text().lower() and "secret" not in server.log.read_text()


@in_turn(0, of=2)
def test_metrics_count_requests_and_kept_answers(tmp_path: Path) -> None:
    with serving(tmp_path, log_level="error") as server:
        for _ in range(3):
            assert server.get(ESTIMATE, params={"model": LLAMA}).status_code == 200
        assert server.get(ESTIMATE, params={"model": "no/such"}).status_code == 404
        head = httpx.head(server.url + ESTIMATE, params={"model": LLAMA}, trust_env=False, timeout=SECONDS)
        assert (head.status_code, head.content) == (200, b"")
        assert server.get("/x" * 50).status_code == 404
        lines = server.get("/metrics").text.splitlines()
    for line in (
        f'fsdp_advisor_requests_total{{method="GET",route="{ESTIMATE}",status="200"}} 3.0',
        f'fsdp_advisor_requests_total{{method="GET",route="{ESTIMATE}",status="404"}} 1.0',
        f'fsdp_advisor_requests_total{{method="HEAD",route="{ESTIMATE}",status="200"}} 1.0',
        'fsdp_advisor_requests_total{method="GET",route="other",status="404"} 1.0',
        'fsdp_advisor_answers_total{kept="yes"} 3.0',
        'fsdp_advisor_answers_total{kept="no"} 2.0',
        f'fsdp_advisor_request_seconds_count{{route="{ESTIMATE}"}} 5.0',
        "fsdp_advisor_requests_in_flight 1.0",
    ):
        assert line in lines, line


# Concurrency


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("server"), log_level="error") as running:
        yield running


@in_turn(1, of=2)
def test_equal_requests_at_once_are_computed_once(server: Serving) -> None:
    with ThreadPoolExecutor(8) as crowd:
        answers = list(crowd.map(lambda _: server.get(ESTIMATE, params={"model": LLAMA}).content, range(8)))
        assert len(set(answers)) == 1
        assert 'fsdp_advisor_answers_total{kept="no"} 1.0' in server.get("/metrics").text.splitlines()


@in_turn(1, of=3)
def test_health_is_answered_while_all_workers_compute(server: Serving) -> None:
    """The event loop computes nothing: a health check overtakes searches that were asked for before it."""
    with ThreadPoolExecutor(3) as crowd:
        searches = [
            crowd.submit(server.get, "/api/v1/recommend", params={"model": "gpt2", "gpus": 8, "seq_len": 1000 + n})
            for n in range(3)
        ]
        until(lambda: in_flight(server) > 1)
        assert server.get("/healthz").status_code == 200
        assert not all(search.done() for search in searches)
        assert [search.result().status_code for search in searches] == [200] * 3


@in_turn(2, of=3)
@pytest.mark.parametrize("root_path", taken(["/advisor"], [""]))
def test_a_full_queue_is_refused_with_retry_after(tmp_path: Path, root_path: str) -> None:
    options = {"max_waiting": 1, "log_level": "error", "root_path": root_path}
    with serving(tmp_path, **options) as server, ThreadPoolExecutor(12) as crowd:
        asked = [
            crowd.submit(server.get, "/api/v1/recommend", params={"model": "gpt2", "gpus": 8, "seq_len": 1000 + n})
            for n in range(12)
        ]
        for path in ("/healthz", "/readyz", "/metrics"):
            assert server.get(path).status_code == 200
        answers = [search.result() for search in asked]
    refused = [answer for answer in answers if answer.status_code == 503]
    assert refused and {answer.status_code for answer in answers} == {200, 503}
    for answer in refused:
        assert int(answer.headers["retry-after"]) > 0
        assert problem(b"HTTP/1.1 503\r\n\r\n" + answer.content)["error"] == "1 requests are waiting already"


# Pasted configurations


@in_turn(3, of=4)
def test_pasted_configurations_are_recorded_in_a_process_of_their_own(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with serving(tmp_path, log_level="warning") as server:
        until(lambda: len(server.children) == 1)
        (worker,) = server.children
        assert paste(server, GPT2).status_code == 200
        (recorder,) = [child for child in server.children if child != worker]
        loaded = {process: Path(f"/proc/{process.pid}/maps") for process in (worker, recorder)}
        if loaded[worker].exists():
            assert "libtorch" not in loaded[worker].read_text() and "libtorch" in loaded[recorder].read_text()
        assert paste(server, GPT2).content == paste(server, GPT2).content
        assert server.stop() == 0
    assert server.lines == []


@in_turn(1, of=2)
def test_a_recording_that_takes_too_long_is_ended_and_the_queue_is_bounded(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with serving(tmp_path, log_level="warning", record_queue=0, record_seconds=8) as server:
        with ThreadPoolExecutor(1) as other:
            endless = other.submit(paste, server, ENDLESS)
            until(lambda: in_flight(server) == 1)
            full = paste(server, GPT2)
            assert full.status_code == 503 and "retry-after" in full.headers
            assert server.get(ESTIMATE, params={"model": LLAMA}).status_code == 200
            ended = endless.result()
        assert ended.status_code == 503 and "retry-after" in ended.headers
        assert problem(b"HTTP/1.1 503\r\n\r\n" + ended.content)["error"] == "the computation took longer than 8 s"
        assert server.stop() == 0
    assert [line["message"] for line in server.lines] == ["worker process ended"]


# Shutdown


@in_turn(0, of=4)  # on odd days tests/cli/test_serve.py does this
def test_a_request_under_way_is_answered_and_no_other_accepted(tmp_path: Path) -> None:
    with serving(tmp_path, log_level="error", graceful_seconds=SECONDS) as server, server.connect() as slow:
        slow.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(JOB) + JOB[:5])
        until(lambda: in_flight(server) == 1)
        children = server.children
        server.process.send_signal(signal.SIGTERM)
        until(lambda: refuses_connections(server))
        assert server.process.poll() is None
        slow.sendall(JOB[5:])
        assert received(slow).startswith(b"HTTP/1.1 200 ")
        assert server.process.wait(timeout=SECONDS) == 0
        assert not psutil.wait_procs(children, timeout=SECONDS)[1]


def refuses_connections(server: Serving) -> bool:
    try:
        server.connect().close()
    except OSError:
        return True
    return False


@in_turn(0, of=3)
def test_shutdown_does_not_wait_longer_than_allowed(tmp_path: Path) -> None:
    limits = {"receive_seconds": 2 * SECONDS, "graceful_seconds": 1, "log_level": "error"}
    with serving(tmp_path, **limits) as server, server.connect() as stuck:
        stuck.sendall(POST + b"Content-Length: 9\r\n\r\n")
        until(lambda: in_flight(server) == 1)
        assert server.stop() == 0


@in_turn(1, of=3)
def test_shutdown_ends_a_computation_under_way(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with serving(tmp_path, graceful_seconds=1, log_level="error") as server:

        def ask() -> None:
            with suppress(httpx.HTTPError):
                paste(server, ENDLESS)

        asking = threading.Thread(target=ask)
        asking.start()
        until(lambda: len(server.children) == 2)
        time.sleep(1)
        children, begun = server.children, time.monotonic()
        assert server.stop() == 0
        assert not psutil.wait_procs(children, timeout=SECONDS)[1]
        assert time.monotonic() - begun < SECONDS / 2
        asking.join()


@in_turn(2, of=3)
def test_workers_end_with_a_server_that_is_killed(tmp_path: Path) -> None:
    with serving(tmp_path, workers=2, log_level="error") as server:
        assert server.get(ESTIMATE, params={"model": LLAMA}).status_code == 200
        children = server.children
        assert len(children) == 2
        server.process.kill()
        assert not psutil.wait_procs(children, timeout=SECONDS)[1]
