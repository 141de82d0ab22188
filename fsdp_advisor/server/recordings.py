"""Configurations that are in no catalog, recorded by a process apart: this one never imports torch.

One recording at a time, a short queue, bounds on the process's time and memory (see `recorder_process`). What was recorded,
or refused, is kept in memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import sys
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import fsdp_advisor
from fsdp_advisor import errors
from fsdp_advisor.errors import AdvisorError, MissingExtra, NotRecordable
from fsdp_advisor.models import cache
from fsdp_advisor.models.config import parse_config, trained_part
from fsdp_advisor.models.profile import Profile
from fsdp_advisor.models.store import load
from fsdp_advisor.resolve import Resolved
from fsdp_advisor.server.errors import ServerBusy
from fsdp_advisor.server.observation import Metrics
from fsdp_advisor.server.settings import MIB, Settings

RECORDINGS_KEPT = 16
JOBS_PER_PROCESS = 32
"""A process that has run for long holds memory of models that nobody asks for again."""
IDLE_SECONDS = 300.0
MAX_PROFILE_BYTES = 8 * MIB

_LOG = logging.getLogger(__name__)

Source = Literal["config", "hub"]


@dataclass
class _Known:
    """What came of one configuration: its inventory and tapes, or why there are none; and why variants cannot be had."""

    profile: Profile | None = None
    refused: AdvisorError | None = None
    notes: tuple[str, ...] = ()
    refusals: dict[str, AdvisorError] = field(default_factory=dict)

    def lacks(self, variants: set[str]) -> list[str]:
        tapes = self.profile.tapes if self.profile else {}
        return sorted(v for v in variants if v not in tapes and v not in self.refusals)


class Recordings:
    """The configurations recorded so far, and the process that records more."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._process: RecorderProcess | None = None

    async def resolved(self, data: bytes, name: str, source: Source, variants: set[str]) -> Resolved:
        """The model of a configuration, with the tapes of these variants. Raises AdvisorError."""
        trained_part(parse_config(data, name), name)  # refuse here what needs no torch to be refused
        key = hashlib.sha256(json.dumps([source, name]).encode() + data).hexdigest()
        if self._lacking(key, variants):
            await self._record(key, data, name, source, variants)
        self._known.move_to_end(key)
        known = self._known[key]
        if known.profile is None:
            assert known.refused is not None
            raise known.refused.with_traceback(None)
        profile = known.profile
        return Resolved(
            name,
            source,
            profile,
            profile.parameters,
            profile.trainable_parameters,
            known.notes,
            may_record=False,
            refusals=known.refusals,
        )

    async def close(self) -> None:
        if self._process is not None:
            await self._process.stop()
            self._process = None

    # Inside

    def _lacking(self, key: str, variants: set[str]) -> list[str]:
        known = self._known.get(key)
        if known is None:
            return sorted(variants)
        return [] if known.refused else known.lacks(variants)

    async def _record(self, key: str, data: bytes, name: str, source: Source, variants: set[str]) -> None:
        if cache.installed_versions() is None:
            raise MissingExtra(f"{name} has to be recorded, for which this server lacks torch and transformers")
        if self._waiting > self._settings.record_queue:
            raise ServerBusy("too many configurations wait to be recorded", hint="try again in a while")
        self._waiting += 1
        try:
            async with self._turn:
                if missing := self._lacking(key, variants):  # another may have asked for it meanwhile
                    await self._ask({"config": data.decode(), "name": name, "source": source, "variants": missing}, key)
        finally:
            self._waiting -= 1

    async def _ask(self, job: dict[str, Any], key: str) -> None:
        if self._process is None or self._process.spent:
            await self.close()
            self._process = await RecorderProcess.start(self._settings)
        known = self._known.setdefault(key, _Known())
        try:
            head, blob = await self._process.ask(job)
        except RecorderDied as died:
            self._process = None
            head, blob = (
                {"refused": {"kind": "NotRecordable", "message": f"{job['name']}: {died}", "hint": _SMALLER}},
                b"",
            )
        except BaseException:  # the asker has gone: the process is in the middle of something
            await self.close()
            raise
        self._metrics.recordings.labels("refused" if head.get("refused") else "recorded").inc()
        if head.get("refused") and known.profile is not None:  # the tapes there are stay; the new ones cannot be had
            known.refusals |= {v: _error(head["refused"]) for v in job["variants"]}
        elif head.get("refused"):
            known.refused = _error(head["refused"])
        else:
            known.notes = tuple(head["notes"])
            known.refusals |= {v: _error(e) for v, e in head["refusals"].items()}
            fresh = load(blob)
            tapes = {**known.profile.tapes, **fresh.tapes} if known.profile else fresh.tapes
            known.profile = replace(fresh, tapes=tapes)
        while len(self._known) > RECORDINGS_KEPT:
            self._known.popitem(last=False)


