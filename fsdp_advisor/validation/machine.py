"""What this machine is: its GPUs, its driver, the versions that decide what a run does. Never makes a CUDA context."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

from fsdp_advisor.errors import MissingExtra

_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def require_torch() -> None:
    """Raises MissingExtra where torch or transformers is not there to run anything."""
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise MissingExtra(f"validation runs the model, which needs {name}")


def gpu_count() -> int:
    """GPUs that CUDA would use here, asked of NVML: a process that is to be forked must not touch CUDA."""
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    torch: Any = importlib.import_module("torch")
    return int(torch.cuda.device_count()) if torch.backends.cuda.is_built() else 0


def versions(*, deepspeed: bool = False, cuda: bool = False) -> dict[str, str]:
    """Of everything that a run depends on."""
    found = {"python": platform.python_version()}
    for name in ("torch", "transformers", *(("deepspeed",) if deepspeed else ())):
        found[name] = metadata.version(name)
    found["fsdp_advisor"] = _version("fsdp-advisor")
    if not cuda:
        return found
    torch: Any = importlib.import_module("torch")
    found["gpu"] = str(torch.cuda.get_device_name())
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
