"""Recording apart: the process's bounds, and what is remembered of one that did not end well. Stand-ins do its part."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest

from fsdp_advisor.errors import AdvisorError, NotRecordable, UnreadableConfig
from fsdp_advisor.server import recordings
from fsdp_advisor.server.errors import ServerBusy
from fsdp_advisor.server.observation import Metrics
from fsdp_advisor.server.recordings import RecorderBroken, Recordings
from fsdp_advisor.server.settings import Settings

CONFIG = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "n_positions": 256}
READY = "import os, signal, sys, time; print('{\"bytes\": 0}', flush=True); sys.stdin.readline();"


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


def _asked(recorder: Recordings, config: object = CONFIG) -> AdvisorError:
    """What becomes of a configuration; no stand-in records one."""

    async def ask() -> None:
        await recorder.resolved(json.dumps(config).encode(), "it", "config", {"any"})

    with pytest.raises(AdvisorError) as raised:
        asyncio.run(ask())
    return raised.value


def _outcomes(metrics: Metrics) -> dict[str, float]:
    counted = next(iter(metrics.recordings.collect())).samples
    return {s.labels["outcome"]: s.value for s in counted if s.name.endswith("_total")}


def _recordings(monkeypatch: pytest.MonkeyPatch, metrics: Metrics, stand_in: str, **settings: float) -> Recordings:
    monkeypatch.setattr(recordings, "PROCESS", (sys.executable, "-c", stand_in))
    return Recordings(Settings(**{"record_seconds": 0.6, **settings}), metrics)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "does", ["time.sleep(60)", "os.kill(os.getpid(), signal.SIGKILL)"], ids=["waits", "is killed by the kernel"]
)
def test_what_the_machine_had_no_room_for_is_not_remembered(
    monkeypatch: pytest.MonkeyPatch, metrics: Metrics, does: str
) -> None:
    recorder = _recordings(monkeypatch, metrics, READY + does)
    for _ in range(2):
        assert isinstance(found := _asked(recorder), ServerBusy) and found.http_status == 503
    assert _outcomes(metrics) == {"busy": 2.0}


@pytest.mark.parametrize(
    ("does", "why"),
    [
        ("exec('while True: pass')", "took longer than 0.6 s"),
        ("os.abort()", "took more memory or time than it may"),
        ("print('nonsense', flush=True); time.sleep(60)", "took more memory or time than it may"),
        ("print('{\"bytes\": 99999999999}', flush=True); time.sleep(60)", "took more memory or time than it may"),
    ],
    ids=["works without end", "ends", "answers nonsense", "answers too much"],
)
def test_a_configuration_that_is_too_much_is_refused_and_remembered(
    monkeypatch: pytest.MonkeyPatch, metrics: Metrics, does: str, why: str
) -> None:
    monkeypatch.setattr(recordings, "BUSY", 0.01)  # this machine may be busy indeed
    recorder = _recordings(monkeypatch, metrics, READY + does)
    for _ in range(2):
        assert (
            isinstance(found := _asked(recorder), NotRecordable) and why in found.message and found.http_status == 422
        )
    assert _outcomes(metrics) == {"refused": 1.0}


@pytest.mark.parametrize("stand_in", ["", 'print(\'{"bytes": 0, "failed": "no torch"}\')'], ids=["dies", "says so"])
def test_a_process_that_does_not_start_is_the_operators_matter(
    monkeypatch: pytest.MonkeyPatch, metrics: Metrics, stand_in: str
) -> None:
    recorder = _recordings(monkeypatch, metrics, stand_in)
    for _ in range(2):
        found = _asked(recorder)
        assert isinstance(found, RecorderBroken) and found.http_status == 503 and "torch" not in str(found)


def test_a_queue_that_is_full_is_said_and_not_remembered(monkeypatch: pytest.MonkeyPatch, metrics: Metrics) -> None:
    recorder = _recordings(monkeypatch, metrics, READY + "time.sleep(60)", record_seconds=30, record_queue=1)

    async def crowd() -> list[BaseException | None]:
        several = [json.dumps({**CONFIG, "n_layer": n}).encode() for n in (1, 2, 3)]
        asked = [asyncio.create_task(recorder.resolved(data, "it", "config", {"any"})) for data in several]
        done, waiting = await asyncio.wait(asked, timeout=1)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        assert asked[2] in done and len(waiting) == 2
        return [asked[2].exception()]

    (refused,) = asyncio.run(crowd())
    assert isinstance(refused, ServerBusy) and not recorder._known and not recorder._waiting


@pytest.mark.parametrize(
    "value", ["/etc/passwd", "~/model", "../x", "C:\\model", "file:x", "https://example.org/x", "a/../../b"]
)
def test_no_path_stands_anywhere_in_a_configuration(
    monkeypatch: pytest.MonkeyPatch, metrics: Metrics, value: str
) -> None:
    recorder = _recordings(monkeypatch, metrics, "")
    for config in ({**CONFIG, "backbone": value}, {**CONFIG, "parts": [{"weights": value}]}):
        found = _asked(recorder, config)
        assert isinstance(found, UnreadableConfig) and "is a path or an address" in found.message
    assert isinstance(_asked(recorder, {**CONFIG, "_name_or_path": value}), RecorderBroken)  # it is a label


BOUNDED = """
import os, socket, subprocess, sys
from fsdp_advisor.server import recorder_process
recorder_process._bound(2**30)
recorder_process._confine()
for what in (
    lambda: bytearray(2**31), lambda: open('/etc/passwd'), lambda: open(os.environ['MINE']), lambda: open(os.environ['MINE'], 'w'),
    lambda: socket.create_connection(('127.0.0.1', 9)), lambda: subprocess.run(['true']), lambda: os.system('true'),
    lambda: os.fork(), lambda: os.remove(os.environ['MINE']),
):
    try:
        what()
    except (MemoryError, PermissionError) as error:
        print(type(error).__name__)
    else:
        print('done')
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the bounds are Linux'")
def test_the_process_keeps_its_bounds(tmp_path: Path) -> None:
    mine = tmp_path / "file"
    mine.write_text("secret")
    environment = {**recordings._environment(), "MINE": str(mine)}
    ran = subprocess.run([sys.executable, "-c", BOUNDED], capture_output=True, text=True, env=environment, cwd="/")
    assert ran.stdout.split() == ["MemoryError"] + ["PermissionError"] * 8, ran.stderr
    assert mine.read_text() == "secret"


def test_nothing_secret_is_handed_to_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert "secret" not in recordings._environment().values()
