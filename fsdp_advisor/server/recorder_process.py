"""The process that records strangers' configurations: `python -m fsdp_advisor.server.recorder_process BOUNDS`.

Its first line is {"bytes": 0} once it is ready, or {"bytes": 0, "failed"}. Then a line of JSON comes in, {"config", "name",
"source", "variants"}; a line goes out, {"bytes", "notes"} or {"bytes": 0, "refused"}, and after it the stored profile, which
holds why variants were refused. The process bounds itself before it reads anything: memory, time per job, no file written; and
once torch is loaded no connection, no other program, and no file read but Python's own.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from fsdp_advisor.errors import AdvisorError, NoSuchAttention, NotRecordable, to_payload
from fsdp_advisor.model.store import dump
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.tapes import gpu_tape_keys

REFUSED = ("socket.", "subprocess.", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.startfile", "pty.", "ftplib.",
           "smtplib.", "http.client.", "urllib.", "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown",
           "os.link", "os.symlink", "os.truncate", "os.kill", "shutil.")  # fmt: skip
"""Beginnings of the audit events (docs.python.org/3/library/audit_events.html) that recording has no use for."""

READABLE = ("/proc", "/sys", "/dev/null", "/dev/urandom", "/usr/share/zoneinfo")


def main() -> None:
    bounds = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print is not an answer
    _bound(bounds["memory_bytes"])
    tempfile.tempdir = os.devnull  # libraries ask for a folder, and none can be tried out where no file is written
    try:
        importlib.import_module("fsdp_advisor.recording")
    except Exception:
        _send(answers, {"failed": traceback.format_exc()})
        return
    _confine()
    _send(answers, {})
    for line in sys.stdin.buffer:
        _bound_time(bounds["seconds"])
        _answer(answers, json.loads(line))


def _bound(memory_bytes: int) -> None:
    """Private memory, no file, no core. What is mapped from libraries' files does not count."""
    with contextlib.suppress(ImportError):
        import resource  # not on Windows

        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _bound_time(seconds: float) -> None:
    """A job may take `seconds` of the processor, should nobody be left to end it."""
    with contextlib.suppress(ImportError):
        import resource

        used = resource.getrusage(resource.RUSAGE_SELF)
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(used.ru_utime + used.ru_stime + 2 * seconds) + 1, hard))


def _confine() -> None:
    """From here on: no connection, no program, no file but those that Python imports from."""
    import fsdp_advisor

    folders = [*sys.path, sys.prefix, sys.base_prefix, str(Path(fsdp_advisor.__file__).parent), *READABLE]
    readable = tuple(os.path.realpath(f) for f in folders if f and f != "/")

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event.startswith(REFUSED):
            raise PermissionError(f"{event} is not for a recorder")
        if event == "open" and not isinstance(arguments[0], int):
            path, _, flags = arguments
            real = os.path.realpath(os.fsdecode(path))
            inside = any(real == folder or real.startswith(folder + os.sep) for folder in readable)
            if not inside or (flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                raise PermissionError("this file is not for a recorder")

    sys.addaudithook(watch)


def _answer(answers: BinaryIO, job: dict[str, Any]) -> None:
    try:
        head, blob = _recorded(job)
    except AdvisorError as error:
        head, blob = {"refused": to_payload(error)}, b""
    except Exception as error:
        why = NotRecordable(f"{job['name']}: {type(error).__name__}", hint="check the configuration's sizes")
        head, blob = {"refused": to_payload(why)}, b""
    _send(answers, head, blob)


def _send(answers: BinaryIO, head: dict[str, Any], blob: bytes = b"") -> None:
    answers.write(json.dumps({**head, "bytes": len(blob)}).encode() + b"\n" + blob)
    answers.flush()


def _recorded(job: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    from fsdp_advisor.model.resolve import configured

    model = configured(job["config"].encode(), job["name"], job["source"])
    assert model.profile is not None
    wanted = [TapeKey.from_name(key) for key in job["variants"]]
    for variant in wanted:
        if variant.device == "cpu":
            for windowed in {False, model.profile.window is not None}:
                wanted += gpu_tape_keys(variant, window_filled=windowed)
        try:
            model.tape(variant)
        except AdvisorError as error:  # each variant may be refused by itself
            model.profile.refusals.setdefault(variant.name, to_payload(error))  # what this process had no room for, too
            if isinstance(error, NoSuchAttention) and variant.attention == "sdpa":  # eager is taken in its place
                wanted.append(replace(variant, attention="eager"))
    notes = [note for note in model.notes if "cache folder" not in note]
    return {"notes": notes}, dump(model.profile)


if __name__ == "__main__":
    main()
