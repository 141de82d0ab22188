"""The report over records: errors, verdicts, and every way to show them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fsdp_advisor.errors import MissingExtra, UsageError
from fsdp_advisor.validation import report
from fsdp_advisor.validation.records import Record, thinned

GIB = 2**30


def record(
    told: float | None,
    found: float | None,
    *,
    said: bool | None = True,
    did: bool | None = True,
    n: int = 1,
    **changes: Any,
) -> Record:
    """A stand-in whose allocated peak was predicted and measured so many GiB."""
    request = {
        "model": "m",
        "gpus": 8,
        "strategy": "zero3",
        "backend": "fsdp2",
        "precision": "bf16",
        "micro_batch_size": n,
        "seq_len": 2048,
    }
    values: dict[str, Any] = {
        "request": request,
        "rung": "stand-in",
        "device": "cuda",
        "outcome": "ok",
        "versions": {"torch": "2", "transformers": "5", "gpu": "NVIDIA X"},
        "measured": {"peak_allocated_bytes": round(found * GIB)} if found else {},
        "predicted": {"peak_allocated_bytes": round(told * GIB)} if told else {},
        "fits_predicted": said,
        "fits_really": did,
    }
    return Record(**{**values, **changes})


RECORDS = [
    record(99, 100, n=1),
    record(101, 100, n=2),
    record(97, 100, n=3),
    record(100, 100, n=4),
    record(90, None, n=5, said=True, did=False, outcome="oom", message="CUDA out of memory."),
    record(120, None, n=6, said=False, did=False, outcome="oom"),
    record(
        70,
        60,
        n=7,
        said=False,
        did=True,
        measured={"peak_tensor_bytes": 60 * GIB},
        predicted={"peak_tensor_bytes": 70 * GIB},
    ),
]


def test_errors_are_summed_up_by_rung_strategy_and_figure() -> None:
    rows = {(s.rung, s.strategy, s.figure): s for s in report.spreads(RECORDS)}
    allocated = rows["stand-in", "zero3 fsdp2", "peak_allocated_bytes"]
    assert allocated.cases == 4
    assert allocated.median == pytest.approx(-0.005) and allocated.worst == allocated.p95 == pytest.approx(-0.03)
    assert rows["stand-in", "all", "peak_tensor_bytes"].cases == 1
    assert report.spreads([]) == []
    many = [record(100 + i / 10, 100, n=i + 1) for i in range(100)]
    spread = report.spreads(many)[0]
    assert (
        spread.median == pytest.approx(0.0495)
        and spread.p95 == pytest.approx(0.094)
        and spread.worst == pytest.approx(0.099)
    )


def test_a_gpu_and_a_cpu_are_not_one_rung() -> None:
    both = [record(1, 1), record(2, 1, device="cpu", rung="measure"), record(3, 1, rung="measure")]
    assert {s.rung for s in report.spreads(both)} == {"stand-in", "measure", "measure (cpu)"}


def test_verdicts() -> None:
    found = report.verdicts(RECORDS)
    assert (found.right_fits, found.wrong_fits, found.right_misfits, found.wrong_misfits) == (4, 1, 1, 1)
    assert found.precision == 4 / 5 and found.recall == 4 / 5
    nothing = report.verdicts([record(1, 1, said=None)])
    assert nothing.precision is None and nothing.recall is None


def test_a_case_that_was_run_again_counts_once() -> None:
    again = record(100, 100, n=1)
    assert report.latest([record(50, 100, n=1), record(1, 1, n=2), again]) == [again, record(1, 1, n=2)]


def test_text_has_every_case_the_errors_and_the_verdicts() -> None:
    text = report.render(RECORDS, "text")
    assert text.count("m zero3 fsdp2 x8") == 7 + 2  # wrong verdicts are named once more
    assert "-3.00 %" in text and "precision 80.0%, recall 80.0%" in text and "2 oom" in text
    assert "made with: NVIDIA X, torch 2, transformers 5" in text
    widths = {len(line) for line in text.split("\n\n")[0].splitlines()[1:2]}
    assert widths and report.render([], "text") == "no records"


def test_markdown_is_a_table() -> None:
    lines = report.render(RECORDS, "markdown").splitlines()
    assert (
        lines[0].startswith("| case |") and set(lines[1]) <= set("| -:") and lines[2].count("|") == lines[0].count("|")
    )


def test_json_is_the_whole_of_it() -> None:
    data = json.loads(report.render(RECORDS, "json"))
    assert len(data["cases"]) == 7 and data["verdicts"]["wrong_fits"] == 1
    assert data["errors"][0].keys() == {"rung", "strategy", "figure", "cases", "median", "p95", "worst"}
    assert json.loads(report.render([], "json"))["cases"] == []


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_one_case_is_shown_figure_by_figure(form: str) -> None:
    ranks = {"peak_tensor_bytes": [5, 9, 3]}
    one = record(
        99,
        100,
        measured={"peak_allocated_bytes": 100 * GIB, "by_rank": ranks, "step_seconds_without_communication": 0.25},
    )
    text = report.render_case(one, form)
    assert (
        "peak_allocated_bytes" in text and "-1.00 %" in text and "106,300,440,576" in text and "107,374,182,400" in text
    )
    assert (
        "largest 9, rank 0 5, spread 6" in text
        and "without communication: 0.2500" in text
        and "yes said, yes did" in text
    )


def test_records_are_read_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from fsdp_advisor.validation import campaign, case, failures, ladder, records, report;"
        "print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_a_plot_needs_matplotlib_and_something_to_show(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no record"):
        report.plot([record(None, None)], tmp_path / "p.svg")
    line = {"forward": [1, 2], "backward": [3, 2], "optimizer": [1]}
    timed = record(
        1,
        1,
        measured={"peak_tensor_bytes": 3, "timeline": line},
        predicted={"peak_tensor_bytes": 3, "timeline": line},
        n=9,
    )
    if importlib.util.find_spec("matplotlib") is None:
        with pytest.raises(MissingExtra) as caught:
            report.plot([*RECORDS, timed], tmp_path / "p.svg")
        assert "plot" in caught.value.hint
        return
    report.plot([*RECORDS, timed], tmp_path / "p.svg")
    assert "<svg" in (tmp_path / "p.svg").read_text()
    with pytest.raises(UsageError, match="cannot write"):
        report.plot(RECORDS, tmp_path / "no" / "p.svg")


def test_thinning_keeps_every_peak() -> None:
    values = [i % 17 for i in range(1000)]
    assert len(thinned(values)) == 100 and max(thinned(values)) == 16


def test_a_steps_time_is_compared_where_both_are_known() -> None:
    timed = record(
        99,
        100,
        measured={"step_seconds_without_communication": 2.0},
        predicted={"step_seconds_without_communication": 1.5},
    )
    assert timed.errors == {"step_seconds_without_communication": -0.25}
    assert [s.median for s in report.spreads([timed])] == [-0.25, -0.25]
    assert "step_seconds_without_communication" in report.render([timed], "text")
    alone = record(99, 100, measured={"peak_allocated_bytes": 5, "step_seconds": 2.0}, predicted={})
    assert "step seconds: 2.0000\n" in report.render_case(alone, "text") + "\n"
    on_cpu = record(99, 100, device="cpu", measured={"step_seconds": 2.0}, predicted={"step_seconds": 1.0})
    assert on_cpu.errors == {}
    assert "step seconds without communication: 2.0000, predicted 1.5000 (-25.00 %)" in report.render_case(
        timed, "text"
    )
