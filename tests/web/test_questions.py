"""The form, and what the page does with what it is given."""

from __future__ import annotations

import re
from html import unescape
from urllib.parse import parse_qsl, urlsplit

import pytest
from fastapi.testclient import TestClient
from page_reader import EXAMPLE, HOSTILE, read

from fsdp_advisor.assumptions import settled
from fsdp_advisor.job.fields import fields_of
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.server.page_form import controls, read_query

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["model", "gpu", "config", "optim", "micro_batch_size", "interconnect", HOSTILE])
def test_markup_is_shown_not_run(client: TestClient, name: str) -> None:
    reply = client.get("/", params={**EXAMPLE, name: HOSTILE})
    page = read(reply.text)
    assert [attrs.get("src") for tag, attrs in page.elements if tag == "script"] == [
        next(a["src"] for t, a in page.elements if t == "script")
    ]
    assert "img" not in {tag for tag, _ in page.elements}
    if name in EXAMPLE or name in ("config", "micro_batch_size", "interconnect"):
        assert "&lt;script&gt;" in reply.text and "{{7*7}}" in reply.text


@pytest.mark.parametrize(
    ("query", "status", "field"),
    [
        ({"model": "meta-lama/Llama-2-7b-hf"}, 404, None),
        ({"model": "gpt2", "gpus": "0"}, 422, "gpus"),
        ({"model": "gpt2", "gpus": "3", "nnodes": "2"}, 422, None),
        ({"model": "gpt2", "precision": "fp4"}, 422, "precision"),
        ({"model": "gpt2", "gpu": "H1000"}, 404, None),
        ({"gpus": "3"}, 422, "model"),
        ({"model": "/etc/passwd"}, 404, None),
        ({"model": "gpt2", "gpus": "9" * 5000}, 422, "gpus"),
    ],
)
def test_an_input_error_is_shown_next_to_the_form(
    client: TestClient, query: dict[str, str], status: int, field: str | None
) -> None:
    reply = client.get("/", params=query)
    assert reply.status_code == status
    assert reply.headers["cache-control"] == "no-store"
    page = read(reply.text)
    named = {attrs.get("name"): attrs for tag, attrs in page.elements if tag in ("input", "select")}
    for name, value in query.items():
        assert named[name].get("value", value) == value
    assert any(attrs.get("id") == "problem" for _, attrs in page.elements)
    assert [name for name, attrs in named.items() if attrs.get("aria-invalid")] == ([field] if field else [])


def test_a_link_with_a_tracker_in_it_still_answers(client: TestClient) -> None:
    reply = client.get("/", params={**EXAMPLE, "utm_source": "mail"})
    assert reply.status_code == 200
    assert "utm_source is no option and was ignored" in reply.text


def test_the_page_as_json_refuses_what_is_no_option_and_its_link_has_none(client: TestClient) -> None:
    refused = client.get("/.json", params={**EXAMPLE, "micro_batch": 4})
    assert refused.status_code == 422 and refused.json()["hint"] == "did you mean micro_batch_size?"
    link = re.findall(r'href="(/\.json[^"]*)"', client.get("/", params={**EXAMPLE, "utm_source": "mail"}).text)
    assert "utm_source" not in link[0] and client.get(unescape(link[0])).status_code == 200


def test_a_misspelt_option_in_an_address_is_named_beside_the_verdict(client: TestClient) -> None:
    reply = client.get("/", params={"model": "gpt2", "gpus": 1, "micro_batch": 4})
    verdict = reply.text.partition('aria-labelledby="verdict-title"')[2].partition("</section>")[0]
    assert "micro_batch is no option and was ignored: did you mean “Micro-batch”?" in unescape(verdict)


def test_every_option_of_a_recommendation_has_a_control() -> None:
    main, more = controls({})
    folded = [control for group in more.values() for control in group]
    assert sorted(c.name for c in (*main, *folded)) == sorted(
        n for n, f in fields_of(RecommendRequest).items() if not f.rule.hidden
    )
    assert len(main) == 6
    values = [value for value, _ in {c.name: c.choices for c in folded}["offload"]]
    assert values == ["none", "optimizer", "parameters", ""]


