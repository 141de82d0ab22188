"""A real server as its operator meets it: log, metrics, full queues, pasted configurations, several workers, its end."""

from __future__ import annotations

import json
import random
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from server_process import Serving, problem, received, serving, until

LLAMA = "meta-llama/Llama-2-7b-hf"
ESTIMATE = "/api/v1/estimate"
POST = b"POST /api/v1/estimate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
JOB = json.dumps({"model": LLAMA, "gpus": 8}).encode()
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 256}
LAYERS = [f"{kind}_attention" for kind in random.Random(1).choices(("full", "sliding"), k=1024)]
ENDLESS = {"model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1024, "head_dim": 16,
           "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64, "layer_types": LAYERS}  # fmt: skip
"""Within every bound but that of time: no two stretches of its layers are alike."""


def _in_flight(server: Serving) -> float:
    return sum(
        map(float, re.findall(r"^fsdp_advisor_requests_in_flight(?:{.*})? (\S+)$", server.get("/metrics").text, re.M))
    )


# Log and metrics


def test_every_request_is_one_line_of_json_without_what_was_asked(tmp_path: Path) -> None:
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


def test_metrics_count_what_was_asked(tmp_path: Path) -> None:
    with serving(tmp_path, log_level="error") as server:
        for _ in range(3):
            assert server.get(ESTIMATE, params={"model": LLAMA}).status_code == 200
        assert server.get(ESTIMATE, params={"model": "no/such"}).status_code == 404
        assert httpx.head(server.url + ESTIMATE, params={"model": LLAMA}, trust_env=False).content == b""
        assert server.get("/x" * 50).status_code == 404
        lines = server.get("/metrics").text.splitlines()
    for line in (
        f'fsdp_advisor_requests_total{{method="GET",route="{ESTIMATE}",status="200"}} 3.0',
        f'fsdp_advisor_requests_total{{method="GET",route="{ESTIMATE}",status="404"}} 1.0',
        f'fsdp_advisor_requests_total{{method="HEAD",route="{ESTIMATE}",status="200"}} 1.0',
        'fsdp_advisor_requests_total{method="GET",route="other",status="404"} 1.0',
        'fsdp_advisor_answers_total{kept="yes"} 3.0',
        f'fsdp_advisor_request_seconds_count{{route="{ESTIMATE}"}} 5.0',
        "fsdp_advisor_requests_in_flight 0.0",
    ):
        assert line in lines, line


# Full


@pytest.mark.parametrize("root_path", ["", "/advisor"])
def test_a_full_server_says_when_to_come_again_and_tells_its_health(tmp_path: Path, root_path: str) -> None:
    with serving(tmp_path, max_in_flight=1, log_level="error", root_path=root_path) as server, server.connect() as slow:
        slow.sendall(POST + b"Content-Length: 9\r\n\r\n")
        until(lambda: server.get("/").status_code == 503)
        refused = server.get(ESTIMATE, params={"model": LLAMA})
        assert int(refused.headers["retry-after"]) > 0 and problem(b"HTTP/1.1 503\r\n\r\n" + refused.content)
        for path in ("/healthz", "/readyz", "/metrics"):
            assert server.get(path).status_code == 200
        assert _in_flight(server) == 1


def test_a_crowd_of_searches_is_bounded_and_does_not_hold_up_an_estimate(tmp_path: Path) -> None:
    with serving(tmp_path, max_slow=3, log_level="error") as server, ThreadPoolExecutor(12) as crowd:
        asked = [
            crowd.submit(server.get, "/api/v1/recommend", params={"model": LLAMA, "gpus": 8, "seq_len": 1000 + n})
            for n in range(12)
        ]
        until(lambda: any(search.done() for search in asked))  # those that are refused
        assert server.get(ESTIMATE, params={"model": LLAMA, "gpus": 4, "strategy": "zero3"}).status_code == 200
        answers = [search.result() for search in asked]
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 503} and statuses.count(200) >= 3
    assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 503)


# Pasted configurations


