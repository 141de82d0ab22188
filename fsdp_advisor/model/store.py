"""Profiles as bytes, the format of the catalog and the cache.

A stored profile is a JSON header, a zero byte, and the events of all tapes in three columns, as a zlib or LZMA stream or as they are. The
columns are the kinds of the events (one byte each), their first arguments and their second arguments (little-endian, two bytes each, or
four if two are too few).

Tapes share most of their segments and sizes, so these are stored once. Reading is lazy: a tape is decoded on first use, and the
decoded tape is dropped when it has not been used for a while.
"""

from __future__ import annotations

import json
import lzma
import sys
import zlib
from array import array
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from fsdp_advisor.model.profile import Buffer, Parameter, Profile, Run, Stack, Unit
from fsdp_advisor.model.tape import (
    Chunked,
    Divided,
    Polynomial,
    Quantity,
    Recomputed,
    Segment,
    Size,
    Staging,
    Tape,
    Tiled,
)

FORMAT = 4
RECORDING = 25
"""The version of recordings. Increase it whenever the recorder's tapes change: profiles with another version are recorded
again.
"""
_COLUMNS, _WIDE_COLUMNS = "BHH", "BII"
"""The `array` type code of each column of events, and those of a profile with a number that needs more than two bytes. Code that loops
over the tokens of a sequence allocates that many storages in one layer.
"""
_XZ = b"\xfd7zXZ\0"
"""The first bytes of an LZMA stream. Those of zlib are never `{`."""
_TILED_LENGTHS = len(Tiled._fields) - len(Tiled._field_defaults), len(Tiled._fields)
"""The lengths of a tile's row. Recordings that were shipped before the fields with defaults existed lack these."""


