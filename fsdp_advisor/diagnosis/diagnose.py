"""From a file to its diagnosis: an error in text, or a snapshot."""

from __future__ import annotations

import gzip
import mmap
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from fsdp_advisor.diagnosis.attribution import Evidence, by_category, holdings, moment
from fsdp_advisor.diagnosis.changes import Facts, changes
from fsdp_advisor.diagnosis.error_text import end_of_process_in, errors_in, library_error_in
from fsdp_advisor.diagnosis.facts import Category, Diagnosis, Moment, OutOfMemory
from fsdp_advisor.diagnosis.pickle_reader import PickleRefused
from fsdp_advisor.diagnosis.prediction import DiagnosedJob, on_gpu_of_error, predicted
from fsdp_advisor.diagnosis.replay import Alive, alive_at, lifetimes, moment_of, segments_of
from fsdp_advisor.diagnosis.snapshot import ALLOC, NO_STACK, OOM, NotASnapshot, Snapshot, Trace, read_snapshot
from fsdp_advisor.diagnosis.stacks import classify, site_of
from fsdp_advisor.diagnosis.steps import steps_of
from fsdp_advisor.errors import UnreadableDiagnosis
from fsdp_advisor.memory.allocator import AllocatorConf
from fsdp_advisor.memory.allocator.caching import allocation_size
from fsdp_advisor.program.storages import round_up

STANDARD_INPUT = "-"
MAX_TEXT_BYTES = 64 * 2**20
"""The bytes that are read at the end of a log, where the error is."""
_PICKLE, _GZIP, _ZIP = b"\x80", b"\x1f\x8b", b"PK"
_RECORD = "call torch.cuda.memory._record_memory_history() at the start, and torch.cuda.memory._dump_snapshot('FILE') when the error occurs"
_HINT = f"give the text of an out-of-memory error, a log that has one, or a snapshot: {_RECORD}"


def diagnose_file(path: str | Path, job: DiagnosedJob | None = None, *, device: int | None = None) -> Diagnosis:
    """The diagnosis of a file, or of standard input for `-`. A gzip file is unpacked.

    `job` is the job, if it is known: the diagnosis then compares its estimate. `device` chooses the GPU of a snapshot that
    has several. Raises UnreadableDiagnosis for a file that has neither an error nor a snapshot, and the errors of `estimate`.
    """
    name = str(path)
    with _contents(name) as data:
        if data[:1] == _PICKLE:
            return _of_snapshot(name, _snapshot(name, data), job, device)
        if data[:2] == _ZIP:
            raise UnreadableDiagnosis(f"{name} is a zip archive, not a snapshot", hint=_HINT)
        text = data[-MAX_TEXT_BYTES:].decode("utf-8", "replace")
    return diagnose_text(text, job, name=name)


def diagnose_text(text: str, job: DiagnosedJob | None = None, *, name: str = "text") -> Diagnosis:
    """The diagnosis of a text: an error message, or a log of any length. Raises as `diagnose_file` does."""
    errors = errors_in(text)
    if not errors:
        raise _no_error(name, text)
    error = max(errors, key=lambda e: (bool(e.frames), e.allocated_bytes or 0))
    site = site_of(error.frames) if error.frames else None
    at = Moment(phase="unknown") if site is None else Moment(phase=site.phase, where=site.where)
    memory = _memory_of_error(error)
    unknown = ["an error message does not say which tensors were alive; a snapshot does: " + _RECORD]
    if site is None:
        unknown.append("the moment: no traceback comes with the message")
    notes = []
    if len(errors) > 1:
        where = f"rank {error.rank}" if error.rank is not None else "the one with most memory allocated"
        notes.append(f"{len(errors)} errors were found; the diagnosis is of {where}")
    if job is not None:
        job = on_gpu_of_error(job, error)
        notes += job.notes
    facts = Facts(error=error, moment=at, memory=memory, holdings=(), checkpointed=False, expandable=False)
    return Diagnosis(
        file=name,
        source="error",
        device=error.gpu,
        moment=at,
        out_of_memory=error,
        memory=memory,
        ranks=errors,
        changes=changes(facts, job),
        prediction=None if job is None else predicted(job, at, memory, (), error),
        notes=tuple(notes),
        unknown=tuple(unknown),
    )