def test_pasted_configurations_are_recorded_apart_and_one_that_is_too_much_is_ended(tmp_path: Path) -> None:
    def paste(config: dict[str, object]) -> httpx.Response:
        body = {"config": config, "gpus": 2, "strategy": "zero3", "gpu": "24GiB", "micro_batch_size": 1}
        return httpx.post(server.url + ESTIMATE, json=body, trust_env=False, timeout=120)

    with serving(tmp_path, log_level="warning", record_queue=0, record_seconds=8) as server:
        assert server.children == []
        with ThreadPoolExecutor(1) as other:
            first = other.submit(paste, GPT2)
            until(lambda: len(server.children) == 1)
            full = paste({**GPT2, "n_layer": 2})
            assert full.status_code == 503 and "retry-after" in full.headers
            assert (
                problem(b"HTTP/1.1 503\r\n\r\n" + full.content)["error"]
                == "too many configurations wait to be recorded"
            )
            assert server.get(ESTIMATE, params={"model": LLAMA}).status_code == 200  # meanwhile
            assert first.result().status_code == 200, first.result().text
        (recorder,) = server.children
        assert paste({**GPT2, "n_layer": 2}).status_code == 200  # the queue being full was not remembered
        own = Path(f"/proc/{server.process.pid}/maps")
        if own.exists():  # what is loaded, not what a list of modules says
            assert "libtorch" not in own.read_text() and "libtorch" in Path(f"/proc/{recorder.pid}/maps").read_text()
        ended = paste(ENDLESS)
        assert ended.status_code in (422, 503), ended.text  # 503 where this machine was busy
        assert problem(f"HTTP/1.1 {ended.status_code}\r\n\r\n".encode() + ended.content)
        assert not recorder.is_running() and server.children == []
        assert paste(GPT2).status_code == 200  # it is remembered
        assert server.get("/healthz").status_code == 200
        assert server.stop() == 0
    assert [line["message"] for line in server.lines] == ["recorder process ended"]


# Several workers


def test_workers_share_the_door_and_the_figures_and_one_that_dies_is_replaced(tmp_path: Path) -> None:
    with serving(tmp_path, workers=2) as server:
        until(lambda: len([c for c in server.children if "spawn_main" in " ".join(c.cmdline())]) == 2)
        asked = [f"request-{n}" for n in range(40)]
        with ThreadPoolExecutor(8) as crowd:
            given = [
                crowd.submit(
                    server.get,
                    ESTIMATE,
                    params={"model": LLAMA, "seq_len": 512 + n % 7},
                    headers={"X-Request-ID": name},
                )
                for n, name in enumerate(asked)
            ]
        answers = [one.result() for one in given]
        for n, (name, answer) in enumerate(zip(asked, answers, strict=True)):
            assert answer.status_code == 200 and answer.headers["x-request-id"] == name
            assert answer.json()["request"]["seq_len"] == 512 + n % 7
            assert answer.headers["etag"] == answers[n % 7].headers["etag"]  # whoever made it
        counted = f'fsdp_advisor_requests_total{{method="GET",route="{ESTIMATE}",status="200"}} 40.0'
        assert counted in server.get("/metrics").text.splitlines()
        workers = [c for c in server.children if "spawn_main" in " ".join(c.cmdline())]
        workers[0].kill()
        assert server.get(ESTIMATE, params={"model": LLAMA}).status_code == 200
        until(
            lambda: len([c for c in server.children if c.is_running() and c.pid not in [w.pid for w in workers]]) >= 1
        )
        children = server.children
        assert server.stop() == 0
        assert not psutil.wait_procs(children, timeout=10)[1]
    assert sorted(
        line["request_id"] for line in server.lines if line.get("request_id", "").startswith("request-")
    ) == sorted(asked)


# The end


@pytest.mark.parametrize("workers", [1, 2])
def test_a_request_under_way_is_answered_and_no_other_taken(tmp_path: Path, workers: int) -> None:
    with serving(tmp_path, log_level="error", workers=workers) as server, server.connect() as slow:
        slow.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(JOB) + JOB[:5])
        until(lambda: _in_flight(server) == 1)
        children = server.children
        server.process.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert server.process.poll() is None
        slow.sendall(JOB[5:])
        assert received(slow).startswith(b"HTTP/1.1 200 ")
        assert server.process.wait(timeout=20) == 0
        assert not psutil.wait_procs(children, timeout=10)[1]
        with pytest.raises(OSError):
            server.connect().close()


@pytest.mark.parametrize("workers", [1, 2])
def test_the_end_does_not_wait_for_ever(tmp_path: Path, workers: int) -> None:
    bounds = {"receive_seconds": 60, "graceful_seconds": 1, "workers": workers, "log_level": "error"}
    with serving(tmp_path, **bounds) as server, server.connect() as stuck:
        stuck.sendall(POST + b"Content-Length: 9\r\n\r\n")
        until(lambda: _in_flight(server) == 1)
        since = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - since < 15
