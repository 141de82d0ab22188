"""The survey of architectures: every one has a line, each exception has its reason, and a rotating few are surveyed again."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from architecture_survey import REGISTERED, Line, architectures, read, survey
from matrix import ALL, DAY

LINES = read()
EXPECTED_EQUAL = 0.95
"""At least this share of the architectures agrees to the byte: of all, and of those of each task that transformers can train."""
WITHOUT_LOSS = "returns no loss, so transformers cannot train it"


@pytest.mark.parametrize("task", REGISTERED)
def test_every_architecture_has_one_line_in_order(task: str) -> None:
    lines = [line.model_type for line in LINES if line.task == task]
    assert lines == architectures(task)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_line_states_figures_or_the_reason_of_its_exception(line: Line) -> None:
    assert line.outcome in ("equal", "different", "refused")
    assert (line.outcome == "equal") == (line.reason == "")
    assert (line.outcome == "refused") == (line.peak_bytes == 0) == (line.parameters == 0)
    if line.outcome != "refused":
        assert line.attention in ("sdpa", "eager") and line.backend in ("fsdp2", "ddp") and line.tape in ("any", "one")
        assert line.peak_bytes > 2 * line.parameters  # the weights in fp32, on two ranks


def test_95_percent_of_all_architectures_equal_pytorch() -> None:
    assert sum(line.outcome == "equal" for line in LINES) >= EXPECTED_EQUAL * len(LINES)


@pytest.mark.parametrize("task", REGISTERED)
def test_95_percent_of_the_architectures_of_a_task_that_can_be_trained_equal_pytorch(task: str) -> None:
    trained = [line for line in LINES if line.task == task and not line.reason.endswith(WITHOUT_LOSS)]
    assert sum(line.outcome == "equal" for line in trained) >= EXPECTED_EQUAL * len(trained)


def _rotating(lines: list[Line], count: int) -> list[Line]:
    """So many of the lines, others each day, until all had their turn."""
    order = random.Random(0).sample(lines, len(lines))
    first = DAY * count
    return [order[(first + i) % len(order)] for i in range(count)]


QUICK = [line for line in LINES if line.outcome == "equal" and line.tape == "any"]
"""Language models whose code is so simple that recording and simulating one takes a second or two."""
OTHERS = [line for line in LINES if line.outcome == "equal" and line not in QUICK]
TODAY = QUICK if ALL else _rotating(QUICK, 5) + _rotating(OTHERS, 1)
"""Architectures that are recorded and simulated as in the survey, but for only one batch and length: each of `QUICK` within 30 days."""


@pytest.mark.parametrize("line", TODAY, ids=lambda line: line.name)
def test_architecture_surveyed_again_has_the_same_outcome(line: Line) -> None:
    assert replace(survey(line.task, line.model_type, any_batch=False), tape=line.tape) == line
