"""Start a command in its rehearsed environment, wait for it, and end all processes that it leaves behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdp_advisor.errors import RehearsalError
from fsdp_advisor.validation.process_tree import interrupts_ignored, is_alive, kill_tree

RUN = "REHEARSAL_RUN"
"""The environment variable that marks every process of one rehearsal."""
_POLL_SECONDS = 0.5  # each poll reads all of /proc


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How the command ended. `timed_out`, `interrupted`: the rehearsal stopped it."""

    status: int
    seconds: float
    peak_host_bytes: int
    timed_out: bool = False
    interrupted: bool = False
    leftovers: int = 0
    """Processes that the command left running, and that were killed."""


def interpreter_of(command: Sequence[str]) -> Path:
    """The Python that runs the command's script: the command itself if it is one, the one in the launcher's first line, or the PATH's
    `python`.

    Raises RehearsalError if the program does not exist.
    """
    program = shutil.which(command[0])
    if program is None:
        raise RehearsalError(
            f"no such program: {command[0]}", hint="give the whole command after --, such as: -- python train.py"
        )
    if Path(program).name.startswith("python"):
        return Path(program)
    with Path(program).open("rb") as file:
        first = file.readline(4096).decode(errors="replace").strip()
    words = first.removeprefix("#!").split()
    if first.startswith("#!") and words and "python" in Path(words[0]).name:
        return Path(words[0])
    found = shutil.which("python") or shutil.which("python3")
    if found is None:
        raise RehearsalError(f"no Python was found for {command[0]}", hint="activate the script's environment")
    return Path(found)


def run(command: Sequence[str], variables: Mapping[str, str], *, timeout_s: float, quiet: bool) -> Ended:
    """Run the command until it ends, `timeout_s` has passed or Ctrl-C. Its output goes to standard error, or nowhere if `quiet`."""
    mark = uuid.uuid4().hex
    output = subprocess.DEVNULL if quiet else sys.stderr
    started, peak = time.monotonic(), 0
    timed_out = interrupted = False
    process = subprocess.Popen(
        list(command), env={**variables, RUN: mark}, stdout=output, stderr=output, start_new_session=True
    )
    try:
        while process.poll() is None:
            peak = max(peak, sum(map(_resident_bytes, _marked(mark))))
            if time.monotonic() - started > timeout_s:
                timed_out = True
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_POLL_SECONDS)
    except KeyboardInterrupt:
        interrupted = True
    with interrupts_ignored():
        if process.poll() is None:
            kill_tree(process.pid)
        process.wait()
        leftovers = 0
        while rest := _marked(mark):
            leftovers += len(rest)
            for pid in rest:
                kill_tree(pid)
    return Ended(
        status=process.returncode if process.returncode >= 0 else 128 - process.returncode,
        seconds=time.monotonic() - started,
        peak_host_bytes=peak,
        timed_out=timed_out,
        interrupted=interrupted,
        leftovers=0 if timed_out or interrupted else leftovers,
    )


def _marked(mark: str) -> list[int]:
    """The processes of this rehearsal, including those in other sessions and those whose parents have ended."""
    wanted = f"{RUN}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes() and is_alive(int(folder.name)):
                found.append(int(folder.name))
    return found


def _resident_bytes(pid: int) -> int:
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
