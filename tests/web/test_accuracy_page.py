"""The accuracy page shows the records and the published runs, and the README says the same."""

from __future__ import annotations

import json
import re
from html import escape
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from page_reader import HOSTILE, read

from fsdp_advisor.server import page_accuracy
from fsdp_advisor.server.rendering import render
from fsdp_advisor.validation import published

pytestmark = pytest.mark.slow

RECORD = {
    "request": {
        "model": HOSTILE, "strategy": "zero3", "backend": "fsdp2", "gpus": 8, "micro_batch_size": 1, "seq_len": 128,
        "precision": "bf16",
    },
    "mode": "measure", "device": "cuda", "outcome": "ok",
    "measured": {"peak_allocated_bytes": 10 * 2**30}, "predicted": {"peak_allocated_bytes": 10 * 2**30 + 2**29},
}  # fmt: skip


def test_without_records_the_page_says_so(tmp_path: Path) -> None:
    assert page_accuracy.view(tmp_path / "none")["cases"] == []


def test_records_are_listed_with_their_errors_and_drawn(tmp_path: Path, client: TestClient) -> None:
    other = {
        **RECORD,
        "mode": "simulate",
        "device": "cpu",
        "measured": {"peak_tensor_bytes": 100},
        "predicted": {"peak_tensor_bytes": 90},
    }
    lines = [json.dumps(RECORD), json.dumps(other), "torn {"]
    (tmp_path / "h100.jsonl").write_text("\n".join(lines))
    found = page_accuracy.view(tmp_path)
    assert [case["error"] for case in found["cases"]] == ["+5.00 %", "-10.00 %"]
    assert found["torn_lines"] == 1
    assert "the largest error is 10.00%" in found["accuracy_drawing"]
    html = render("accuracy.html", "", "/accuracy", **found).decode()
    page = read(html)
    assert "+5.00 %" in html and "h100.jsonl" not in html
    assert "script" not in {tag for tag, _ in page.elements} and "&lt;script&gt;" in html
    assert "accuracy_drawing" not in client.get("/accuracy.json").json()


def test_the_published_runs_are_drawn_listed_and_there_as_data(client: TestClient) -> None:
    html, data = client.get("/accuracy").text, client.get("/accuracy.json").json()
    runs = data["published_runs"]
    assert len(runs) == len(published.runs()) and "speed_errors_drawing" not in data
    wide, narrow = re.findall(r'<svg[^>]*class="chart (?:wide|narrow)".*?</svg>', html, re.DOTALL)
    for svg in (wide, narrow):
        titles = re.findall(r"<(?:circle|rect)[^>]*><title>(.*?)</title>", svg)
        drawn = [run for run in runs if run["part"] != "older"]
        assert len(titles) == 3 * len(drawn)
        for run in drawn:
            assert sum(f"{run['error_percent']:+.1f} % ({escape(run['source'])})" in title for title in titles) >= 3
    table = html[html.index('aria-label="Every published run"') :]
    assert re.findall(r">([+-][\d.]+) %<", table) == [f"{run['error_percent']:+.1f}" for run in runs]
    words = "".join(read(html).text)
    for part in data["published"]:
        assert f"{part['median_percent']} %" in words
    assert (
        {"judged", "fitted", "older"} == {run["part"] for run in runs} == {part["part"] for part in data["published"]}
    )


def test_the_readme_has_the_figures_of_the_page() -> None:
    readme = " ".join((Path(__file__).parents[2] / "README.md").read_text().split())
    page = page_accuracy.view()
    judged = next(part for part in page["published"] if part.part == "judged")
    within = judged.within[page["bounds_percent"].index(30)]
    assert (
        f"for {judged.runs} published runs that were not used to choose constants, the median error is "
        f"{judged.median_percent:g} % and {within} are within 30 %"
    ) in readme
    spreads = {(s["mode"], s["figure"]): s for s in page["spreads"] if s["strategy"] == "all"}
    figures = ("peak_allocated_bytes", "peak_reserved_bytes")
    allocated, reserved = (spreads["stand-in (cuda without kernels)", figure] for figure in figures)
    assert f"over {page['without_kernels']} cases" in readme
    assert f"and the worst {_size(allocated['worst'])} %" in readme
    assert f"the median is {_size(reserved['median'])} % and the worst {_size(reserved['worst'])} %" in readme
    allocated, reserved = (spreads["stand-in", figure] for figure in figures)
    assert f"of {allocated['cases']} jobs" in readme
    assert f"(worst {_size(allocated['worst'])} %)" in readme
    assert f"0.03 % ({float(_size(reserved['worst'])):.1f} %)" in readme


def _size(percent: str) -> str:
    """The absolute size of a percentage without trailing zeros: `9.6` for `+9.60 %`."""
    return f"{abs(float(percent.removesuffix(' %'))):g}"
