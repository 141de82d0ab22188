"""This machine's GPUs, driver and versions. Only `gpu_here` makes a CUDA context in this process."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import platform
import re
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

from fsdp_advisor.errors import MeasurementError, MissingExtra
from fsdp_advisor.hardware import Gpu
from fsdp_advisor.hardware.lookup import lookup
from fsdp_advisor.memory.allocator import AllocatorConf
from fsdp_advisor.validation.child_process import run_in_child

_MEMORY_SOURCE = "torch.cuda.get_device_properties on this machine"
_COUNT_SECONDS = 120
"""Initializing the driver with many GPUs takes long."""
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def require_torch() -> None:
    """Raises MissingExtra if torch or transformers is not installed."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise MissingExtra(f"validation runs the model, which needs {name}")


@functools.cache
def gpu_count() -> int:
    """The number of GPUs that CUDA can use. Counted in a child process: if NVML does not answer, torch initializes CUDA to count,
    after which a process cannot fork children that use CUDA.
    """
    torch: Any = importlib.import_module("torch")
    if torch.cuda.is_initialized():
        return int(torch.cuda.device_count())
    if not torch.backends.cuda.is_built():
        return 0
    counted = run_in_child(lambda send: send("gpus", int(torch.cuda.device_count())), timeout_seconds=_COUNT_SECONDS)
    if counted.outcome == "interrupted":
        raise KeyboardInterrupt
    if "gpus" not in counted.reported:
        raise MeasurementError(f"the GPUs could not be counted: {counted.message}", hint="check that nvidia-smi works")
    return int(counted.reported["gpus"])


def is_simulated() -> bool:
    """Whether this process runs in a rehearsal: its GPUs are simulated and execute no kernels."""
    return "REHEARSAL_NAME" in os.environ


def gpu_here() -> Gpu | None:
    """The GPU that this process uses, as CUDA describes it, with the rates of the table of GPUs. Makes a CUDA context."""
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    memory_bytes = int(found.total_memory)
    known = lookup(found.name) or Gpu(
        name=found.name,
        full_name=found.name,
        memory_bytes=memory_bytes,
        nominal_memory_bytes=memory_bytes,
        memory_source=_MEMORY_SOURCE,
        source="not in the table of GPUs; known only from CUDA",
    )
    known = replace(known, memory_bytes=memory_bytes, memory_source=_MEMORY_SOURCE)
    if torch.version.hip is not None:  # AMD's version numbers are not compute capabilities
        return known
    return replace(known, compute_capability=(found.major, found.minor), multiprocessors=found.multi_processor_count)


def set_allocator(conf: str | None) -> None:
    """Set the allocator's configuration of this process, before it allocates. None keeps the environment's.

    Raises UsageError for settings that PyTorch does not have.
    """
    if conf is not None:
        AllocatorConf.parse(conf)  # raises an error with a hint, unlike torch
        torch: Any = importlib.import_module("torch")
        torch._C._accelerator_setAllocatorSettings(conf)


def versions(*, deepspeed: bool = False, cuda: bool = False) -> dict[str, str]:
    """The versions of all software that a run depends on. DeepSpeed's is left out if it is not installed."""
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers"):
        found[name] = metadata.version(name)
    if deepspeed and (version := _version("deepspeed")) != "unknown":
        found["deepspeed"] = version
    found["fsdp_advisor"] = _version("fsdp-advisor")
    if not cuda:
        return found
    torch: Any = importlib.import_module("torch")
    found["gpu"] = str(torch.cuda.get_device_name())
    found["compute_capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    found["cuda"] = str(torch.version.cuda)
    found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if (driver := driver_version()) is not None:
        found["driver"] = driver
    return found


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown"


def driver_version() -> str | None:
    """The version of NVIDIA's kernel driver; None without one."""
    try:
        match = re.search(r"Kernel Module\D*?([\d.]{5,})", _DRIVER_FILE.read_text())
    except OSError:
        return None
    return match[1] if match else None
