"""The Python API: its signatures, what its answers print, and the functions around estimate and recommend."""

from __future__ import annotations

import inspect
import subprocess
import sys
from html.parser import HTMLParser
from typing import Any, get_type_hints

import pytest

import fsdp_advisor
from fsdp_advisor.advice import Advice
from fsdp_advisor.job.fields import fields_of
from fsdp_advisor.job.keywords import EstimateOptions, RecommendOptions
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest

JOB: dict[str, Any] = {"model": "openai-community/gpt2", "gpus": 2, "gpu": "24GiB", "strategy": "zero3", "seq_len": 256}


@pytest.fixture(scope="module")
def report() -> fsdp_advisor.Report:
    return fsdp_advisor.estimate(**JOB)


@pytest.fixture(scope="module")
def advice() -> Advice:
    return fsdp_advisor.recommend(**JOB, micro_batch_size=1)


@pytest.mark.parametrize(
    ("function", "kind", "keywords"),
    [
        (fsdp_advisor.estimate, EstimateRequest, EstimateOptions),
        (fsdp_advisor.recommend, RecommendRequest, RecommendOptions),
    ],
)
def test_signatures_name_every_option(function: Any, kind: type[EstimateRequest], keywords: Any) -> None:
    shown = inspect.signature(function).parameters
    hidden = {name for name, field in fields_of(kind).items() if field.rule.hidden}
    assert fields_of(kind).keys() - hidden <= shown.keys()
    assert "options" not in shown
    assert shown["gpus"].default == 1
    assert get_type_hints(keywords).keys() == fields_of(kind).keys()


OBJECTS = {"allocator", "evaluation", "job_peaks", "request", "estimates", "recommendation"}
"""The keys of JSON objects that are objects with attributes in Python."""


def test_every_json_key_is_an_attribute_with_the_same_value(report: fsdp_advisor.Report, advice: Advice) -> None:
    answers = [(report, report.as_dict()), (advice, advice.as_dict())]
    answers += [(row, row.as_dict()) for row in report.estimates]
    for answer, document in answers:
        for key, value in document.items():
            found = getattr(answer, key)
            if key not in OBJECTS:
                assert (list(found) if isinstance(found, tuple) else found) == value, key


def test_a_printed_report_is_the_text_of_the_command_line(report: fsdp_advisor.Report) -> None:
    lines = str(report).splitlines()
    assert lines[0].startswith("openai-community/gpt2 (124M parameters) on 2 x 24GiB")
    assert any(line.startswith("ZeRO-3") and "fits" in line for line in lines)


def test_a_printed_recommendation_names_the_plan(advice: Advice) -> None:
    assert "Recommended: ZeRO-3" in str(advice)
    assert "| strategy | backend |" in advice.to_markdown()


class Tables(HTMLParser):
    """Counts tables and notices tags that do not match."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tables = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.tables += tag == "table"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_row_has_the_figures_of_the_json_as_attributes(report: fsdp_advisor.Report) -> None:
    structured = ("allocator", "step_breakdown", "job_peaks", "evaluation")
    for row, found in zip(report.estimates, report.as_dict()["estimates"], strict=True):
        named = [name for name in found if not name.endswith("_range") and name not in structured]
        named = [
            name for name in named if name not in ("samples_per_second_per_gpu", "mfu", "exposed_communication_share")
        ]
        assert {name: getattr(row, name) for name in named} == {
            name: tuple(found[name]) if isinstance(found[name], list) else found[name] for name in named
        }


def test_completion_lists_the_public_names() -> None:
    assert dir(fsdp_advisor) == sorted(fsdp_advisor.__all__)


def test_a_notebook_shows_tables(report: fsdp_advisor.Report, advice: Advice) -> None:
    for answer in (report, advice):
        parser = Tables()
        parser.feed(answer._repr_html_())
        assert parser.tables == 1 and not parser.open


def test_an_error_shows_its_hint() -> None:
    with pytest.raises(fsdp_advisor.AdvisorError) as refused:
        fsdp_advisor.estimate(model="gpt2", gpu="H1000")
    assert str(refused.value) == f"{refused.value.message}\nhint: {refused.value.hint}"
    assert "H100" in refused.value.hint


@pytest.mark.parametrize("ask", [fsdp_advisor.estimate, fsdp_advisor.recommend])
def test_a_model_without_its_keyword_is_an_error_with_a_hint(ask: Any) -> None:
    with pytest.raises(fsdp_advisor.AdvisorError, match="a request is needed, not 'gpt2'"):
        ask("gpt2", gpus=2)


def test_a_parameter_count_may_be_a_number() -> None:
    assert fsdp_advisor.estimate(model=7e9, gpus=4, gpu="H100").parameters == 7_000_000_000


def test_export_takes_a_job_or_a_recommendation(advice: Advice) -> None:
    by_job = fsdp_advisor.export("fsdp2", **JOB, micro_batch_size=1)
    request = fsdp_advisor.EstimateRequest(**JOB)
    assert by_job.text == fsdp_advisor.export("fsdp2", request).text == str(by_job)
    assert fsdp_advisor.export("fsdp2", advice).target == "fsdp2"


def test_nothing_to_export_is_an_error_with_the_reason() -> None:
    nothing = fsdp_advisor.recommend(model="meta-llama/Llama-2-70b-hf", gpu="24GiB", strategy="ddp", micro_batch_size=1)
    with pytest.raises(fsdp_advisor.AdvisorError, match="no plan to export"):
        fsdp_advisor.export("ddp", nothing)


def test_models_and_gpus_are_listed() -> None:
    assert "openai-community/gpt2" in [entry.id for entry in fsdp_advisor.models("gpt2")]
    assert [gpu.name for gpu in fsdp_advisor.gpus("4090")] == ["RTX-4090"]
    assert len(fsdp_advisor.models()) > len(fsdp_advisor.models("moe")) > 0


def test_everything_can_be_imported_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"
        "from fsdp_advisor import *\n"
        "try: record_module(None, None, None)\n"
        "except AdvisorError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines() == [
        "recording a module needs torch and transformers",
        "hint: in a checkout of fsdp-advisor, run: pip install '.[torch]'",
    ]
