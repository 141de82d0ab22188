"""The survey of architectures: every one has a line, each exception has its reason, and a rotating few are surveyed again."""

from __future__ import annotations

import datetime
import random

import pytest
from matrix import ALL

pytest.importorskip("torch")

from architecture_survey import Line, architectures, read, survey

LINES = read()
CHEAP_PARAMETERS = 500_000_000
EXPECTED_EQUAL = 110
"""At least so many architectures agree to the byte."""


def test_every_architecture_has_one_line_in_order() -> None:
    assert [line.model_type for line in LINES] == architectures()


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.model_type)
def test_line_states_figures_or_the_reason_of_its_exception(line: Line) -> None:
    assert line.outcome in ("equal", "no-gradient", "different", "refused")
    assert (line.outcome == "equal") == (line.reason == "")
    assert (line.outcome == "refused") == (line.peak_bytes == 0) == (line.parameters == 0)
    if line.outcome != "refused":
        assert line.attention in ("sdpa", "eager") and line.tape in ("any", "one")
        assert (
            line.peak_bytes > 8 * line.parameters / 2
        )  # half of weights, gradients and two moments in fp32, on two ranks


def test_most_architectures_equal_pytorch() -> None:
    assert sum(line.outcome == "equal" for line in LINES) >= EXPECTED_EQUAL


CHEAP = [
    line for line in LINES if line.outcome == "equal" and line.tape == "any" and line.parameters < CHEAP_PARAMETERS
]
TODAY = random.Random(datetime.date.today().toordinal()).sample(CHEAP, 5 if ALL else 1)


@pytest.mark.parametrize("line", TODAY, ids=lambda line: line.model_type)
def test_architecture_surveyed_again_has_the_same_outcome(line: Line) -> None:
    assert survey(line.model_type) == line