def _no_error(name: str, text: str) -> UnreadableDiagnosis:
    """The error for a text without PyTorch's message."""
    library = library_error_in(text)
    if library is not None:
        return UnreadableDiagnosis(
            f"{name} has {library!r}, which does not say how the memory is used",
            hint=f"look for 'CUDA out of memory. Tried to allocate' in the other ranks' logs, or make a snapshot: {_RECORD}",
        )
    ended = end_of_process_in(text)
    if ended is not None:
        return UnreadableDiagnosis(
            f"{name} has {ended!r}: the system ended the process, usually because the host's memory ran out, not the GPU's",
            hint="an estimate shows the host memory per node in training, with explain also in loading and saving; compare it with the"
            " memory that the job may use (free, Slurm's --mem, the container's limit)",
        )
    if not text.strip():
        return UnreadableDiagnosis(f"{name} is empty", hint=_HINT)
    return UnreadableDiagnosis(f"{name} has no out-of-memory error of PyTorch and is no snapshot", hint=_HINT)


@contextmanager
def _contents(name: str) -> Iterator[mmap.mmap | bytes]:
    """The bytes of a file, mapped, so that they are not all in memory. Pipes and gzip files go through a temporary file."""
    try:
        with ExitStack() as opened:
            file: IO[bytes] = (
                sys.stdin.buffer if name == STANDARD_INPUT else opened.enter_context(Path(name).open("rb"))
            )
            if name == STANDARD_INPUT or not file.seekable():
                file = opened.enter_context(_copied(file))
            if file.read(2) == _GZIP:
                file.seek(0)
                file = opened.enter_context(_copied(opened.enter_context(gzip.GzipFile(fileobj=file))))
            yield opened.enter_context(_mapped(file))
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnreadableDiagnosis(f"cannot read {name}: {reason}", hint=_HINT) from None


@contextmanager
def _copied(source: Any) -> Iterator[IO[bytes]]:
    """A temporary file with the rest of a stream, at its beginning."""
    with tempfile.TemporaryFile() as copy:
        shutil.copyfileobj(source, copy)
        copy.seek(0)
        yield copy


@contextmanager
def _mapped(file: IO[bytes]) -> Iterator[mmap.mmap | bytes]:
    if not file.seek(0, 2):  # an empty file cannot be mapped
        yield b""
        return
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        yield data


def _memory_of_error(error: OutOfMemory) -> dict[Category, int]:
    """Bytes by category. They sum to the GPU's memory if the message contains all figures."""
    found: dict[Category, int] = {}
    if error.allocated_bytes is not None:
        found["allocated"] = error.allocated_bytes - error.private_pool_bytes
        found["private_pools"] = error.private_pool_bytes
    found["fragmentation"] = error.unallocated_bytes or 0
    reserved = error.reserved_bytes
    if error.process_bytes is not None and reserved is not None:
        found["cuda_and_nccl"] = max(error.process_bytes - reserved, 0)
    found["other_processes"] = sum(error.other_processes.values())
    if error.total_bytes is not None and error.free_bytes is not None:
        rest = error.total_bytes - error.free_bytes - sum(found.values())
        found["outside"] = max(rest, 0)
        found["free"] = error.free_bytes
    return {name: n for name, n in found.items() if n}


def _snapshot(name: str, data: mmap.mmap | bytes) -> Snapshot:
    try:
        return read_snapshot(data)
    except PickleRefused as error:
        hint = "dump it again, and check that the disk has space" if error.truncated else _HINT
        raise UnreadableDiagnosis(f"{name}: {error}", hint=hint) from None
    except NotASnapshot as error:
        raise UnreadableDiagnosis(f"{name}: {error}", hint=_HINT) from None


def _of_snapshot(name: str, snapshot: Snapshot, job: DiagnosedJob | None, device: int | None) -> Diagnosis:
    chosen = _device(name, snapshot, device)
    trace = snapshot.traces[chosen] if chosen < len(snapshot.traces) else Trace()
    segments = segments_of(snapshot, chosen)
    at = moment_of(trace, segments)
    failed = at < len(trace) and trace.actions[at] == OOM
    sites = classify(snapshot.stacks)
    evidence = Evidence(
        trace=trace,
        sites=sites,
        steps=steps_of(trace, sites),
        alive=alive_at(trace, segments, at),
        freed=lifetimes(trace),
        failed=failed,
    )
    when, held = moment(evidence), holdings(evidence)
    error = _error_of(evidence, chosen, job) if failed else None
    memory = _memory_of_snapshot(evidence.alive, by_category(held), error)
    facts = Facts(
        error=error,
        moment=when,
        memory=memory,
        holdings=held,
        checkpointed=any(site.recomputes for site in sites),
        expandable=any(segment.expandable for segment in segments),
    )
    return Diagnosis(
        file=name,
        source="snapshot",
        device=chosen,
        moment=when,
        out_of_memory=error,
        memory=memory,
        holdings=held,
        changes=changes(facts, job) if failed or (job is not None and job.row.fits is False) else (),
        prediction=None if job is None else predicted(job, when, memory, held, error),
        notes=(*_notes(snapshot, evidence, chosen), *(job.notes if job is not None else ())),
        unknown=tuple(_unknown(evidence, memory)),
    )


