"""The census of published measurements: each of their rows is predicted or rehearsed, or there is a reason."""

from __future__ import annotations

from published_census import ONLY_REHEARSED, PREDICTED, WITHOUT, predicted, read_census, rehearsed_ids

LINES = read_census()
OUTCOMES = {number: (line.outcome, line.reason) for line in LINES for number in line.ids}
ROWS = 978
"""Rows of the file of all published measurements."""


def test_every_published_row_is_in_one_line() -> None:
    assert sum(len(line.ids) for line in LINES) == len(OUTCOMES) == ROWS


def test_every_row_without_a_prediction_has_a_reason() -> None:
    assert {line.outcome for line in LINES} == {PREDICTED, ONLY_REHEARSED, WITHOUT}
    assert all(bool(line.reason) == (line.outcome != PREDICTED) for line in LINES)


def test_outcomes_are_those_of_the_kept_results() -> None:
    kept = predicted()
    assert {number: outcome for number, outcome in OUTCOMES.items() if number in kept} == {
        number: outcome for number, outcome in kept.items() if number in OUTCOMES
    }
    assert {number for number, (outcome, _) in OUTCOMES.items() if outcome == PREDICTED} <= set(kept)


def test_rows_that_are_only_rehearsed_have_a_rehearsal() -> None:
    assert {number for number, (outcome, _) in OUTCOMES.items() if outcome == ONLY_REHEARSED} <= set(rehearsed_ids())
