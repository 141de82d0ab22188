"""Configurations that are in no catalog, recorded by a process apart: this one never imports torch.

One recording at a time, a short queue, bounds on the process's time and memory (see `recorder_process`). What was recorded,
or refused for what it is, is kept in memory; what this machine had no time or room for may be asked for again.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import re
import signal
import sys
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import fsdp_advisor
from fsdp_advisor.errors import ErrorPayload, MissingExtra, NotRecordable, UnreadableConfig, from_payload, to_payload
from fsdp_advisor.model import cache
from fsdp_advisor.model.config import parse_config, trained_part
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.resolve import Resolved
from fsdp_advisor.model.store import load
from fsdp_advisor.server.errors import ServerBusy
from fsdp_advisor.server.observation import Metrics
from fsdp_advisor.server.settings import MIB, Settings

PROCESS = (sys.executable, "-m", "fsdp_advisor.server.recorder_process")
RECORDINGS_KEPT = 16
JOBS_PER_PROCESS = 32
"""A process that has run for long holds memory of models that nobody asks for again."""
IDLE_SECONDS = 300.0
START_SECONDS = 60.0
EXIT_SECONDS = 1.0
"""From the end of its answers to its own."""
BUSY = 0.5
"""Of its time, what a recording that was late got of a processor, below which the machine is to blame for it."""
MAX_PROFILE_BYTES = 8 * MIB

_LOG = logging.getLogger(__name__)

Source = Literal["config", "hub"]


@dataclass
class _Known:
    """What came of one configuration: its inventory and tapes, or why there are none."""

    profile: Profile | None = None
    refused: ErrorPayload | None = None
    notes: tuple[str, ...] = ()

    def lacks(self, variants: set[str]) -> list[str]:
        if self.profile is None:
            return sorted(variants)
        return sorted(v for v in variants if v not in self.profile.tapes and v not in self.profile.refusals)


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
        config = parse_config(data, name)
        trained_part(config, name)  # refuse here what needs no torch to be refused
        refuse_paths(config, name)
        key = hashlib.sha256(json.dumps([source, name, config], sort_keys=True).encode()).hexdigest()
        if self._lacking(key, variants):
            await self._record(key, data, name, source, variants)
        self._known.move_to_end(key)
        known = self._known[key]
        if known.profile is None:
            assert known.refused is not None
            raise from_payload(known.refused)
        profile = known.profile
        return Resolved(
            name,
            source,
            profile,
            profile.parameters,
            profile.trainable_parameters,
            known.notes,
            recording_allowed=False,
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
        try:
            head, blob = await self._process.ask(job)
        except MachineBusy as busy:
            self._process = None
            self._metrics.recordings.labels("busy").inc()
            raise ServerBusy(f"this machine was too busy to record {job['name']}: {busy}", hint="try again") from busy
        except RecorderDied as died:
            self._process = None
            head, blob = {"refused": to_payload(NotRecordable(f"{job['name']}: {died}", hint=_SMALLER))}, b""
        except BaseException:  # the asker has gone: the process is in the middle of something
            await self.close()
            raise
        self._metrics.recordings.labels("refused" if head.get("refused") else "recorded").inc()
        known = self._known.setdefault(key, _Known())
        if head.get("refused") and known.profile is not None:  # the tapes there are stay; the new ones cannot be had
            known.profile.refusals.update(dict.fromkeys(job["variants"], head["refused"]))
        elif head.get("refused"):
            known.refused = head["refused"]
        else:
            known.notes = tuple(head["notes"])
            fresh = await asyncio.to_thread(load, blob)
            if (before := known.profile) is not None:
                fresh = replace(
                    fresh,
                    tapes={**before.tapes, **fresh.tapes},
                    refusals={**before.refusals, **fresh.refusals},
                )
            known.profile = fresh
        while len(self._known) > RECORDINGS_KEPT:
            self._known.popitem(last=False)


_SMALLER = "a smaller configuration, or one strategy at a time, may do"


_PATH = re.compile(
    r"[/~\\]|\.{1,2}(?:[/\\]|$)|[a-z][a-z0-9+.-]*:[/\\]|file:|.*[/\\]\.\.(?:[/\\]|$)", re.DOTALL | re.IGNORECASE
)
_LABELS = frozenset({"_name_or_path", "auto_map"})
"""Keys whose values say where a configuration comes from. They are dropped before anything is built."""


def refuse_paths(config: Any, name: str, key: str = "") -> None:
    """No path and no address, wherever it stands: a model's shapes need none. Raises UnreadableConfig.

    >>> refuse_paths({"model_type": "llama", "text_config": {"_name_or_path": "/home/me", "hidden_act": "silu"}}, "it")
    """
    if isinstance(config, dict):
        for inner, value in config.items():
            if inner not in _LABELS:
                refuse_paths(value, name, inner)
    elif isinstance(config, list):
        for value in config:
            refuse_paths(value, name, key)
    elif isinstance(config, str) and _PATH.match(config):
        shown = key[:40] if key.isprintable() else "a key"
        raise UnreadableConfig(f"{name}: {shown} is a path or an address", hint="a server reads no files; leave it out")


class RecorderBroken(ServerBusy):
    """The process does not start; its operator finds out why in the log."""

    retry_after_seconds = 60


class RecorderDied(Exception):
    """The process ended, or was ended, before it answered."""


class MachineBusy(RecorderDied):
    """It ended for want of the machine's time or memory, whatever it was recording."""


