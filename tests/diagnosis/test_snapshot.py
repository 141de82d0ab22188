"""Reading snapshots: equal to Python's unpickler, without running anything, in bounded memory."""

from __future__ import annotations

import gzip
import io
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from fsdp_advisor.diagnosis import diagnose_file
from fsdp_advisor.diagnosis.pickle_reader import PickleRefused, read_pickle
from fsdp_advisor.diagnosis.snapshot import ACTIONS, Snapshot, read_snapshot
from fsdp_advisor.errors import UnreadableDiagnosis

DATA = Path(__file__).parent / "data"
NAMES = sorted(path.name.removesuffix(".pickle.gz") for path in DATA.glob("*.pickle.gz"))


def recorded(name: str) -> Any:
    """The snapshot as Python reads it."""
    return pickle.loads(gzip.decompress((DATA / f"{name}.pickle.gz").read_bytes()))


def as_is(items: list[Any]) -> list[Any]:
    return items


def frames_of(stack: Any) -> list[tuple[str, int, str]]:
    return [(frame["filename"], frame["line"], frame["name"]) for frame in stack]


def events_of(snapshot: Snapshot, device: int) -> list[tuple[str, int, int, list[tuple[str, int, str]]]]:
    trace = snapshot.traces[device]
    columns = zip(trace.actions, trace.addresses, trace.sizes, trace.stacks, strict=True)
    return [
        (ACTIONS[a], address, size, list(map(tuple, snapshot.stacks[stack]))) for a, address, size, stack in columns
    ]


