"""Fit sizes recorded at a grid of (B, T) points exactly by polynomials over {1, B, T, BT, BT^2, T^2}."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from fsdp_advisor.errors import NotPolynomial
from fsdp_advisor.model.tape import Polynomial


def _quadratic(ts: Sequence[int], values: Sequence[int]) -> tuple[Fraction, Fraction, Fraction]:
    """(c0, c1, c2) of the parabola through three points (Newton's divided differences)."""
    t0, t1, t2 = ts
    d01 = Fraction(values[1] - values[0], t1 - t0)
    d12 = Fraction(values[2] - values[1], t2 - t1)
    c2 = (d12 - d01) / (t2 - t0)
    c1 = d01 - c2 * (t0 + t1)
    return values[0] - c1 * t0 - c2 * t0 * t0, c1, c2


@lru_cache(maxsize=65536)
def fit(bs: tuple[int, ...], ts: tuple[int, int, int], values: tuple[int, ...]) -> Polynomial:
    """The polynomial through `values` at the grid bs x ts (B outermost). One B gives a polynomial in T alone.

    Raises NotPolynomial where no integer polynomial passes through the points.
    >>> fit((2, 3), (4, 6, 9), tuple(5 + 2 * b * t * t for b in (2, 3) for t in (4, 6, 9)))
    (5, 0, 0, 0, 2, 0)
    """
    rows = [_quadratic(ts, values[i * 3 : i * 3 + 3]) for i in range(len(bs))]
    if len(bs) == 1:
        (c1, ct, ct2), (cb, cbt, cbt2) = rows[0], (Fraction(0),) * 3
    else:
        slopes = [(hi - lo) / (bs[1] - bs[0]) for lo, hi in zip(rows[0], rows[1], strict=True)]
        cb, cbt, cbt2 = slopes
        c1, ct, ct2 = (lo - slope * bs[0] for lo, slope in zip(rows[0], slopes, strict=True))
    coefficients = (c1, cb, ct, cbt, cbt2, ct2)
    if any(c.denominator != 1 for c in coefficients):
        raise NotPolynomial(
            f"a tensor's size is not a polynomial in micro-batch and sequence length: {values} at B {bs}, T {ts}"
        )
    a, b, c, d, e, f = (int(x) for x in coefficients)
    return a, b, c, d, e, f
