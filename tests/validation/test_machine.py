"""Counting GPUs and reading versions, with torch.cuda replaced."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import metadata

import pytest

from fsdp_advisor.errors import MeasurementError
from fsdp_advisor.validation import machine

torch = pytest.importorskip("torch")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    machine.gpu_count.cache_clear()
    yield monkeypatch
    machine.gpu_count.cache_clear()


def test_gpus_are_counted_in_a_child_process(cuda: pytest.MonkeyPatch) -> None:
    """If NVML does not answer, torch initializes CUDA, after which forked children cannot use it."""
    cuda.setattr(torch.cuda, "device_count", os.getpid)
    assert machine.gpu_count() not in (0, os.getpid())


def test_process_that_uses_cuda_counts_gpus_itself(cuda: pytest.MonkeyPatch) -> None:
    cuda.setattr(torch.cuda, "is_initialized", lambda: True)
    cuda.setattr(torch.cuda, "device_count", os.getpid)
    assert machine.gpu_count() == os.getpid()


def test_failing_driver_is_a_one_line_error(cuda: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise RuntimeError("CUDA unknown error")

    cuda.setattr(torch.cuda, "device_count", fails)
    with pytest.raises(MeasurementError, match=r"could not be counted: RuntimeError: CUDA unknown error"):
        machine.gpu_count()


def test_versions_leave_out_deepspeed_if_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    there = metadata.version

    def version(name: str) -> str:
        if name == "deepspeed":
            raise metadata.PackageNotFoundError(name)
        return there(name)

    monkeypatch.setattr(metadata, "version", version)
    found = machine.versions(deepspeed=True)
    assert "deepspeed" not in found and {"python", "torch", "transformers"} <= found.keys()