_SMALLER = "a smaller configuration, or one strategy at a time, may do"


def _error(told: dict[str, str]) -> AdvisorError:
    """An error that the process told of, as an error of its class."""
    kind = getattr(errors, told["kind"], NotRecordable)
    error: AdvisorError = Exception.__new__(kind if issubclass(kind, AdvisorError) else NotRecordable)
    AdvisorError.__init__(error, told["message"], hint=told["hint"])
    return error


class RecorderDied(Exception):
    """The process ended, or was ended, before it answered."""


class RecorderProcess:
    """One process that records, and the pipes to it."""

    def __init__(self, process: asyncio.subprocess.Process, seconds: float) -> None:
        self._process = process
        self._seconds = seconds
        self._jobs = 0
        self._idle: asyncio.TimerHandle | None = None

    @classmethod
    async def start(cls, settings: Settings) -> RecorderProcess:
        bounds = {"memory_bytes": settings.record_memory_bytes, "seconds": settings.record_seconds}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "fsdp_advisor.server.recorder_process",
            json.dumps(bounds),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            cwd="/",
            env=_environment(),
            limit=MIB,
        )
        return cls(process, settings.record_seconds)

    @property
    def spent(self) -> bool:
        return self._process.returncode is not None or self._jobs >= JOBS_PER_PROCESS

    async def ask(self, job: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """The answer's head and the stored profile. Raises RecorderDied."""
        if self._idle is not None:
            self._idle.cancel()
        self._jobs += 1
        try:
            answer = await asyncio.wait_for(self._exchanged(job), self._seconds)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, ValueError, OSError) as error:
            await self.stop()
            late = isinstance(error, asyncio.TimeoutError)
            _LOG.warning("recorder process ended", extra={"late": late, "exit_status": self._process.returncode})
            why = f"took longer than {self._seconds:.0f} s" if late else "took more memory or time than it may"
            raise RecorderDied(f"recording it {why}") from error
        self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._end)
        return answer

    async def _exchanged(self, job: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        await self._process.stdin.drain()
        head = json.loads(await self._process.stdout.readuntil())
        if not 0 <= head["bytes"] <= MAX_PROFILE_BYTES:
            raise ValueError("a profile larger than any")
        return head, await self._process.stdout.readexactly(head["bytes"])

    async def stop(self) -> None:
        if self._idle is not None:
            self._idle.cancel()
        self._end()
        await self._process.wait()

    def _end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


def _environment() -> dict[str, str]:
    """No token, no address and no folder of this machine's user; what Python needs to start and find packages."""
    kept = {n: os.environ[n] for n in ("PATH", "LD_LIBRARY_PATH", "SYSTEMROOT", "LANG") if n in os.environ}
    package = str(Path(fsdp_advisor.__file__).parents[1])
    path = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH", "")) if p)
    return kept | {
        "PYTHONPATH": path,
        "PYTHONSAFEPATH": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "FSDP_ADVISOR_CACHE": os.devnull,  # a folder that nothing can be kept in
        "TORCHINDUCTOR_CACHE_DIR": "/",  # one that is there: torch makes it when it is imported
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