class RecorderProcess:
    """One process that records, and the pipes to it."""

    def __init__(self, process: asyncio.subprocess.Process, seconds: float) -> None:
        self._process = process
        self._seconds = seconds
        self._jobs = 0
        self._idle: asyncio.TimerHandle | None = None

    @classmethod
    async def start(cls, settings: Settings) -> RecorderProcess:
        """A process that has imported torch. Raises RecorderBroken."""
        bounds = {"memory_bytes": settings.record_memory_bytes, "seconds": settings.record_seconds}
        process = await asyncio.create_subprocess_exec(
            *PROCESS,
            json.dumps(bounds),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            cwd="/",
            env=_environment(),
            limit=MIB,
        )
        started = cls(process, settings.record_seconds)
        try:
            head, _ = await asyncio.wait_for(started._answered(), START_SECONDS)
            why = head.get("failed")
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, ValueError) as error:
            why = type(error).__name__
        except BaseException:
            await started.stop()
            raise
        if why is not None:
            await started.stop()
            _LOG.error("recorder process does not start", extra={"why": why})
            raise RecorderBroken("configurations cannot be recorded here at present", hint="name a catalogued model")
        return started

    @property
    def spent(self) -> bool:
        return self._process.returncode is not None or self._jobs >= JOBS_PER_PROCESS

    async def ask(self, job: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """The answer's head and the stored profile. Raises RecorderDied, MachineBusy."""
        if self._idle is not None:
            self._idle.cancel()
        self._jobs += 1
        before = cpu_seconds(self._process.pid)
        try:
            answer = await asyncio.wait_for(self._exchanged(job), self._seconds)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, ValueError, OSError) as error:
            late = isinstance(error, asyncio.TimeoutError)
            after = cpu_seconds(self._process.pid)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._process.wait(), 0 if late else EXIT_SECONDS)
            status = self._process.returncode
            await self.stop()
            _LOG.warning("recorder process ended", extra={"late": late, "exit_status": status})
            if late and before is not None and after is not None and after - before < BUSY * self._seconds:
                raise MachineBusy(f"{self._seconds:g} s were not enough") from error
            if status == -signal.SIGKILL:  # nobody here did it: the kernel, for want of memory
                raise MachineBusy("it ran out of memory") from error
            why = f"took longer than {self._seconds:g} s" if late else "took more memory or time than it may"
            raise RecorderDied(f"recording it {why}") from error
        self._idle = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._end)
        return answer

    async def _exchanged(self, job: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        await self._process.stdin.drain()
        return await self._answered()

    async def _answered(self) -> tuple[dict[str, Any], bytes]:
        assert self._process.stdout
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


def cpu_seconds(pid: int) -> float | None:
    """What a process has had of processors; None where this system does not say (Linux does)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


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
