"""Out-of-memory errors in text: a message, or a log of several ranks with tracebacks.

The message: c10/cuda/CUDACachingAllocator.cpp, DeviceCachingAllocator::malloc and reportProcessMemoryInfo (torch 2.1 to 2.13);
before 2.1 `(GPU 0; 8.00 GiB total capacity; ...)`; with backend cudaMallocAsync c10/cuda/CUDAMallocAsyncAllocator.cpp.
torchrun prefixes lines with `[rank3]:` or `[default3]:`, srun with `3:`. rich, which axolotl and torchtune use, wraps lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from fsdp_advisor.diagnosis.facts import OutOfMemory
from fsdp_advisor.diagnosis.snapshot import Frame
from fsdp_advisor.units import parse_bytes

_SIZE = r"(-?[\d.]+\s+(?:bytes|[KMGTP]iB))"
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_PREFIX = re.compile(r"^\s*(?:\[(?P<label>[a-z_]+)?(?P<rank>\d+)\]:|(?P<task>\d+):)[ \t]?")
_BOX = re.compile(r"^\s*│|│\s*$")
_START = re.compile(
    r"(?:CUDA|HIP)\s+out\s+of\s+memory\.\s+(?:Tried\s+to\s+allocate|Allocation\s+was)|Allocation\s+on\s+device\s+\d+\s+would"
)
_END = re.compile(r"reserved\s+(?:by|in\s+total\s+by)\s+PyTorch|user-supplied memory fraction\)\s*:\s*\S+ \S+")
_MESSAGE_CHARACTERS = 4000
"""The longest text that is searched for one message. Messages are shorter, even with many processes."""
_BARE = re.compile(
    r"CUDA error: out of memory|Cuda failure[^\n]*out of memory|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation|"
    r"CUDNN_STATUS_ALLOC_FAILED|memory allocation failed with OOM on device"
)
"""Matches out-of-memory errors of libraries, which do not say how the memory is used."""
_KILLED = re.compile(
    r"oom[-_]kill|out-of-memory handler|Out of memory: Killed process|OOMKilled|exitcode\s*:\s*-9|Signal 9 \(SIGKILL\)|return code = -9"
    r"|^(?:.*:.* )?Killed$",
    re.MULTILINE,
)
"""Matches what a shell, Slurm, the kernel or a launcher writes about a process that the system ended."""
_TRACEBACK = "Traceback (most recent call last)"
_FRAME = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<name>\S+)')
_RICH_FRAME = re.compile(r"^\s*(?P<file>/\S+\.py):(?P<line>\d+) in (?P<name>\S+)", re.MULTILINE)
_GPU = re.compile(r"GPU\s+(\d+)|Allocation\s+on\s+device\s+(\d+)")
_PROCESS = re.compile(rf"Process\s+(\d+)\s+has\s+{_SIZE}\s+memory\s+in\s+use")
_FIELDS = {
    "requested_bytes": rf"Tried\s+to\s+allocate\s+{_SIZE}|Requested(?:\s+size)?\s*:\s+{_SIZE}",
    "total_bytes": rf"capac(?:i)?ty\s+of\s+{_SIZE}|{_SIZE}\s+total\s+capacity|Device\s+limit\s*:\s+{_SIZE}",
    "free_bytes": rf"of\s+which\s+{_SIZE}\s+is\s+free|{_SIZE}\s+free;|CUDA\):\s+{_SIZE}",
    "allowed_bytes": rf"{_SIZE}\s+allowed;",
    "process_bytes": rf"this\s+process\s+has\s+{_SIZE}\s+memory\s+in\s+use",
    "allocated_bytes": rf"{_SIZE}\s+is\s+allocated\s+by\s+PyTorch|{_SIZE}\s+already\s+allocated|Currently\s+allocated\s*:\s+{_SIZE}",
    "private_pool_bytes": rf"with\s+{_SIZE}\s+allocated\s+in\s+private\s+pools",
    "unallocated_bytes": rf"{_SIZE}\s+is\s+reserved\s+by\s+PyTorch\s+but\s+unallocated",
}  # fmt: skip
_PATTERNS = {name: re.compile(pattern) for name, pattern in _FIELDS.items()}
_RESERVED = re.compile(rf"{_SIZE}\s+(?:reserved\s+in\s+total\s+by\s+PyTorch|cached)")


def errors_in(text: str) -> tuple[OutOfMemory, ...]:
    """The out-of-memory errors of a text by rank, each once, in the order of the ranks; empty if there are none."""
    found: dict[tuple[int | None, int | None, int | None, int | None], OutOfMemory] = {}
    for rank, lines in _streams(text).items():
        for error in _errors(lines):
            key = (rank, error.gpu, error.requested_bytes, error.allocated_bytes)
            if key not in found or len(error.frames) > len(found[key].frames):
                found[key] = replace(error, rank=rank)
    numbered = [error for error in found.values() if error.rank is not None]
    return tuple(sorted(numbered, key=lambda error: error.rank or 0)) or tuple(found.values())


def library_error_in(text: str) -> str | None:
    """An error of CUDA or a library that ran out of memory without PyTorch's message; None if there is none."""
    found = _BARE.search(text)
    return found[0] if found else None