def test_every_control_has_a_help_text_in_the_page_s_words(client: TestClient) -> None:
    page = read(client.get("/").text)
    described = {a["id"]: a["aria-describedby"] for tag, a in page.elements if tag in ("input", "select")}
    assert all(helps == f"{name}-help" for name, helps in described.items())
    helps = re.findall(r"class=help id=\w+-help>(.*?)</span>", client.get("/").text)
    assert len(helps) == len(described)
    assert all(len(words) > 15 and words.endswith(".") and "--" not in words for words in helps)
    assert "with “Tokens to train on”, the answer then has the cost" in client.get("/").text


def test_folded_options_that_are_set_are_named(client: TestClient) -> None:
    html = client.get("/", params={**EXAMPLE, "tokens": "1B", "attention": "eager"}).text
    assert "<summary>More options: Attention, Tokens to train on</summary>" in html


@pytest.mark.parametrize(
    ("given", "right"),
    [
        ({"model": "meta-lama/Llama-2-7b-hf"}, {"model": "meta-llama/Llama-2-7b-hf"}),
        ({"model": "gpt2", "gpu": "RTX 4900"}, {"gpu": "RTX-4090"}),
        ({"model": "gpt2", "precision": "bf16-mixd"}, {"precision": "bf16-mixed"}),
    ],
)
def test_a_misspelled_value_is_answered_with_a_link_to_the_nearest_one(
    client: TestClient, given: dict[str, str], right: dict[str, str]
) -> None:
    html = client.get("/", params={"gpus": "4", **given}).text
    problem = html[html.index('id="problem"') :].partition("</section>")[0]
    assert "Did you mean" in problem
    links = [dict(parse_qsl(urlsplit(unescape(href)).query)) for href in re.findall(r'href="([^"]*)"', problem)]
    assert {"gpus": "4", **given, **right} in links


def test_a_wrong_value_is_named_by_its_label(client: TestClient) -> None:
    html = client.get("/", params={"model": "gpt2", "gpus": "-3"}).text
    assert "“GPUs (total)” must be " in html


def _form(values: dict[str, str]) -> dict[str, str]:
    """What the form sends without JavaScript if nobody touches it."""
    main, more = controls(values)
    return {c.name: c.value for c in (*main, *(c for group in more.values() for c in group))}


def test_a_form_sends_only_the_options_that_its_address_gives() -> None:
    assert not any(_form({}).values())
    given = {"model": "gpt2", "gpus": "2", "framework": "trl", "use_peft": "yes", "loss": "liger", "lora_r": "8"}
    assert {name: value for name, value in _form(given).items() if value} == given


def test_what_a_form_without_javascript_leaves_open_is_assumed() -> None:
    options, _ = read_query(_form({"model": "gpt2", "task": "dpo", "use_peft": "yes"}))
    assert settled(make_request(options, RecommendRequest)).assumed == {"framework", "dtype"}


def test_a_pasted_config_says_what_it_needs(client: TestClient) -> None:
    html = client.get("/", params={"config": "{not json"}).text
    assert "{not json</textarea>" in html
    assert 'id="problem"' in html


def test_a_form_sent_without_javascript_describes_no_adapter(client: TestClient) -> None:
    assert client.get("/", params=_form(EXAMPLE)).status_code == 200
    assert client.get("/", params=_form({**EXAMPLE, "lora_r": "8"})).status_code == 422


def test_adapters_are_a_folded_part_of_the_form_that_says_what_is_set(client: TestClient) -> None:
    text = client.get("/", params={**EXAMPLE, "lora_r": "0", "use_peft": "true"}).text
    summary = re.search(r"<details class=\"more\" open><summary>(Adapters[^<]*)</summary>", text)
    assert summary is not None and summary[1].endswith(": LoRA adapters, LoRA rank")
    assert re.search(r"<select id=use_peft .*?<option selected>yes", text)


def test_the_options_of_grpo_are_in_the_form_when_it_is_the_task(client: TestClient) -> None:
    job = {**EXAMPLE, "framework": "trl", "num_generations": "1"}  # refused, so that nothing is recorded
    assert "Completions per prompt</label>" not in client.get("/", params=job).text
    text = client.get("/", params={**job, "task": "grpo"}).text
    assert "Completions per prompt</label>" in text and "vLLM sleeps</label>" in text