class StoredTapes(MutableMapping[str, Tape]):
    """The tapes of a stored profile. They stay compressed and are decoded on use."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._tapes: dict[str, Tape] = {sys.intern(key): StoredTape(data, key) for key in _opened(data).header["tapes"]}

    def __getitem__(self, key: str) -> Tape:
        return self._tapes[key]

    def __setitem__(self, key: str, tape: Tape) -> None:
        self._tapes[key] = tape

    def __delitem__(self, key: str) -> None:
        raise TypeError("a profile keeps its tapes")

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._tapes))

    def __len__(self) -> int:
        return len(self._tapes)


class StoredTape(Tape):
    """A tape that is decoded on use, and dropped after enough other tapes have been used."""

    def __init__(self, data: bytes, key: str) -> None:
        self.__dict__.update(_data=data, _key=key)

    @property
    def sizes(self) -> tuple[Size, ...]:
        return self.read().sizes

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.read().segments

    @property
    def births(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        return self.read().births

    def read(self) -> Tape:
        return _tape(self.__dict__["_data"], self.__dict__["_key"])


@dataclass(frozen=True, eq=False, slots=True)
class _Opened:
    """The two parts of a stored profile: header and events."""

    header: dict[str, Any]
    columns: tuple[array[int], ...]


def decompressed(data: bytes) -> bytes:
    """The bytes of a zlib or LZMA stream. Bytes that are a profile already, which begins with JSON, are returned as they are."""
    if data[:6] == _XZ:
        return lzma.decompress(data)
    return data if data[:1] == b"{" else zlib.decompress(data)


@lru_cache(maxsize=2)
def _opened(data: bytes) -> _Opened:
    text, _, blob = decompressed(data).partition(b"\0")
    header = json.loads(text)
    if header["format"] != FORMAT:
        raise ValueError(f"format {header['format']}, not {FORMAT}")
    header["sizes"] = [_size(row) for row in header["sizes"]]
    columns = tuple(array(code) for code in header.get("columns", _COLUMNS))
    count, at = len(blob) // sum(column.itemsize for column in columns), 0
    for column in columns:
        column.frombytes(blob[at : at + count * column.itemsize])
        at += count * column.itemsize
        if sys.byteorder == "big":
            column.byteswap()
    return _Opened(header, columns)


@lru_cache(maxsize=8)
def _tape(data: bytes, key: str) -> Tape:
    opened = _opened(data)
    sizes = opened.header["sizes"]

    def segment(row: list[Any]) -> Segment:
        phase, stack, layer, start, count, matmul, attention, traffic, operators, *more = row
        columns = [column[start : start + count] for column in opened.columns]
        events = tuple(zip(*columns, strict=True))
        recomputed = None
        if more and more[3] is not None:
            recomputed = Recomputed(sizes[more[0]], sizes[more[1]], sizes[more[2]], more[3])
        copies = tuple([sizes[i] for i in more[4:]])
        work = sizes[matmul], sizes[attention], sizes[traffic], operators
        return Segment(phase, stack, layer, events, *work, recomputed, copies)

    return Tape(tuple(sizes), tuple([segment(opened.header["segments"][i]) for i in opened.header["tapes"][key]]))


class _Pool:
    """The sizes and segments of all tapes, each once: `sizes` by their numbers, `rows` of segments, and their events in `columns`."""

    def __init__(self) -> None:
        self.sizes: dict[Size, int] = {}
        self.rows: list[list[Any]] = []
        self.columns = tuple(array(code) for code in _WIDE_COLUMNS)
        self._numbers: dict[Any, int] = {}

    def _size(self, size: Size) -> int:
        return self.sizes.setdefault(size, len(self.sizes))

    def segment(self, tape: Tape, s: Segment) -> int:
        """The number of a tape's segment. Adds the segment if it is new."""
        events = tuple([(op, a if op else self._size(tape.sizes[a]), b) for op, a, b in s.events])  # Op.ALLOC is 0
        work: tuple[int | None, ...] = (
            *map(self._size, (s.matmul_flops, s.attention_flops, s.traffic_bytes)),
            s.operators,
        )
        if s.recomputed or s.host_copies:
            again = s.recomputed
            work += (*map(self._size, again[:3]), again.operators) if again else (None,) * 4
            work += tuple(map(self._size, s.host_copies))
        place = (s.phase, s.stack, s.layer)
        if (place, work, events) not in self._numbers:
            self._numbers[place, work, events] = len(self.rows)
            self.rows.append([*place, len(self.columns[0]), len(events), *work])
            for part, column in enumerate(self.columns):
                column.extend([event[part] for event in events])
        return self._numbers[place, work, events]


def dump(profile: Profile, *, small: bool = False) -> bytes:
    """The profile with all its tapes. `small`: LZMA, which is smaller but slower to write and read."""
    pool = _Pool()
    tapes = {key: [pool.segment(tape, s) for s in tape.segments] for key, tape in sorted(profile.tapes.items())}
    header = {
        "format": FORMAT,
        "name": profile.name,
        "task": profile.task,
        "max_seq_len": profile.max_seq_len,
        "config": profile.config,
        "versions": profile.versions,
        "order": profile.order,
        "root": _unit_row(profile.root),
        "stacks": [
            {"path": s.path, "runs": [[r.pattern, r.repeats] for r in s.runs], **_pooled_units(s.units)}
            for s in profile.stacks
        ],
        "sizes": list(pool.sizes),
        "segments": pool.rows,
        "tapes": tapes,
        "refusals": profile.refusals,
    }
    columns = pool.columns
    if all(max(column, default=0) < 1 << 16 for column in columns):
        columns = tuple(array(code, column) for code, column in zip(_COLUMNS, columns, strict=True))
    else:
        header["columns"] = _WIDE_COLUMNS
    if sys.byteorder == "big":
        for column in columns:
            column.byteswap()
    raw = json.dumps(header, separators=(",", ":")).encode() + b"\0" + b"".join(column.tobytes() for column in columns)
    return lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME) if small else zlib.compress(raw, 6)


