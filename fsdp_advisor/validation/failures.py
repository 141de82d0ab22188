"""What can go wrong with a run, and how it is told: an out-of-memory message read, an exit status named. Imports no torch."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from pathlib import Path
from typing import Any

from fsdp_advisor.errors import MeasurementError
from fsdp_advisor.units import parse_bytes


class NotHere(MeasurementError):
    """A rung that this machine cannot climb: no GPU, too few of them, a package missing."""

    exit_status = 2


_SIZE = r"([\d.]+ (?:bytes|[KMGT]iB))"
_CUDA = {
    "asked_bytes": re.compile(rf"Tried to allocate {_SIZE}"),
    "total_bytes": re.compile(rf"total capacity of {_SIZE}"),
    "free_bytes": re.compile(rf"of which {_SIZE} is free"),
    "allocated_bytes": re.compile(rf"{_SIZE} is allocated by PyTorch"),
    "unallocated_bytes": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
}
_CPU = re.compile(r"DefaultCPUAllocator: .*?you tried to allocate (\d+) bytes")
_OTHER = re.compile(
    r"CUDA error: out of memory|Cuda failure[^\n]*out of memory|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED"
)
_LOST = re.compile(
    r"connection (?:was likely )?(?:closed|reset)|broken pipe|remote worker crash|remote server shutdown"
    r"|ncclRemoteError|remote process exited",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """torch.OutOfMemoryError, or what CUDA, its libraries, PyTorch's CPU allocator and Python itself raise instead."""
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return True
    return bool(_CPU.search(str(error)) or _OTHER.search(str(error)))


def read_out_of_memory(message: str) -> dict[str, int]:
    """What an out-of-memory message tells, in bytes: asked for, free, the GPU's total, held by PyTorch and idle in its cache.

    Source: c10/cuda/CUDACachingAllocator.cpp, c10/core/impl/alloc_cpu.cpp (torch 2.13).
    >>> read_out_of_memory("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of "
    ... "which 1.50 GiB is free.")
    {'asked_bytes': 2147483648, 'total_bytes': 85899345920, 'free_bytes': 1610612736}
    """
    if match := _CPU.search(message):
        return {"asked_bytes": int(match[1])}
    found = {}
    for name, pattern in _CUDA.items():
        if match := pattern.search(message):
            n_bytes = parse_bytes(match[1].replace("bytes", "B"))
            if n_bytes is not None:
                found[name] = n_bytes
    return found


def is_of_host(error: BaseException) -> bool:
    """Out of the host's memory, which says nothing of a GPU's."""
    return isinstance(error, MemoryError) or bool(_CPU.search(str(error)))


def memory_now(*, host: bool) -> dict[str, int]:
    """What is free, for an out-of-memory message that does not say: on the host, or on this process's GPU."""
    torch: Any = sys.modules.get("torch")
    with contextlib.suppress(Exception):  # a context that an error has broken answers nothing
        if not host and torch is not None and torch.cuda.is_initialized():
            return dict(zip(("free_bytes", "total_bytes"), map(int, torch.cuda.mem_get_info()), strict=True))
    if not host:
        return {}
    with contextlib.suppress(OSError, TypeError, ValueError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        return {"free_bytes": int(found[1]) << 10} if found else {}
    return {}


def is_lost_rank(error: BaseException) -> bool:
    """What gloo, NCCL and their store say in a rank whose neighbour has ended: a consequence, seldom the cause.

    Source: gloo/transport/tcp/pair.cc, nccl.h (ncclRemoteError), c10d/TCPStore.cpp (torch 2.13).
    """
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def describe_exit(status: int) -> str:
    """A process's exit status in words; negative for a signal, as `subprocess` has it.

    >>> describe_exit(3), describe_exit(-11)
    ('exit status 3', 'killed by SIGSEGV')
    """
    if status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"killed by {name}" + (", as the kernel does when the host's memory runs out" if name == "SIGKILL" else "")
