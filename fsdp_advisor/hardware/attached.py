"""Detect the GPU of this machine through NVML, without torch and without a CUDA context."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any

from fsdp_advisor.hardware.gpu import Gpu
from fsdp_advisor.hardware.lookup import lookup

_SOURCE = "NVML on this machine, total less what the driver reserves"
DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")  # the last one is for WSL
"""On Linux, one of these files exists if an NVIDIA driver is loaded."""


def attached_gpu() -> Gpu | None:
    """The first GPU that CUDA would use on this machine, with its actual memory; None if there is none.

    A GPU that is not in the table, or a MIG slice, has the driver's name and no rates. AMD GPUs are not detected, because
    they have no NVML. Needs the `pynvml` module of nvidia-ml-py and returns None without it. Never raises.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = None if visible is None else visible.split(",")[0].strip()
    if first in ("", "-1", "NoDevFiles") or not _driver_present():
        return None
    try:
        with _nvml() as nvml:
            return _describe(nvml, _handle(nvml, first))
    except Exception:
        return None


def _driver_present() -> bool:
    """Whether an NVIDIA driver may be present, so that importing pynvml (10 ms) is worthwhile.

    True on every system but Linux, because the driver's files are not known there.
    """
    return (
        "pynvml" in sys.modules
        or not sys.platform.startswith("linux")
        or any(os.path.exists(path) for path in DRIVER_FILES)  # noqa: PTH110  # importing pathlib would take longer than the look-up
    )


@contextmanager
def _nvml() -> Iterator[Any]:
    nvml = import_module("pynvml")
    nvml.nvmlInit()
    try:
        yield nvml
    finally:
        nvml.nvmlShutdown()


def _handle(nvml: Any, first: str | None) -> Any:
    """The NVML handle of the first entry of CUDA_VISIBLE_DEVICES: an index, or the UUID of a GPU or of a MIG slice."""
    if first is not None and not first.isdecimal():
        return nvml.nvmlDeviceGetHandleByUUID(first)
    device = nvml.nvmlDeviceGetHandleByIndex(int(first or 0))
    try:
        in_slices = nvml.nvmlDeviceGetMigMode(device)[0] == 1
    except Exception:
        in_slices = False
    return nvml.nvmlDeviceGetMigDeviceHandleByIndex(device, 0) if in_slices else device


def _describe(nvml: Any, device: Any) -> Gpu | None:
    """The table's row with the memory that NVML reports; a GPU without rates if the table does not contain it."""
    name = nvml.nvmlDeviceGetName(device)
    if isinstance(name, bytes):  # pynvml before 11.5
        name = name.decode()
    gpu = lookup(name)
    memory_bytes = _memory_bytes(nvml, device)
    if memory_bytes is None:
        return gpu
    if gpu is not None:
        return replace(gpu, memory_bytes=memory_bytes, memory_source=_SOURCE)
    return Gpu(
        name=name,
        full_name=name,
        memory_bytes=memory_bytes,
        nominal_memory_bytes=memory_bytes,
        memory_source=_SOURCE,
        source="not in the table: only its memory is known",
    )


def _memory_bytes(nvml: Any, device: Any) -> int | None:
    """The total memory that CUDA reports, in bytes; None if NVML does not report it.

    NVML's own total includes about 500 MiB that the driver reserves.
    """
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(device, version=nvml.nvmlMemory_v2)
        usable = int(memory.total) - int(memory.reserved)
    except Exception:
        try:
            usable = int(nvml.nvmlDeviceGetMemoryInfo(device).total)
        except Exception:
            return None
    return usable if usable > 0 else None
