"""Flagships of 2026 at full size: the prediction equals the kept peaks of PyTorch's own FSDP2 step, to the byte."""

from __future__ import annotations

import pytest
from flagships import MODELS, Line, predicted, read

LINES = read()


def test_kept_peaks_are_of_listed_models() -> None:
    assert LINES
    assert {line.model for line in LINES} <= set(MODELS)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.model)
def test_prediction_equals_the_simulated_step_of_the_whole_model(line: Line) -> None:
    assert predicted(line.model) == (line.attention, line.phase_peaks)
