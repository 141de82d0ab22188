"""Published GPU runs that state reserved or allocated memory, or that ran out of it, against predictions.

The table is `published_memory.yaml`; `python tests/memory/published_memory.py` prints it with predictions and errors.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken, with_all_cases
from published_memory import DATA, ROWS, TOLERANCE, Row, estimate_of, llama, recorded, request_of

pytestmark = pytest.mark.slow

SPEED = Path(__file__).parents[1] / "timing"


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=pytest.mark.xfail(reason=row.missed, strict=True) if row.missed else (), id=row.name)
        for row in taken(ROWS[::3], [row for i, row in enumerate(ROWS) if i % 3], days=5)
    ],
)
def test_published_memory_is_predicted(row: Row) -> None:
    assert row.predicted_gib == pytest.approx(row.gib, rel=TOLERANCE[row.figure])


@with_all_cases
def test_the_reserved_figures_as_a_whole() -> None:
    errors = [abs(row.error) for row in ROWS if row.figure != "allocated"]
    assert statistics.median(errors) < 0.05 and max(errors) < 0.10


@in_turn(1, of=2)
@pytest.mark.parametrize("row", DATA["fits"], ids=lambda row: row["name"])
def test_jobs_that_torchtitan_ran_fit_or_not_as_reported(row: dict[str, Any]) -> None:
    request = request_of(
        {
            "gpus": 64, "nnodes": 8, "gpu": "A100-80GB", "optim": "adamw_torch",
            "micro_batch_size": row["micro_batch_size"], "seq_len": row["seq_len"],
        }
    )  # fmt: skip
    model = recorded(llama(norm="fused", upcast=True, keeps_logits=True, **row["llama"]), request)
    assert estimate_of(model, request).fits is row["fits"]


def test_every_published_figure_is_compared_or_has_a_reason() -> None:
    published = json.loads((SPEED / "published.json").read_text())
    stated = {row["id"] for row in published if any(v for k, v in row["measured"].items() if k.endswith("_gib"))}
    accounted = [*DATA["covered"], *(i for entry in DATA["left_out"] for i in entry["ids"])]
    assert len(accounted) == len(set(accounted))
    assert set(accounted) == stated
    assert all(entry["states"] and entry["why"] for entry in DATA["left_out"])