@pytest.mark.parametrize("protocol", [2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_every_event_and_block_equals_pythons_reading(name: str, protocol: int) -> None:
    content = recorded(name)
    found = read_snapshot(pickle.dumps(content, protocol=protocol))
    for device, events in enumerate(content["device_traces"]):
        expected = [
            (e["action"], e.get("addr", e.get("device_free")), e["size"], frames_of(e.get("frames", [])))
            for e in events
        ]
        assert events_of(found, device) == expected
    for segment, other in zip(found.segments, content["segments"], strict=True):
        assert segment.total_bytes == other["total_size"]
        blocks = [
            (b.address, b.size, b.requested, b.state, list(map(tuple, found.stacks[b.stack]))) for b in segment.blocks
        ]
        assert blocks == [
            (b["address"], b["size"], b["requested_size"], b["state"], frames_of(b["frames"])) for b in other["blocks"]
        ]


@pytest.mark.parametrize(
    "value", [[], {}, (), None, True, -1, 2**70, 1.5, "ü" * 300, [[1, (2, "x", None)], {"a": {}}], (1, 2, 3, 4)]
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_builtin_values_are_read(value: Any, protocol: int) -> None:
    assert read_pickle(pickle.dumps(value, protocol=protocol), as_is) == value


class Malicious:
    """Runs a function when Python's unpickler reads it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_a_malicious_pickle_is_refused_and_runs_nothing(protocol: int, tmp_path: Path) -> None:
    touched, file = tmp_path / "touched", tmp_path / "bad.pickle"
    file.write_bytes(pickle.dumps({"segments": [Malicious(touched)], "device_traces": []}, protocol=protocol))
    with pytest.raises(UnreadableDiagnosis):
        diagnose_file(file)
    assert not touched.exists()


def bomb(depth: int = 60) -> Any:
    """A tuple of few objects that would take 2**depth steps to hash, compare or print."""
    value: Any = ()
    for _ in range(depth):
        value = (value, value)
    return value


EVENT = {"action": "alloc", "addr": 1, "size": 1, "stream": 0}
BOMBS = {
    "key": b"\x80\x02}q\x00(" + pickle.dumps(bomb(), 2)[2:-1].replace(b"q\x00", b"") + b"K\x01u.",
    "action": pickle.dumps({"segments": [], "device_traces": [[{**EVENT, "action": bomb()}]]}),
    "size": pickle.dumps({"segments": [], "device_traces": [[{**EVENT, "size": bomb()}]]}),
    "frame": pickle.dumps(
        {"segments": [], "device_traces": [[{**EVENT, "frames": [{"filename": bomb(), "line": 1, "name": "f"}]}]]}
    ),
    "state": pickle.dumps(
        {"segments": [{"total_size": 1, "blocks": [{"size": 1, "state": bomb()}]}], "device_traces": []}
    ),
    "segment": pickle.dumps({"segments": [{"total_size": bomb(), "blocks": []}], "device_traces": []}),
    "settings": pickle.dumps({"segments": [], "device_traces": [], "allocator_settings": {"a": bomb()}}),
}


@pytest.mark.parametrize("name", BOMBS)
def test_nested_objects_take_no_time(name: str, tmp_path: Path) -> None:
    file = tmp_path / "bomb.pickle"
    file.write_bytes(BOMBS[name])
    with pytest.raises(UnreadableDiagnosis) as caught:
        diagnose_file(file)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("part", [0.001, 0.3, 0.9, 0.9999])
def test_a_truncated_snapshot_is_refused(part: float, tmp_path: Path) -> None:
    content = gzip.decompress((DATA / "steps.pickle.gz").read_bytes())
    file = tmp_path / "half.pickle"
    file.write_bytes(content[: int(part * len(content))])
    with pytest.raises(UnreadableDiagnosis, match="ends in the middle") as caught:
        diagnose_file(file)
    assert "dump it again" in caught.value.hint


def test_a_damaged_snapshot_is_refused_and_never_crashes() -> None:
    content = bytearray(gzip.decompress((DATA / "loss_oom.pickle.gz").read_bytes()))
    for at in range(2, len(content), 997):
        damaged = bytes(content[:at]) + bytes([content[at] ^ 0x15]) + bytes(content[at + 1 :])
        try:
            read_snapshot(damaged)
        except ValueError as error:
            assert type(error).__name__ in ("PickleRefused", "NotASnapshot")


@pytest.mark.parametrize(
    "value", [[1, 2], {"weights": 3}, "text", {"segments": 3}, {"segments": [1]}, {"segments": [{}]}]
)
def test_a_pickle_of_something_else_is_refused(value: Any, tmp_path: Path) -> None:
    file = tmp_path / "other.pickle"
    file.write_bytes(pickle.dumps(value))
    with pytest.raises(UnreadableDiagnosis, match=r"other\.pickle"):
        diagnose_file(file)


@pytest.mark.parametrize("content", [b"", b"\x1f\x8b", b"\x80", b"\x80\x04.", b"PK\x03\x04", b"\x00\xff" * 50])
def test_files_that_are_nothing_are_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(content)
    with pytest.raises(UnreadableDiagnosis):
        diagnose_file(file)


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(UnreadableDiagnosis, match="cannot read"):
            diagnose_file(path)


def without(value: Any, names: set[str]) -> Any:
    """A copy without some keys; lists of frames stay as they are."""
    if isinstance(value, list):
        return [without(item, names) for item in value]
    if isinstance(value, dict):
        return {
            key: item if key == "frames" else without(item, names) for key, item in value.items() if key not in names
        }
    return value


NEWER_KEYS = {
    "time_us", "compile_context", "user_metadata", "pool_id", "segment_pool_id", "allocator_settings", "external_annotations",
    "is_expandable",
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_keys_of_newer_versions_may_be_missing(name: str, tmp_path: Path) -> None:
    full, old = tmp_path / "full.pickle", tmp_path / "old.pickle"
    full.write_bytes(pickle.dumps(recorded(name)))
    old.write_bytes(pickle.dumps(without(recorded(name), NEWER_KEYS)))
    assert diagnose_file(old).memory == diagnose_file(full).memory


def test_memory_is_bounded_by_events_not_by_the_file() -> None:
    """A long history of the same stacks: the reader keeps less than 150 bytes per event, a fraction of the file."""
    content = recorded("fsdp2_forward_oom")
    trace = max(content["device_traces"], key=len)
    device = content["device_traces"].index(trace)
    content["device_traces"][device] = [
        {**event, "time_us": number, "frames": list(event.get("frames", []))} for number in range(30) for event in trace
    ]
    data = pickle.dumps(content)
    events = len(content["device_traces"][device])
    del content, trace
    once = read_peak(gzip.decompress((DATA / "fsdp2_forward_oom.pickle.gz").read_bytes()))
    assert read_peak(data) - once < 150 * events < len(data)


def read_peak(data: bytes) -> int:
    tracemalloc.start()
    read_snapshot(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return peak


def test_the_reader_stops_at_the_end_of_the_pickle() -> None:
    stream = io.BytesIO(pickle.dumps([1]) + b"rest")
    assert read_pickle(stream.getvalue(), as_is) == [1]


def test_text_is_not_a_pickle() -> None:
    with pytest.raises(PickleRefused):
        read_pickle(b"CUDA out of memory", as_is)
