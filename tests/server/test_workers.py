"""Worker processes: results, errors, limits of time, memory and waiting calls."""

from __future__ import annotations

import asyncio
import gc
import operator
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest

from fsdp_advisor.errors import UnknownModel
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.server.answers import ModelSource, answer, recommend_document
from fsdp_advisor.server.errors import ServerBusy
from fsdp_advisor.server.workers import Worker, WorkerPool, environment

pytestmark = pytest.mark.slow

LONG = 600.0
"""A time limit in seconds that no test reaches, also on a busy machine."""


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    """A worker for all tests of this module, because its process takes two seconds to start."""
    made = Worker(seconds=LONG, memory_bytes=None)
    yield made
    made.close()


def test_calls_run_in_one_other_process(worker: Worker) -> None:
    first = worker.call(os.getpid)
    assert first != os.getpid() and worker.call(os.getpid) == first


def test_advisor_errors_are_raised_here(worker: Worker) -> None:
    with pytest.raises(UnknownModel) as raised:
        worker.call(resolve, "/no/such/model")
    assert "/no/such/model" in raised.value.message and raised.value.hint


def test_other_exceptions_carry_their_traceback(worker: Worker) -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        worker.call(operator.truediv, 1, 0)
    assert worker.call(operator.add, 1, 2) == 3


def test_results_that_cannot_be_pickled_are_reported(worker: Worker) -> None:
    with pytest.raises(RuntimeError, match="cannot pickle"):
        worker.call(threading.Lock)
    assert worker.call(operator.add, 1, 2) == 3


def test_prints_of_libraries_do_not_disturb_the_results(worker: Worker) -> None:
    assert worker.call(print, "noise", "\n") is None
    assert worker.call(operator.add, 1, 2) == 3


def test_collects_garbage_more_rarely_than_python_by_default(worker: Worker) -> None:
    assert worker.call(gc.get_threshold)[0] >= 10_000  # Python: 700 to 2,000


def test_a_process_that_dies_is_replaced(worker: Worker) -> None:
    first = worker.call(os.getpid)
    with pytest.raises(ServerBusy, match="ended early"):
        worker.call(os.abort)
    assert worker.call(os.getpid) != first


def test_a_call_that_takes_too_long_is_ended() -> None:
    worker = Worker(seconds=0.5, memory_bytes=None)
    process = psutil.Process(worker.ensure_started().pid)
    begun = time.monotonic()
    with pytest.raises(ServerBusy, match=r"took longer than 0\.5 s"):
        worker.call(time.sleep, LONG)
    assert time.monotonic() - begun < LONG / 2
    assert not process.is_running()


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce RLIMIT_DATA")
def test_a_call_beyond_the_memory_limit_fails_and_the_worker_stays() -> None:
    worker = Worker(seconds=LONG, memory_bytes=2**30)
    with pytest.raises(RuntimeError, match="MemoryError"):
        worker.call(bytes, 2**31)
    assert worker.call(operator.add, 1, 2) == 3
    worker.close()


def test_a_full_queue_refuses_further_calls() -> None:
    pool = WorkerPool(1, max_waiting=2, seconds=LONG)

    async def crowd() -> None:
        calls = [asyncio.ensure_future(pool.run(time.sleep, LONG)) for _ in range(3)]
        await asyncio.sleep(0)
        with pytest.raises(ServerBusy, match="2 requests are waiting already"):
            await calls[2]
        pool.close()
        await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(crowd())


def test_answers_about_catalogued_models_import_no_torch(worker: Worker) -> None:
    llama = "meta-llama/Llama-2-7b-hf"
    worker.call(answer, ModelSource(llama), recommend_document, RecommendRequest(model=llama, gpus=8), False)
    loaded = worker.call(eval, "list(__import__('sys').modules)")
    assert "fsdp_advisor" in loaded and not {"torch", "transformers", "deepspeed", "accelerate"} & set(loaded)


def test_workers_do_not_see_the_servers_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert "secret" not in environment().values()


def test_a_worker_ends_with_its_parent_during_a_call() -> None:
    process = Worker(seconds=LONG, memory_bytes=None).ensure_started()
    assert process.stdin is not None
    pickle.dump(pickle.dumps((time.sleep, (LONG,))), process.stdin)
    process.stdin.close()  # as when the server is killed
    assert process.wait(timeout=LONG / 2) == 0
