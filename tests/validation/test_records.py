"""Records: errors, identity, and files that survive crashes and full disks. Reading of failures."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from fsdp_advisor.errors import UsageError
from fsdp_advisor.validation.failures import (
    describe_exit,
    is_host_out_of_memory,
    is_lost_connection,
    is_out_of_memory,
    read_out_of_memory,
)
from fsdp_advisor.validation.records import Record, append, case_key, check_writable, read
from fsdp_advisor.validation.run_result import RunResult

REQUEST: dict[str, Any] = {
    "model": "m",
    "gpus": 8,
    "gpu": "H100-80GB",
    "strategy": "zero3",
    "backend": "fsdp2",
    "precision": "bf16",
    "micro_batch_size": 1,
    "seq_len": 8,
}


def record(**changes: Any) -> Record:
    values = {
        "request": REQUEST,
        "mode": "simulate",
        "device": "cpu",
        "outcome": "ok",
        "measured": {"peak_tensor_bytes": 1000, "phase_peaks": {"forward": 800, "backward": 1000}, "step_seconds": 2.0},
        "predicted": {
            "peak_tensor_bytes": 990,
            "phase_peaks": {"forward": 800, "backward": 1010},
            "peak_allocated_bytes": None,
        },
    }
    return Record(**{**values, **changes})


def test_errors_are_signed_and_need_both_sides() -> None:
    assert record().errors == pytest.approx(
        {"peak_tensor_bytes": -0.01, "phase_peaks.forward": 0.0, "phase_peaks.backward": 0.01}
    )
    assert record(measured={}).errors == {}


def test_written_records_are_read_back(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    written = [record(), record(outcome="oom", detail={"asked_bytes": 5}, fits_really=False)]
    for one in written:
        append(path, one)
    assert read(path) == (written, [])
    assert json.loads(path.read_text().splitlines()[0])["errors"]["peak_tensor_bytes"] == -0.01


def test_a_record_of_the_first_schema_is_read_under_todays_names() -> None:
    now = record(measured={"peak_reserved_bytes": 5, "snapshot": {"segments": 3, "equal_segments": 2}})
    first = now.as_dict() | {"schema_version": 1, "rung": "simulate"}
    del first["mode"]
    first["measured"] = {"peak_reserved_bytes": 5, "snapshot": {"segments": 3, "alike": 2}}
    assert Record.from_dict(first) == now


def test_incomplete_last_line_is_skipped_and_ended_by_the_next_record(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    append(path, record())
    whole = path.read_text()
    path.write_text(whole + whole[:40])
    records, notes = read(path)
    assert len(records) == 1 and len(notes) == 1 and "incomplete" in notes[0]
    append(path, record(outcome="oom"))
    records, notes = read(path)
    assert [r.outcome for r in records] == ["ok", "oom"] and "line 2" in notes[0]


@pytest.mark.parametrize(
    "line", ["[]", "null", "{}", '{"request":3}', "\x00\xff", '{"request":{},"mode":"simulate","outcome":"ok"}']
)
def test_line_that_is_not_a_record_is_skipped(tmp_path: Path, line: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(line + "\n")
    append(path, record())
    records, notes = read(path)
    assert len(records) == 1 and len(notes) == 1 and "line 1" in notes[0]


def test_full_disk_leaves_earlier_records_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.jsonl"
    append(path, record())
    before = path.read_bytes()
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:100]))  # as on a nearly full disk
    with pytest.raises(UsageError, match="No space left"):
        append(path, record())
    assert path.read_bytes() == before

    def refuse(handle: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(UsageError, match="No space left"):
        append(path, record())
    assert path.read_bytes() == before and len(read(path)[0]) == 1


def test_unusable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        read(tmp_path / "none.jsonl")
    with pytest.raises(UsageError, match="cannot write"):
        append(tmp_path / "no" / "such.jsonl", record())


def test_identity_of_a_case_ignores_the_gpu() -> None:
    assert case_key(REQUEST, "stand-in", "cuda") == case_key({**REQUEST, "gpu": None}, "stand-in", "cuda:0")
    assert case_key(REQUEST, "stand-in", "cuda") != case_key({**REQUEST, "seq_len": 9}, "stand-in", "cuda")
    assert case_key(REQUEST, "stand-in", "cuda") != case_key(REQUEST, "measure", "cuda")


def test_sizes_in_out_of_memory_messages_are_read() -> None:
    message = (
        "CUDA out of memory. Tried to allocate 7.83 GiB. GPU 0 has a total capacity of 79.11 GiB of which 890.19 MiB is "
        "free. Process 17 has 78.22 GiB memory in use. Of the allocated memory 75.02 GiB is allocated by PyTorch, and "
        "2.41 GiB is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting ..."
    )
    found = read_out_of_memory(message)
    assert found["asked_bytes"] == round(7.83 * 2**30) and found["free_bytes"] == round(890.19 * 2**20)
    assert {*found} == {"asked_bytes", "total_bytes", "free_bytes", "allocated_bytes", "unallocated_bytes"}
    assert read_out_of_memory("Tried to allocate 20 bytes") == {"asked_bytes": 20}
    cpu = RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes. Error code 12")
    assert is_out_of_memory(cpu) and read_out_of_memory(str(cpu)) == {"asked_bytes": 4096}
    assert is_out_of_memory(MemoryError()) and not is_out_of_memory(RuntimeError("shape"))
    assert read_out_of_memory("shape mismatch") == {}
    assert "host" in describe_exit(-9) and describe_exit(-15) == "killed by SIGTERM"


@pytest.mark.parametrize(
    "said",
    [
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "NCCL error: unhandled cuda error. Last error: Cuda failure 2 'out of memory'",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    ],
)
def test_out_of_memory_of_cuda_libraries_is_recognized(said: str) -> None:
    assert is_out_of_memory(RuntimeError(said)) and not is_host_out_of_memory(RuntimeError(said))
    assert RunResult.of_exception(RuntimeError(said)).detail == {"memory": "gpu"}


def test_host_out_of_memory_reports_free_memory() -> None:
    said = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12"
    detail = RunResult.of_exception(RuntimeError(said)).detail
    assert detail["memory"] == "host" and detail["asked_bytes"] == 4096 and detail["free_bytes"] > 0
    assert RunResult.of_exception(MemoryError()).outcome == "oom"


def test_lost_connections_are_recognized() -> None:
    assert is_lost_connection(
        RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:55012.")
    )
    assert is_lost_connection(RuntimeError("ncclRemoteError: A call failed possibly due to a network error"))
    assert not is_lost_connection(RuntimeError("shape mismatch")) and not is_lost_connection(
        ConnectionResetError("reset by peer")
    )


def test_unwritable_records_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "r.jsonl"):
        with pytest.raises(UsageError, match="cannot write") as caught:
            check_writable(path)
        assert "--records" in caught.value.hint
    check_writable(tmp_path / "r.jsonl")
    assert not (tmp_path / "r.jsonl").exists()
