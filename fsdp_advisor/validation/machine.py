"""What this machine is: its GPUs, its driver, the versions that decide what a run does. `gpu_here` alone makes a CUDA context."""

from __future__ import annotations

import functools
import importlib
import importlib.util
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
from fsdp_advisor.validation.child_process import forked

_ASKED = "torch.cuda.get_device_properties on this machine"
_COUNT_SECONDS = 120
"""A driver that wakes many GPUs takes its time."""
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def require_torch() -> None:
    """Raises MissingExtra where torch or transformers is not there to run anything."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise MissingExtra(f"validation runs the model, which needs {name}")


@functools.cache
def gpu_count() -> int:
    """GPUs that CUDA would use here. Where NVML does not answer, CUDA is asked, which a process that is to be forked must not do."""
    torch: Any = importlib.import_module("torch")
    if torch.cuda.is_initialized():
        return int(torch.cuda.device_count())
    if not torch.backends.cuda.is_built():
        return 0
    asked = forked(lambda tell: tell("gpus", int(torch.cuda.device_count())), timeout_seconds=_COUNT_SECONDS)
    if asked.outcome == "interrupted":
        raise KeyboardInterrupt
    if "gpus" not in asked.reported:
        raise MeasurementError(f"the GPUs could not be counted: {asked.message}", hint="does nvidia-smi answer?")
    return int(asked.reported["gpus"])


def gpu_here(index: int = 0) -> Gpu | None:
    """The GPU that this process uses, as CUDA describes it, with the table's rates if it is there. Makes a CUDA context."""
    torch: Any = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(index)
    memory_bytes = int(found.total_memory)
    known = lookup(found.name) or Gpu(
        name=found.name,
        full_name=found.name,
        memory_bytes=memory_bytes,
        nominal_memory_bytes=memory_bytes,
        memory_source=_ASKED,
        source="not in the table: nothing but what CUDA says is known",
    )
    known = replace(known, memory_bytes=memory_bytes, memory_source=_ASKED)
    if torch.version.hip is not None:  # AMD's version numbers are no compute capabilities
        return known
    return replace(known, compute_capability=(found.major, found.minor), multiprocessors=found.multi_processor_count)


def set_allocator(conf: str | None) -> None:
    """Give this process the allocator's settings, before it allocates; the environment's stay where there are none.

    Raises UsageError for settings that PyTorch does not have.
    """
    if conf is not None:
        AllocatorConf.parse(conf)  # torch's own complaint has no hint
        torch: Any = importlib.import_module("torch")
        torch._C._accelerator_setAllocatorSettings(conf)


def versions(*, deepspeed: bool = False, cuda: bool = False) -> dict[str, str]:
    """Of everything that a run depends on; without DeepSpeed's where there is none, which the rung then says itself."""
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
    """NVIDIA's kernel driver, as it says itself."""
    try:
        match = re.search(r"Kernel Module\D*?([\d.]{5,})", _DRIVER_FILE.read_text())
    except OSError:
        return None
    return match[1] if match else None
