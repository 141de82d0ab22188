"""The survey of architectures: every one has a line, each exception has its reason, and a rotating few are surveyed again."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

pytest.importorskip("torch")

from architecture_survey import REGISTERED, Line, architectures, read, survey
from matrix import ALL, DAY

LINES = read()
EXPECTED_EQUAL = {
    "causal-lm": 0.95, "masked-lm": 0.95, "seq2seq-lm": 0.94, "speech-seq2seq": 0.95, "ctc": 0.95, "audio-classification": 0.95,
    "image-classification": 0.9, "image-text-to-text": 0.95,
}  # fmt: skip
"""At least this share of a task's architectures agrees to the byte."""


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
    assert sum(line.outcome == "equal" for line in LINES) >= 0.95 * len(LINES)


@pytest.mark.parametrize("task", EXPECTED_EQUAL)
def test_most_architectures_equal_pytorch(task: str) -> None:
    lines = [line for line in LINES if line.task == task]
    assert sum(line.outcome == "equal" for line in lines) >= EXPECTED_EQUAL[task] * len(lines)


def _rotating(lines: list[Line], count: int) -> list[Line]:
    """So many of the lines, others each day, until all had their turn."""
    order = random.Random(0).sample(lines, len(lines))
    first = DAY * count
    return [order[(first + i) % len(order)] for i in range(count)]


QUICK = [line for line in LINES if line.outcome == "equal" and line.tape == "any"]
"""Language models whose code is so simple that recording and simulating one takes a second or two."""
OTHERS = [line for line in LINES if line.outcome == "equal" and line not in QUICK]
TODAY = QUICK if ALL else _rotating(QUICK, 8) + _rotating(OTHERS, 1)
"""Architectures that are recorded and simulated as in the survey but for one batch and length alone: each of `QUICK` within 19 days."""


@pytest.mark.parametrize("line", TODAY, ids=lambda line: line.name)
def test_architecture_surveyed_again_has_the_same_outcome(line: Line) -> None:
    assert replace(survey(line.task, line.model_type, any_batch=False), tape=line.tape) == line
