"""Recording a pasted configuration takes at most 60 s and 2 GB, as kept measurements of large and unusual ones show."""

from __future__ import annotations

import pytest
from recording_costs import CASES, Line, read

LINES = read()


def test_every_case_was_measured() -> None:
    assert [line.name for line in LINES] == list(CASES)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.name)
def test_answer_takes_at_most_a_minute_and_2_gb(line: Line) -> None:
    assert line.exit_status in (0, 1)  # whether it fits
    assert line.cpu_seconds < 60
    assert line.peak_bytes < 2e9
