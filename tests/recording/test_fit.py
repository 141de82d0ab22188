"""Polynomials through few recordings."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from fsdp_advisor.model.tape import MONOMIALS, Chunked, Polynomial, value_at
from fsdp_advisor.recording.fit import fit_terms

POINTS = ((2, 48), (3, 112), (7, 5003))
GRID = (*POINTS, (2, 80), (2, 112), (3, 48), (3, 80))


def polynomial(**terms: int) -> Polynomial:
    a, b, c, d, e, f = (terms.get(name, 0) for name in ("one", "b", "t", "bt", "bt2", "t2"))
    return a, b, c, d, e, f


@pytest.mark.parametrize(
    "expected",
    [
        polynomial(),
        *(polynomial(**{name: 96}) for name in ("one", "b", "t", "bt", "bt2", "t2")),
        polynomial(bt=64, b=-64),
        polynomial(bt2=2, t2=4),
        polynomial(one=1024, bt=8),
    ],
    ids=str,
)
def test_two_terms_are_found(expected: Polynomial) -> None:
    assert fit_terms(POINTS, tuple(value_at(expected, b, t) for b, t in POINTS)) == expected


def test_three_points_confirm_two_terms_alone() -> None:
    assert len(MONOMIALS) == 6
    values = [8 * b * t + 4 * b + 100 for b, t in GRID]
    assert fit_terms(GRID[:3], tuple(values[:3])) is None
    assert fit_terms(GRID, tuple(values)) == polynomial(bt=8, b=4, one=100)


def test_the_number_of_chunks_is_a_term_if_the_size_of_chunks_is_given() -> None:
    values = tuple(640 * b * -(-t // 64) + 3 * b * t for b, t in GRID)
    assert fit_terms(GRID, values) is None
    assert fit_terms(GRID, values, (256, 64)) == Chunked(64, of_tokens=polynomial(bt=3), of_chunks=polynomial(bt=640))


def test_one_micro_batch_gives_a_polynomial_in_tokens() -> None:
    points = tuple((1, t) for _, t in POINTS)
    assert fit_terms(points, tuple(3 * t * t + 5 for _, t in points)) == polynomial(t2=3, one=5)
