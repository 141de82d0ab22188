"""Fit sizes recorded at a few (B, T) points exactly by polynomials over {1, B, T, BT, BT^2, T^2}."""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from itertools import combinations
from typing import cast

from fsdp_advisor.errors import NotPolynomial
from fsdp_advisor.model.tape import MONOMIALS, ZERO, Chunked, Polynomial, Quantity


@lru_cache(maxsize=65536)
def fit(bs: tuple[int, ...], ts: tuple[int, int, int], values: tuple[int, ...]) -> Polynomial:
    """The polynomial through `values` at the grid bs x ts (B outermost). One B gives a polynomial only in T.

    Raises NotPolynomial if no polynomial with integer coefficients passes through the points.
    >>> fit((2, 3), (4, 6, 9), tuple(5 + 2 * b * t * t for b in (2, 3) for t in (4, 6, 9)))
    (5, 0, 0, 0, 2, 0)
    """
    terms = range(len(MONOMIALS)) if len(bs) > 1 else (0, 2, 5)
    found = _solve([[_monomial(term, b, t) for b in bs for t in ts] for term in terms], values)
    if found is None:
        raise NotPolynomial(
            f"a tensor's size is not a polynomial in micro-batch and sequence length: {values} at B {bs}, T {ts}"
        )
    coefficients = dict(zip(terms, found, strict=True))
    return cast(Polynomial, tuple(coefficients.get(term, 0) for term in range(len(MONOMIALS))))


MOST_TERMS = 3


@lru_cache(maxsize=65536)
def fit_terms(
    points: tuple[tuple[int, int], ...], values: tuple[int, ...], chunks: tuple[int, ...] = ()
) -> Quantity | None:
    """The quantity with the fewest terms that equals `values` at three or more points (B, T); None if there is none.

    It has at most `MOST_TERMS` terms, and fewer than points, so that at least one point confirms it. `chunks`: possible numbers of tokens
    of a chunk; a term may contain the number of chunks instead of T. If all points have the same B, the result depends only on T.
    >>> fit_terms(((2, 48), (3, 112), (7, 5003)), tuple(5 * b * t - 9 * b for b, t in ((2, 48), (3, 112), (7, 5003))))
    (0, -9, 0, 5, 0, 0)
    """
    if not any(values):
        return ZERO
    for chunk in (0, *chunks):
        for terms, vectors in _columns(points, chunk):
            if (found := _solve(vectors, values)) is not None:
                return _quantity(chunk, dict(zip(terms, found, strict=True)))
    return None


def _quantity(chunk: int, coefficients: dict[tuple[bool, int], int]) -> Quantity:
    """The quantity with these coefficients. Their keys: (whether the monomial has the number of chunks instead of T, monomial's index)."""
    of_tokens, of_chunks = (
        cast(Polynomial, tuple(coefficients.get((in_chunks, term), 0) for term in range(len(MONOMIALS))))
        for in_chunks in (False, True)
    )
    return Chunked(chunk, of_tokens, of_chunks) if any(of_chunks) else of_tokens


@lru_cache(maxsize=64)
def _columns(
    points: tuple[tuple[int, int], ...], chunk: int
) -> list[tuple[tuple[tuple[bool, int], ...], list[list[int]]]]:
    """Every combination of at most `MOST_TERMS` monomials, with their values at the points; short combinations first.

    If `chunk` is not 0, at least one monomial of each combination has the number of chunks.
    """
    one_b = len({b for b, _ in points}) == 1
    with_t = (2, 5) if one_b else (2, 3, 4, 5)
    plain = {(False, term): [_monomial(term, b, t) for b, t in points] for term in ((0,) if one_b else (0, 1)) + with_t}
    chunked = (
        {(True, term): [_monomial(term, b, -(-t // chunk)) for b, t in points] for term in with_t} if chunk else {}
    )
    columns = plain | chunked
    return [
        (terms, [columns[term] for term in terms])
        for count in range(1, min(MOST_TERMS, len(points) - 1) + 1)
        for terms in combinations(columns, count)
        if not chunk or any(in_chunks for in_chunks, _ in terms)
    ]


def _monomial(term: int, b: int, t: int) -> int:
    return (1, b, t, b * t, b * t * t, t * t)[term]


def _solve(vectors: list[list[int]], values: tuple[int, ...]) -> list[int] | None:
    """The integer coefficients with which the sum of the vectors is `values`; None if there are none, or several solutions."""
    rows = [[*map(Fraction, row)] for row in zip(*vectors, values, strict=True)]
    for column in range(len(vectors)):
        at = next((i for i in range(column, len(rows)) if rows[i][column]), None)
        if at is None:
            return None
        rows[column], rows[at] = rows[at], rows[column]
        pivot = rows[column]
        for row in (*rows[:column], *rows[column + 1 :]):
            if row[column]:
                share = row[column] / pivot[column]
                row[:] = [x - share * y for x, y in zip(row, pivot, strict=True)]
    found = [rows[i][-1] / rows[i][i] for i in range(len(vectors))]
    if any(row[-1] for row in rows[len(vectors) :]) or any(value.denominator != 1 for value in found):
        return None
    return [int(value) for value in found]
