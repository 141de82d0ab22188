"""Storages whose sizes are not polynomials: those with one row per token of a loss's tile, or one entry per part of a sum."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

from fsdp_advisor.model.tape import Parts, Tiled


@dataclass(frozen=True, slots=True)
class Tile:
    """The rule of a loss's tiles (as in `Tiled`), and the tokens of one tile in the current step.

    `sequences`: the number of sequences per example of the micro-batch. `has_second`: whether the step has a second tile, or may have one
    because it is recorded for every length. `is_second`: whether the rule is that of storages that only a second tile needs.
    """

    unscored: int
    scored: int
    most: int
    parts: int
    ignored: float
    tokens: int
    sequences: int
    has_second: bool
    is_second: bool = False

    @classmethod
    def of(
        cls,
        labels_shape: tuple[int, ...],
        *,
        unscored: int = 0,
        scored: int = 0,
        most: int = 0,
        parts: int = 0,
        ignored: float = 0.0,
        sequences: int = 1,
    ) -> Tile:
        """The tile of a step with labels of this shape: (`sequences` * B, T)."""
        tokens = Tiled(1, unscored, scored, most, parts, ignored).bytes_at(*labels_shape)
        second = Tiled(0, unscored, scored, most, parts, ignored, second_bytes=1).bytes_at(*labels_shape)
        has_second = bool(second) or _Current.records
        return cls(unscored, scored, most, parts, ignored, tokens, sequences, has_second)

    @property
    def second(self) -> Tile:
        return replace(self, is_second=True)

    def size_of(self, n_bytes: int) -> Tiled:
        """The size of a storage that has `n_bytes` in the current step."""
        per_token, second = (0, n_bytes) if self.is_second else (n_bytes // self.tokens * self.sequences, 0)
        return Tiled(
            per_token, self.unscored, self.scored, self.most // self.sequences, self.parts, self.ignored, second
        )


class _Current:
    records: bool = False
    tile: Tile | None = None
    parts: Parts | None = None


@contextlib.contextmanager
def tiles_recorded() -> Iterator[None]:
    """Context in which a step is recorded, so that it has what a second tile needs."""
    _Current.records = True
    try:
        yield
    finally:
        _Current.records = False


@contextlib.contextmanager
def sized_by(tile: Tile | None) -> Iterator[None]:
    """Context in which every storage that is allocated has one row per token of the tile."""
    before, _Current.tile = _Current.tile, tile
    try:
        yield
    finally:
        _Current.tile = before


def current_tile() -> Tile | None:
    return _Current.tile


@contextlib.contextmanager
def in_parts(parts: Parts) -> Iterator[None]:
    """Context in which every allocated storage has one entry for each part of a sum. The recorded size is that of one entry."""
    _Current.parts = parts
    try:
        yield
    finally:
        _Current.parts = None


def current_parts() -> Parts | None:
    return _Current.parts
