"""The report over records: errors, verdicts, ranges, and their output formats."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from fsdp_advisor.errors import UsageError
from fsdp_advisor.program.accounts import PHASES
from fsdp_advisor.validation import drawing, report, report_text
from fsdp_advisor.validation.records import Record, downsampled

GIB = 2**30


def record(
    reported: float | None,
    found: float | None,
    *,
    said: bool | None = True,
    did: bool | None = True,
    n: int = 1,
    **changes: Any,
) -> Record:
    """The record of a stand-in with an allocated peak of `reported` GiB predicted and `found` GiB measured."""
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
        "mode": "stand-in",
        "device": "cuda",
        "outcome": "ok",
        "versions": {"torch": "2", "transformers": "5", "gpu": "NVIDIA X"},
        "measured": {"peak_allocated_bytes": round(found * GIB)} if found else {},
        "predicted": {"peak_allocated_bytes": round(reported * GIB)} if reported else {},
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


def test_errors_are_summarized_by_mode_strategy_and_figure() -> None:
    rows = {(s.mode, s.strategy, s.figure): s for s in report.spreads(RECORDS)}
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


def test_runs_on_cpu_and_gpu_are_separate_groups() -> None:
    both = [record(1, 1), record(2, 1, device="cpu", mode="measure"), record(3, 1, mode="measure")]
    assert {s.mode for s in report.spreads(both)} == {"stand-in", "measure", "measure (cpu)"}


def test_verdicts_are_counted_with_precision_and_recall() -> None:
    found = report.verdicts(RECORDS)
    assert (found.right_fits, found.wrong_fits, found.right_misfits, found.wrong_misfits) == (4, 1, 1, 1)
    assert found.precision == 4 / 5 and found.recall == 4 / 5
    nothing = report.verdicts([record(1, 1, said=None)])
    assert nothing.precision is None and nothing.recall is None


def test_only_the_latest_record_of_a_case_counts() -> None:
    again = record(100, 100, n=1)
    assert report.latest([record(50, 100, n=1), record(1, 1, n=2), again]) == [again, record(1, 1, n=2)]


def test_text_has_all_cases_errors_and_verdicts() -> None:
    text = report_text.render(RECORDS, "text")
    assert text.count("m zero3 fsdp2 x8") == 7 + 2  # wrong verdicts are listed again
    assert "-3.00 %" in text and "precision 80.0%, recall 80.0%" in text and "2 oom" in text
    assert "made with: NVIDIA X, torch 2, transformers 5" in text
    assert report_text.render([], "text") == "no records"


def test_markdown_is_a_table() -> None:
    lines = report_text.render(RECORDS, "markdown").splitlines()
    assert (
        lines[0].startswith("| case |") and set(lines[1]) <= set("| -:") and lines[2].count("|") == lines[0].count("|")
    )


def test_json_has_the_whole_report() -> None:
    data = json.loads(report_text.render(RECORDS, "json"))
    assert len(data["cases"]) == 7 and data["verdicts"]["wrong_fits"] == 1
    assert data["errors"][0].keys() == {"mode", "strategy", "figure", "cases", "median", "p95", "worst"}
    assert json.loads(report_text.render([], "json"))["cases"] == []


@pytest.mark.parametrize("form", ["text", "markdown"])
def test_single_case_is_shown_figure_by_figure(form: str) -> None:
    ranks = {"peak_tensor_bytes": [5, 9, 3]}
    one = record(
        99,
        100,
        measured={"peak_allocated_bytes": 100 * GIB, "by_rank": ranks, "step_seconds_without_communication": 0.25},
    )
    text = report_text.render_case(one, form)
    assert (
        "peak_allocated_bytes" in text and "-1.00 %" in text and "106,300,440,576" in text and "107,374,182,400" in text
    )
    assert (
        "largest 9, rank 0 5, spread 6" in text
        and "without communication: 0.2500" in text
        and "yes predicted, yes did" in text
    )


def test_records_are_read_without_torch() -> None:
    code = (
        "import sys; from fsdp_advisor.validation import campaign, case, drawing, failures, modes, records, report_text, run_result;"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_drawing_needs_figures_and_a_writable_svg_file(tmp_path: Path) -> None:
    path = tmp_path / "p.svg"
    with pytest.raises(UsageError, match="no record"):
        drawing.draw([record(None, None)], path)
    line = {"forward": [1, 2], "backward": [3, 2], "optimizer": [1]}
    timed = record(
        1,
        1,
        measured={"peak_tensor_bytes": 3, "timeline": line},
        predicted={"peak_tensor_bytes": 3, "timeline": line},
        n=9,
    )
    drawing.draw([*RECORDS, timed], path)
    root = ElementTree.parse(path).getroot()
    words = " ".join(text for text in root.itertext())
    assert "stand-in, allocated (4)" in words and "stand-in, tensors (2)" in words and "-reserved" not in words
    assert timed.label in words and "measured" in words
    assert "optimizer" not in drawing.drawing(RECORDS)  # no case has a timeline
    for bad, said in (
        (tmp_path / "p.png", "SVG"),
        (tmp_path / "p", "SVG"),
        (tmp_path / "no" / "p.svg", "cannot write"),
    ):
        with pytest.raises(UsageError, match=said):
            drawing.draw(RECORDS, bad)


def test_gpu_runs_are_reported_by_phase_range_and_segment() -> None:
    peaks = {phase: {"allocated_bytes": 40 * GIB, "reserved_bytes": 50 * GIB} for phase in PHASES}
    said = {phase: {"allocated_bytes": 38 * GIB, "reserved_bytes": 50 * GIB} for phase in PHASES}
    snapshot = {
        "segments": 9, "modelled_segments": 8, "equal_segments": 7, "recorded_bytes": 9, "modelled_bytes": 8,
        "only_recorded": ["large, 9 bytes"], "only_modelled": ["small, 8 bytes"],
    }  # fmt: skip
    measured = {"peak_reserved_bytes": 50 * GIB, "peak_device_bytes": 52 * GIB, "context_bytes": GIB}
    predicted = {"peak_reserved_bytes": 50 * GIB, "peak_device_bytes": 51 * GIB}
    ranges = {"peak_device_bytes_range": [50 * GIB, 53 * GIB], "context_bytes_range": [1, 2]}
    one = record(
        1,
        1,
        measured={**measured, "phases": peaks, "snapshot": snapshot},
        predicted={**predicted, **ranges, "phases": said},
    )
    assert report.main_figure(one) == "peak_reserved_bytes"
    text = report_text.render_case(one, "text")
    assert "phases.backward.allocated_bytes" in text and "-5.00 %" in text
    assert "peak_device_bytes within the predicted range: 1 of 1" in text and "context_bytes within" in text
    assert (
        "segments equal block by block: 7 of 9 real ones, 8 predicted" in text and "only real: large, 9 bytes" in text
    )
    many = [replace(one, request={**one.request, "seq_len": n}) for n in (1, 2)]
    text = report_text.render(many, "text")
    assert (
        "14 of 18 real ones, 16 predicted; all segments in 0 of 2 runs" in text
        and "context_bytes within the predicted range: 0 of 2" in text
    )
    assert {r["figure"]: r["within"] for r in json.loads(report_text.render(many, "json"))["ranges"]} == {
        "peak_device_bytes": 2,
        "context_bytes": 0,
    }


def test_simulations_have_no_verdicts_and_near_full_is_judged_by_the_device_peak() -> None:
    assert report.verdicts([record(1, 1, mode="simulate", device="cpu")]) == report.Verdicts()
    failed = record(
        None, None, said=True, did=False, outcome="oom", predicted={"peak_device_bytes": 79 * GIB},
        detail={"gpu_memory_bytes": 80 * GIB},
    )  # fmt: skip
    assert report.near_full(failed) and report.wrong_verdict(failed)
    assert not report.near_full(replace(failed, predicted={"peak_device_bytes": 70 * GIB}))


def test_downsampling_keeps_the_peak() -> None:
    values = [i % 17 for i in range(1000)]
    assert len(downsampled(values)) == 100 and max(downsampled(values)) == 16


def test_step_times_are_compared_on_gpus() -> None:
    timed = record(
        99,
        100,
        measured={"step_seconds_without_communication": 2.0},
        predicted={"step_seconds_without_communication": 1.5},
    )
    assert timed.errors == {"step_seconds_without_communication": -0.25}
    assert [s.median for s in report.spreads([timed])] == [-0.25, -0.25]
    assert "step_seconds_without_communication" in report_text.render([timed], "text")
    alone = record(99, 100, measured={"peak_allocated_bytes": 5, "step_seconds": 2.0}, predicted={})
    assert "step seconds: 2.0000\n" in report_text.render_case(alone, "text") + "\n"
    on_cpu = record(99, 100, device="cpu", measured={"step_seconds": 2.0}, predicted={"step_seconds": 1.0})
    assert on_cpu.errors == {}
    assert "step seconds without communication: 2.0000, predicted 1.5000 (-25.00 %)" in report_text.render_case(
        timed, "text"
    )
