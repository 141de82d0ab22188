"""Maps quantities onto pixels, and chooses the positions of ticks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values from `low` to `high` onto pixels from `start` to `end`, linearly or, with `log`, logarithmically."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        turn: Callable[[float], float] = math.log if self.log else float
        share = (turn(value) - turn(self.low)) / (turn(self.high) - turn(self.low))
        return self.start + share * (self.end - self.start)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values from low to high: 1, 2 or 5 times a power of ten apart.

    >>> ticks(0, 79, 4), ticks(0, 0.9, 3)
    ([0, 20, 40, 60], [0.0, 0.5])
    """
    step = (high - low) / about
    power = 10 ** math.floor(math.log10(step))
    step = next((m * power for m in (1, 2, 5) if m * power >= step), 10 * power)
    first = math.ceil(low / step)
    return [k * step for k in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """The ticks of a logarithmic axis: 1, 2 and 5 times powers of ten from `low` to `high`.

    >>> log_ticks(0.8, 60)
    [1.0, 2.0, 5.0, 10.0, 20.0, 50.0]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [v for p in powers for m in (1, 2, 5) if low <= (v := m * 10.0**p) <= high]


def power_ticks(low: float, high: float, base: int, most: int) -> list[float]:
    """Powers of `base` within low..high: all of them, or every second, third ..., so that there are at most `most`.

    >>> power_ticks(35, 70_000, 2, 4), power_ticks(3e8, 4e11, 10, 4)
    ([64.0, 512.0, 4096.0, 32768.0], [1000000000.0, 10000000000.0, 100000000000.0])
    """
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    return next(
        [float(base) ** power for power in range(first, last + 1) if power % stride == 0]
        for stride in range(1, last - first + 3)
        if (last // stride) - (first - 1) // stride <= most
    )


def short(value: float) -> str:
    """A tick's label.

    >>> short(20.0), short(0.5), short(1200)
    ('20', '0.5', '1,200')
    """
    return f"{value:,.0f}" if value == round(value) else f"{value:g}"