def load(data: bytes) -> Profile:
    """The profile in the bytes of `dump`. Raises ValueError if the bytes are not a profile."""
    try:
        header = _opened(data).header
        return Profile(
            name=header["name"],
            task=header["task"],
            root=_unit(header["root"]),
            stacks=tuple(_stack(s) for s in header["stacks"]),
            order=tuple(header["order"]),
            max_seq_len=header["max_seq_len"],
            config=header["config"],
            versions=header["versions"],
            tapes=StoredTapes(data),
            refusals=dict(header.get("refusals", {})),
        )
    except (KeyError, TypeError, IndexError, zlib.error, lzma.LZMAError, EOFError, UnicodeDecodeError) as error:
        raise ValueError(f"not a stored profile: {type(error).__name__}: {error}") from error


def _size(row: list[Any]) -> Size:
    """The size that a stored row describes, by the number and type of its values."""
    if len(row) in _TILED_LENGTHS:
        return Tiled(*row)
    if len(row) == len(Divided._fields):
        return Divided(_quantity(row[0]), *row[1:])
    return Staging(*map(_quantity, row)) if len(row) == len(Staging._fields) else _quantity(row)


def _quantity(row: list[Any]) -> Quantity:
    """The quantity that a stored row describes: a polynomial's coefficients, or the tokens of a chunk and two polynomials."""
    if len(row) == len(Chunked._fields):
        chunk, of_tokens, of_chunks = row
        return Chunked(chunk, tuple(of_tokens), tuple(of_chunks))
    return cast(Polynomial, tuple(row))


def _unit_row(unit: Unit) -> list[Any]:
    return [
        unit.kind,
        [_parameter_row(p) for p in unit.parameters],
        [_buffer_row(b) for b in unit.buffers],
    ]


def _parameter_row(p: Parameter) -> list[Any]:
    row = [p.name, p.shape, p.trainable, p.tied, p.role, p.dtype]
    if not p.module_runs:
        return [*row, p.matrix, p.in_other_layers, False]
    if p.in_other_layers:
        return [*row, p.matrix, True]
    return [*row, p.matrix] if p.matrix else row


def _buffer_row(b: Buffer) -> list[Any]:
    row = [b.name, b.shape, b.dtype, b.bytes_per_element]
    if b.is_usual:
        return [*row, b.registered, b.matrix, True]
    if b.matrix:
        return [*row, b.registered, b.matrix]
    return row if b.registered else [*row, False]


def _pooled_units(units: tuple[Unit, ...]) -> dict[str, Any]:
    rows: list[Any] = []
    index = []
    for unit in units:
        row = _unit_row(unit)
        if row not in rows:
            rows.append(row)
        index.append(rows.index(row))
    return {"kinds": rows, "units": index}


def _unit(row: list[Any]) -> Unit:
    kind, parameters, buffers = row
    return Unit(
        kind,
        tuple(_parameter(row) for row in parameters),
        tuple(_buffer(row) for row in buffers),
    )


def _parameter(row: list[Any]) -> Parameter:
    name, shape, trainable, tied, role, dtype, *more = row
    matrix = tuple(more[0]) if more and more[0] else None
    in_other_layers, module_runs = len(more) > 1 and more[1], len(more) < 3
    return Parameter(
        name, tuple(shape), trainable, tuple(tied), role, dtype, matrix, in_other_layers, module_runs=module_runs
    )


def _buffer(row: list[Any]) -> Buffer:
    name, shape, dtype, size, *more = row
    registered = more[0] if more else True
    matrix = tuple(more[1]) if len(more) > 1 and more[1] else None
    return Buffer(name, tuple(shape), dtype, size, registered, matrix, is_usual=len(more) > 2)


def _stack(row: dict[str, Any]) -> Stack:
    kinds = [_unit(k) for k in row["kinds"]]
    runs = tuple(Run(tuple(pattern), repeats) for pattern, repeats in row["runs"])
    return Stack(row["path"], tuple(kinds[i] for i in row["units"]), runs)