def _device(name: str, snapshot: Snapshot, wanted: int | None) -> int:
    """The device to explain: the one that the user chose, else the one with an error, else the one with most memory."""
    devices = snapshot.devices
    if wanted is not None:
        if wanted not in devices:
            raise UnreadableDiagnosis(
                f"{name} has nothing of GPU {wanted}", hint=f"it has {', '.join(map(str, devices)) or 'no GPU'}"
            )
        return wanted
    if not devices:
        raise UnreadableDiagnosis(f"{name} is an empty snapshot", hint=f"no GPU memory was in use; {_RECORD}")

    def weight(device: int) -> tuple[bool, int]:
        failed = device < len(snapshot.traces) and OOM in snapshot.traces[device].actions
        return failed, sum(segment.total_bytes for segment in segments_of(snapshot, device))

    return max(devices, key=weight)


def _error_of(evidence: Evidence, device: int, job: DiagnosedJob | None) -> OutOfMemory:
    """The error as far as the trace contains it. `requested_bytes` are those that the allocator requested from the driver, as in
    PyTorch's message. The GPU's size is taken from the job, because a trace does not have it.
    """
    trace, alive = evidence.trace, evidence.alive
    return OutOfMemory(
        gpu=device,
        requested_bytes=allocation_size(round_up(trace.sizes[alive.at]), AllocatorConf()),
        free_bytes=trace.addresses[alive.at],
        total_bytes=None if job is None else job.report.gpu_memory_bytes,
        allocated_bytes=alive.allocated_bytes,
        unallocated_bytes=alive.reserved_bytes - alive.allocated_bytes,
    )


def _memory_of_snapshot(
    alive: Alive, categories: dict[Category, int], error: OutOfMemory | None
) -> dict[Category, int]:
    found = dict(sorted(categories.items(), key=lambda item: -item[1]))
    found["fragmentation"] = alive.reserved_bytes - alive.allocated_bytes
    if error is not None and error.free_bytes is not None:
        if error.total_bytes is not None:
            found["outside"] = max(error.total_bytes - error.free_bytes - alive.reserved_bytes, 0)
        found["free"] = error.free_bytes
    return {name: n for name, n in found.items() if n}


def _notes(snapshot: Snapshot, evidence: Evidence, device: int) -> Iterator[str]:
    errors = sum(action == OOM for action in evidence.trace.actions)
    if errors > 1:
        yield f"{errors} out-of-memory errors were recorded; the diagnosis is of the last one"
    if not errors and len(evidence.trace):
        yield "no out-of-memory error was recorded; the moment is the peak of allocated memory"
    others = [other for other in snapshot.devices if other != device]
    if others:
        yield f"the snapshot also has GPU {', '.join(map(str, others))}; --device chooses one"


def _unknown(evidence: Evidence, memory: dict[Category, int]) -> Iterator[str]:
    """Sentences about what is unknown, and why."""
    trace, live = evidence.trace, evidence.alive.live
    if not len(trace):
        yield f"the moment and most categories: the history was not recorded; {_RECORD}"
    elif all(trace.stacks[at] == NO_STACK for at, action in enumerate(trace.actions) if action == ALLOC):
        yield "the categories: stacks were not recorded; call _record_memory_history(context='all')"
    dropped = [item for item in live if item.event is None and item.stack != NO_STACK]
    if dropped and len(trace):
        yield (
            "events before the first recorded one: the history was full; record more with "
            f"_record_memory_history(max_entries=...), now {len(trace)} or less"
        )
    if "unattributed" in memory and len(trace):
        yield "what was allocated before recording began; start recording before the model is made"
    if "outside" not in memory:
        yield "memory outside of PyTorch (CUDA context, NCCL, other processes), which a snapshot does not have"
