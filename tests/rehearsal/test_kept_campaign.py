"""The kept campaign under the meter of `rehearse`: kept_campaign.csv, which kept_campaign.py writes, and one case that runs now."""

from __future__ import annotations

import pytest
from kept_campaign import cases, read_rows, rehearsed
from matrix import in_turn, taken
from warm_process import Warm

ROWS = read_rows()
CASES = {(gpu, number): record for gpu, number, record in cases()}
ON_H100 = [number for gpu, number in CASES if gpu == "H100-80GB"]
FSDP2_WITH_ACCUMULATION = 13


def test_every_kept_case_has_the_figures_of_its_record() -> None:
    assert {(row.gpu, row.number) for row in ROWS} == set(CASES) and len(ROWS) == 144
    assert [row for row in ROWS if not row.is_equal] == []
    assert sum(row.recorded == "ok" for row in ROWS) >= 100 and any(row.recorded == "oom" for row in ROWS)


@in_turn(2, of=3)
@pytest.mark.parametrize("number", taken([FSDP2_WITH_ACCUMULATION], ON_H100[::8]))
def test_the_meter_of_a_rehearsal_changes_no_allocation(number: int, warm: Warm) -> None:
    gpu = "H100-80GB"
    assert warm.gpu == gpu
    row = rehearsed(warm, gpu, number, CASES[gpu, number])
    assert row.is_equal and row.rehearsed_reserved_bytes > 0
