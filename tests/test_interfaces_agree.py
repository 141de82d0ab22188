"""Python, the command line, REST and the view show the same figures for the same job."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.testclient import TestClient
from matrix import ALL, of_today
from random_jobs import random_jobs

from fsdp_advisor import estimate
from fsdp_advisor.cli import main
from fsdp_advisor.job.fields import dashed
from fsdp_advisor.render.markdown import markdown
from fsdp_advisor.render.terminal import Screen
from fsdp_advisor.render.text import text
from fsdp_advisor.render.view import report_view

JOBS = list(random_jobs(100 if ALL else 40, seed=2024))
BATCHES = [JOBS[i : i + 10] for i in range(0, len(JOBS), 10)]
FIGURES = ("needed_bytes", "headroom_bytes", "fits", "states", "tokens_per_second_per_gpu", "host_bytes_per_node")


def figures(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of every row of a JSON document."""
    return [{name: row[name] for name in FIGURES} for row in document["estimates"]]


@pytest.mark.parametrize("jobs", of_today(BATCHES, days=2), ids=lambda jobs: jobs[0]["model"])
def test_every_interface_reports_the_same_figures(
    jobs: list[dict[str, Any]], client: TestClient, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for job in jobs:
        report = estimate(**job)
        expected = figures(report.as_dict())
        main(
            ["estimate", "--json", "-q", *(word for name, value in job.items() for word in (dashed(name), str(value)))]
        )
        assert figures(json.loads(capsys.readouterr().out)) == expected, job
        assert figures(client.get("/api/v1/estimate", params=job).json()) == expected, job
        for row, shown in zip(expected, report_view(report).rows, strict=True):
            for name in ("needed_bytes", "fits", "host_bytes_per_node"):
                assert getattr(shown, name) == row[name], job
            assert shown.states_bytes == sum(row["states"].values()), job
            rate = row["tokens_per_second_per_gpu"]
            per_item = report.seq_len if report_view(report).throughput_unit == "images/s" else 1
            assert (
                shown.throughput is None
                if rate is None
                else shown.throughput == pytest.approx(rate / per_item, rel=1e-3, abs=0.06)
            ), job


def test_text_and_markdown_show_the_figures_of_the_view() -> None:
    view = report_view(estimate(model="meta-llama/Llama-2-7b-hf", gpus=4, gpu="A100-40GB"))
    wide, narrow, table = text(view, Screen(width=200)), text(view, Screen(width=50)), markdown(view)
    for row in view.rows:
        for shown in (row.needed_text, row.states_text, row.throughput_text):
            assert shown in wide and shown in narrow and shown in table
        assert row.verdict in table