def end_of_process_in(text: str) -> str | None:
    """What a text says about a process that the system ended, as it does when the host's memory runs out; None if it says nothing."""
    found = _KILLED.search(_ANSI.sub("", text))
    return found[0].strip() if found else None


def sizes_in(message: str) -> dict[str, int]:
    """The sizes in PyTorch's message, in bytes, by their fields of `OutOfMemory`.

    >>> sizes_in("Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 80.00 GiB of which 1.50 GiB is free.")
    {'requested_bytes': 2147483648, 'total_bytes': 85899345920, 'free_bytes': 1610612736}
    """
    found = {name: _bytes(pattern.search(message)) for name, pattern in _PATTERNS.items()}
    return {name: n_bytes for name, n_bytes in found.items() if n_bytes is not None}


def _streams(text: str) -> dict[int | None, str]:
    """The lines of each rank without their prefixes; lines without a prefix under None."""
    streams: dict[int | None, list[str]] = {}
    for line in _ANSI.sub("", text).splitlines():
        rank: int | None = None
        while (prefix := _PREFIX.match(line)) is not None:
            rank = int(prefix["rank"] or prefix["task"])  # the innermost is PyTorch's own
            line = line[prefix.end() :]
        streams.setdefault(rank, []).append(_BOX.sub(" ", line))
    return {rank: "\n".join(lines) for rank, lines in streams.items()}


def _errors(text: str) -> Iterator[OutOfMemory]:
    starts = [match.start() for match in _START.finditer(text)]
    for number, start in enumerate(starts):
        limit = min(starts[number + 1] if number + 1 < len(starts) else len(text), start + _MESSAGE_CHARACTERS)
        end = _END.search(text, start, limit)
        message = text[start : end.end() + 30 if end else limit]
        previous = starts[number - 1] if number else 0
        yield replace(_error(message), frames=_frames(text[previous:start]))


def _error(message: str) -> OutOfMemory:
    values = sizes_in(message)
    reserved, allocated = _bytes(_RESERVED.search(message)), values.get("allocated_bytes")
    if "unallocated_bytes" not in values and reserved is not None and allocated is not None:
        values["unallocated_bytes"] = max(reserved - allocated, 0)
    gpu = _GPU.search(message)
    processes = {int(pid): _size(size) for pid, size in _PROCESS.findall(message)}
    error = OutOfMemory(
        gpu=int(gpu[1] or gpu[2]) if gpu else None,
        other_processes=processes,
        **values,  # type: ignore[arg-type]  # names of fields
    )
    return _with_own_process(error)


def _with_own_process(error: OutOfMemory) -> OutOfMemory:
    """The error with `process_bytes` filled if PyTorch did not recognize its own process.

    In a container the driver's process ids differ from the container's. The smallest process with at least the memory that PyTorch
    reserved is then assumed to be PyTorch's.
    """
    reserved = error.reserved_bytes
    if error.process_bytes is not None or reserved is None:
        return error
    able = {pid: n for pid, n in error.other_processes.items() if n >= reserved}
    if not able:
        return error
    own = min(able, key=lambda pid: able[pid])
    others = {pid: n for pid, n in error.other_processes.items() if pid != own}
    return replace(error, process_bytes=able[own], other_processes=others)


def _frames(before: str) -> tuple[Frame, ...]:
    """The frames of the last traceback before a message, innermost first."""
    at = before.rfind(_TRACEBACK)
    text = before[at:] if at >= 0 else before
    found = list(_FRAME.finditer(text)) or list(_RICH_FRAME.finditer(text))
    return tuple(Frame(m["file"], int(m["line"]), m["name"]) for m in reversed(found))


def _bytes(match: re.Match[str] | None) -> int | None:
    if match is None:
        return None
    return _size(next(group for group in match.groups() if group))


def _size(text: str) -> int:
    """Bytes of a size in a message.

    >>> _size("954.00 MiB"), _size("0 bytes")
    (1000341504, 0)
    """
    number, unit = text.split()
    return (parse_bytes(f"{number.lstrip('-')}{'' if unit == 'bytes' else unit}") or 0) * (
        -1 if number[0] == "-" else 1
    )
