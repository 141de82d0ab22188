"""Read a pickle of builtin containers without running anything and without keeping all of it.

A pickle may call any function when Python's unpickler reads it, and a snapshot comes from others. This reader knows only the
opcodes that make None, booleans, numbers, text, lists, tuples and dictionaries; it refuses all others, which name classes and
functions. `compact` replaces the items of a list as they are read: a batch of at most 1000, because that is how Python's
pickler writes lists (Modules/_pickle.c, BATCHSIZE). So memory contains only what `compact` keeps, not the whole file.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from mmap import mmap
from typing import Any

Compact = Callable[[list[Any]], list[Any]]


class PickleRefused(ValueError):
    """The bytes are not a pickle of builtin containers. `truncated`: whether they end in the middle of one."""

    def __init__(self, message: str, *, truncated: bool = False) -> None:
        super().__init__(message)
        self.truncated = truncated


_REFERENCES = re.compile(rb"\]\x94\(((?:h.|j.{4}|\x95.{8}){2,999})e", re.DOTALL)
"""Matches a memoized list of objects that were read before, such as the frames of a stack: one match instead of a hundred opcodes."""
_REFERENCE = re.compile(rb"h(.)|j(.{4})|\x95.{8}", re.DOTALL)
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_CONSTANTS = {ord("N"): None, 0x88: True, 0x89: False}
_NUMBERS = {ord("M"): struct.Struct("<H"), ord("J"): struct.Struct("<i"), ord("G"): struct.Struct(">d")}
_LONG4 = 0x8B
_LENGTHS = {ord("X"): struct.Struct("<I"), 0x8D: struct.Struct("<Q"), _LONG4: struct.Struct("<I")}
"""Opcodes with a length: long text, very long text, and very long integers."""
_LONG_INDEX = struct.Struct("<I")
_KEY_TYPES = {str, int}
_PUTS = {ord("q"): struct.Struct("<B"), ord("r"): _LONG_INDEX}


def read_pickle(data: mmap | bytes, compact: Compact) -> Any:
    """The object that a pickle describes, with the items of each list as `compact` returns them.

    `compact` gets items that are complete, except that a list in them may get more items later. Its result must not depend on
    the identity of a dictionary that it drops: the reader forgets it. Raises PickleRefused.
    """
    try:
        return _Reader(data, compact).read()
    except (IndexError, struct.error) as error:
        raise PickleRefused("the file ends in the middle of a pickle", truncated=True) from error
    except (TypeError, AttributeError, KeyError, ValueError, OverflowError) as error:
        if isinstance(error, PickleRefused):
            raise
        raise PickleRefused("the file is not a valid pickle") from error


class _Reader:
    def __init__(self, data: mmap | bytes, compact: Compact) -> None:
        self._data, self._compact = data, compact
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._purged = 0
        self._texts: dict[bytes, str] = {}
        self._tuples: dict[Any, Any] = {}
        self._references: dict[bytes, list[Any]] = {}

    def read(self) -> Any:
        data, stack, memo, marks, texts = self._data, self._stack, self._memo, self._marks, self._texts
        actions, long_index = self._actions(), _LONG_INDEX.unpack_from
        if data[:1] != b"\x80":
            raise PickleRefused("the file is not a pickle")
        at = 2
        while True:  # the opcodes of an event are handled here, because a function call each would double the time
            opcode = data[at]
            at += 1
            if opcode == 0x6A:  # LONG_BINGET
                stack.append(memo[long_index(data, at)[0]])
                at += 4
            elif opcode == 0x68:  # BINGET
                stack.append(memo[data[at]])
                at += 1
            elif opcode == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif opcode == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif opcode == 0x8A:  # LONG1
                end = at + 1 + data[at]
                stack.append(int.from_bytes(data[at + 1 : end], "little", signed=True))
                at = end
            elif opcode == 0x28:  # MARK
                marks.append(len(stack))
            elif opcode == 0x8C:  # SHORT_BINUNICODE
                end = at + 1 + data[at]
                raw = data[at + 1 : end]
                text = texts.get(raw)
                stack.append(self._text(raw) if text is None else text)
                at = end
            elif opcode == 0x2E:  # STOP
                return stack.pop()
            elif (action := actions.get(opcode)) is not None:
                self._at = at
                action(opcode)
                at = self._at
            else:
                raise PickleRefused(f"the pickle has opcode {bytes([opcode])!r}, which no snapshot has")

    def _text(self, raw: bytes) -> str:
        """The text of some bytes. Equal texts are the same object, which saves memory because the memo keeps all."""
        return self._texts.setdefault(raw, raw.decode("utf-8", "surrogatepass"))

    def _actions(self) -> dict[int, Callable[[int], None]]:
        return {
            ord("}"): lambda _: self._stack.append({}),
            ord("]"): self._list,
            ord(")"): lambda _: self._stack.append(()),
            ord("e"): lambda _: self._extend(self._since_mark()),
            ord("a"): lambda _: self._extend([self._stack.pop()]),
            ord("u"): self._set_items,
            ord("s"): self._set_item,
            ord("t"): lambda _: self._stack.append(tuple(self._since_mark())),
            0x95: lambda _: self._skip(8),
            **dict.fromkeys(_TUPLES, self._tuple),
            **dict.fromkeys(_CONSTANTS, lambda opcode: self._stack.append(_CONSTANTS[opcode])),
            **dict.fromkeys(_NUMBERS, self._number),
            **dict.fromkeys(_LENGTHS, self._sized),
            **dict.fromkeys(_PUTS, self._put),
        }

    def _unpack(self, kind: struct.Struct) -> Any:
        value = kind.unpack_from(self._data, self._at)[0]
        self._at += kind.size
        return value

    def _skip(self, n_bytes: int) -> None:
        self._at += n_bytes

    def _since_mark(self) -> list[Any]:
        if not self._marks:
            raise ValueError
        at = self._marks.pop()
        items = self._stack[at:]
        del self._stack[at:]
        return items

    def _list(self, _: int) -> None:
        found = _REFERENCES.match(self._data, self._at - 1)
        if found is None:
            self._stack.append([])
            return
        items = self._references.get(found[1])
        if items is None:
            items = self._referenced(found[1])
            self._references[found[1]] = items
        self._stack.append(items)
        self._memo.append(items)
        self._at = found.end()

    def _referenced(self, text: bytes) -> list[Any]:
        """The list of the objects to which the opcodes in `text` refer. Equal references return the same list."""
        indices = [
            short[0] if short else _LONG_INDEX.unpack(long)[0]
            for short, long in (m.groups() for m in _REFERENCE.finditer(text))
            if short or long
        ]
        return self._compact([self._memo[index] for index in indices])

    def _extend(self, items: list[Any]) -> None:
        kept = self._compact(items)
        self._stack[-1].extend(kept)
        if kept is not items:
            self._forget(items)

    def _forget(self, items: list[Any]) -> None:
        """Drop the items from the memo: nothing refers to a dictionary of the allocator a second time."""
        gone = {id(item) for item in items if type(item) is dict}
        memo = self._memo
        for at in range(self._purged, len(memo)):
            if id(memo[at]) in gone:
                memo[at] = None
        self._purged = len(memo)

    def _set_items(self, _: int) -> None:
        items = self._since_mark()
        keys = items[::2]
        if not set(map(type, keys)) <= _KEY_TYPES:  # hashing a tuple of tuples can take forever
            raise TypeError
        self._stack[-1].update(zip(keys, items[1::2], strict=True))

    def _set_item(self, _: int) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        if type(key) not in _KEY_TYPES:
            raise TypeError
        self._stack[-1][key] = value

    def _tuple(self, opcode: int) -> None:
        size = _TUPLES[opcode]
        items = tuple(self._stack[-size:])
        del self._stack[-size:]
        plain = all(isinstance(item, str | int | float) for item in items)
        self._stack.append(self._tuples.setdefault(items, items) if plain else items)

    def _number(self, opcode: int) -> None:
        self._stack.append(self._unpack(_NUMBERS[opcode]))

    def _sized(self, opcode: int) -> None:
        size = self._unpack(_LENGTHS[opcode])
        if self._at + size > len(self._data):
            raise IndexError
        text = self._data[self._at : self._at + size]
        self._at += size
        self._stack.append(int.from_bytes(text, "little", signed=True) if opcode == _LONG4 else self._text(text))

    def _put(self, opcode: int) -> None:
        index = self._unpack(_PUTS[opcode])
        if index > len(self._memo):
            raise PickleRefused("the file is not a valid pickle")
        self._memo[index : index + 1] = [self._stack[-1]]
