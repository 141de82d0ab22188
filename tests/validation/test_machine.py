"""What this machine has, asked without a GPU: torch is told what to say."""

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


def test_gpus_are_counted_in_a_process_of_its_own(cuda: pytest.MonkeyPatch) -> None:
    """Where NVML does not answer torch asks CUDA, after which a process's forked workers cannot use it."""
    cuda.setattr(torch.cuda, "device_count", os.getpid)
    assert machine.gpu_count() not in (0, os.getpid())


def test_a_process_that_uses_cuda_counts_itself(cuda: pytest.MonkeyPatch) -> None:
    cuda.setattr(torch.cuda, "is_initialized", lambda: True)
    cuda.setattr(torch.cuda, "device_count", os.getpid)
    assert machine.gpu_count() == os.getpid()


def test_a_driver_that_fails_is_told_in_one_line(cuda: pytest.MonkeyPatch) -> None:
    def fails() -> int:
        raise RuntimeError("CUDA unknown error")

    cuda.setattr(torch.cuda, "device_count", fails)
    with pytest.raises(MeasurementError, match=r"could not be counted: RuntimeError: CUDA unknown error"):
        machine.gpu_count()


def test_versions_without_deepspeed_are_those_of_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it is not installed the rung says so, in a line of its own."""
    there = metadata.version

    def version(name: str) -> str:
        if name == "deepspeed":
            raise metadata.PackageNotFoundError(name)
        return there(name)

    monkeypatch.setattr(metadata, "version", version)
    found = machine.versions(deepspeed=True)
    assert "deepspeed" not in found and {"python", "torch", "transformers"} <= found.keys()
