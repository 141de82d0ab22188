"""Reading failures: out-of-memory messages, lost connections and exit statuses. Imports no torch."""

from __future__ import annotations

import contextlib
import re
import signal
import sys
from pathlib import Path
from typing import Any

from fsdp_advisor.diagnosis.error_text import library_error_in, sizes_in
from fsdp_advisor.errors import MeasurementError


class ModeUnavailable(MeasurementError):
    """This machine cannot validate the case in this mode: no GPU, too few GPUs, or a missing package."""

    exit_status = 2


_RECORDED = {
    "requested_bytes": "asked_bytes",
    "total_bytes": "total_bytes",
    "free_bytes": "free_bytes",
    "allocated_bytes": "allocated_bytes",
    "unallocated_bytes": "unallocated_bytes",
}
"""The sizes that a record keeps: {the field of `diagnosis.facts.OutOfMemory`: the record's key}."""
_CPU = re.compile(r"DefaultCPUAllocator: .*?you tried to allocate (\d+) bytes")
_LOST = re.compile(
    r"connection (?:was likely )?(?:closed|reset)|broken pipe|remote worker crash|remote server shutdown"
    r"|ncclRemoteError|remote process exited",
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error is an out-of-memory error of CUDA, of its libraries, of PyTorch's CPU allocator or of Python."""
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return True
    return bool(_CPU.search(str(error)) or library_error_in(str(error)))


def is_host_out_of_memory(error: BaseException) -> bool:
    """Whether the host, not the GPU, is out of memory."""
    return isinstance(error, MemoryError) or bool(_CPU.search(str(error)))


def read_out_of_memory(message: str) -> dict[str, int]:
    """The sizes in an out-of-memory message, in bytes: requested, free, total, allocated, and cached by PyTorch.

    Source: c10/cuda/CUDACachingAllocator.cpp, c10/core/impl/alloc_cpu.cpp (torch 2.13).
    >>> read_out_of_memory("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of "
    ... "which 1.50 GiB is free.")
    {'asked_bytes': 2147483648, 'total_bytes': 85899345920, 'free_bytes': 1610612736}
    """
    if match := _CPU.search(message):
        return {"asked_bytes": int(match[1])}
    return {_RECORDED[name]: n_bytes for name, n_bytes in sizes_in(message).items() if name in _RECORDED}


def free_memory(*, host: bool) -> dict[str, int]:
    """Free bytes of the host or of this process's GPU, for out-of-memory messages without sizes. Empty if unknown."""
    torch: Any = sys.modules.get("torch")
    with contextlib.suppress(Exception):  # a CUDA context that is in an error state cannot answer
        if not host and torch is not None and torch.cuda.is_initialized():
            return dict(zip(("free_bytes", "total_bytes"), map(int, torch.cuda.mem_get_info()), strict=True))
    if not host:
        return {}
    with contextlib.suppress(OSError, TypeError, ValueError):
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
        return {"free_bytes": int(found[1]) << 10} if found else {}
    return {}


def is_lost_connection(error: BaseException) -> bool:
    """Whether gloo, NCCL or their store lost the connection to another rank: usually a consequence of that rank's failure.

    Source: gloo/transport/tcp/pair.cc, nccl.h (ncclRemoteError), c10d/TCPStore.cpp (torch 2.13).
    """
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


def describe_exit(status: int) -> str:
    """A process's exit status in words. Negative statuses are signals, as in `subprocess`.

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
