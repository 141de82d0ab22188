"""Two plans side by side: both from a permalink, with what differs between them."""

from __future__ import annotations

import re
from urllib.parse import urlencode

import pytest
from fastapi.testclient import TestClient
from page_reader import HOSTILE, read

pytestmark = pytest.mark.slow

PLAN = {"model": "openai-community/gpt2", "gpus": "2", "gpu": "RTX-4090", "strategy": "zero2", "micro_batch_size": "4"}
OTHER = PLAN | {"strategy": "ddp", "activation_checkpointing": "full"}


def _compared(client: TestClient, a: dict[str, str], b: dict[str, str]) -> str:
    reply = client.get("/compare", params={"a": urlencode(a), "b": urlencode(b)})
    assert reply.status_code == 200, reply.text
    return reply.text


def test_both_plans_are_shown_with_their_differences(client: TestClient) -> None:
    html = _compared(client, PLAN, OTHER)
    words = " ".join(" ".join(read(html).text).split())
    assert "Strategy ZeRO-2 DDP" in words and "Activation checkpointing" in words and "Precision" not in words
    for plan, row in ((PLAN, 0), (OTHER, 1)):
        needed = client.get("/api/v1/estimate", params=plan).json()["estimates"][0]["needed_bytes"] / 2**30
        figures = client.get("/compare.json", params={"a": urlencode(PLAN), "b": urlencode(OTHER)}).json()
        assert ["Memory of one GPU", "needed", f"{needed:.2f}"] in figures[("first", "second")[row]]["figures"]
        assert f'<td class="n">{needed:.2f}</td>' in html


def test_the_difference_is_second_minus_first(client: TestClient) -> None:
    sides = client.get("/compare.json", params={"a": urlencode(PLAN), "b": urlencode(OTHER)}).json()
    first, second = ({(g, n): v for g, n, v in sides[s]["figures"]} for s in ("first", "second"))
    speed = ("Speed", "tokens/s per GPU")
    change = int(second[speed].replace(",", "")) - int(first[speed].replace(",", ""))
    assert f'<td class="n">{change:+,}</td>' in _compared(client, PLAN, OTHER)


def test_each_difference_has_its_effect_and_what_makes_the_other_fit(client: TestClient) -> None:
    large = PLAN | {"micro_batch_size": "64"}
    html = _compared(client, PLAN, large)
    first, second = (
        client.get("/api/v1/estimate", params=plan).json()["estimates"][0]["needed_bytes"] for plan in (PLAN, large)
    )
    assert f"{(second - first) / 2**30:.2f} GiB more" in html
    assert "B fits with the value of A" in html and "Micro-batch" in html


def test_equal_plans_have_no_differences(client: TestClient) -> None:
    assert "None: both are the same plan." in _compared(client, PLAN, PLAN)


def test_every_group_of_figures_is_shown_once(client: TestClient) -> None:
    html = _compared(client, PLAN, PLAN | {"strategy": "zero3", "backend": "deepspeed"})
    groups = re.findall(r'<th scope="colgroup" colspan="4">(.*?)</th>', html)
    assert len(groups) == len(set(groups)) >= 5


def test_plans_on_different_gpus_have_a_drawing_each(client: TestClient) -> None:
    html = _compared(client, PLAN, PLAN | {"gpu": "A100-40GB"})
    assert html.count("Memory needed per GPU by strategy") == 4  # wide and narrow
    assert _compared(client, PLAN, OTHER).count("Memory needed per GPU by strategy") == 2


def test_a_job_that_leaves_the_plan_open_is_answered_first(client: TestClient) -> None:
    job = {"model": "openai-community/gpt2", "gpus": "2", "gpu": "24GiB"}
    label = client.get("/.json", params=job).json()["recommendation"]["strategy"]
    sides = client.get("/compare.json", params={"a": urlencode(job), "b": urlencode(OTHER)}).json()
    assert sides["first"]["label"].lower().replace("-", "") == label


def test_whole_addresses_can_be_pasted(client: TestClient) -> None:
    pasted = {name: f"http://localhost:8000/?{urlencode(plan)}" for name, plan in (("a", PLAN), ("b", OTHER))}
    html = client.get("/compare", params=pasted).text
    assert html == _compared(client, PLAN, OTHER)


def test_without_two_plans_the_page_asks_for_them(client: TestClient) -> None:
    html = client.get("/compare", params={"a": urlencode(PLAN)}).text
    assert "paste two of them here" in html and 'name="b" value=""' in html


@pytest.mark.parametrize("wrong", [{"model": "nosuch"}, {"gpus": "2"}, PLAN | {"gpus": "-1"}, {"model": HOSTILE}])
def test_a_wrong_side_is_explained(client: TestClient, wrong: dict[str, str]) -> None:
    reply = client.get("/compare", params={"a": urlencode(PLAN), "b": urlencode(wrong)})
    assert reply.status_code in (404, 422) and reply.headers["cache-control"] == "no-store"
    assert 'id="problem"' in reply.text and "<script>" not in reply.text
    assert client.get("/compare.json", params={"a": urlencode(PLAN), "b": urlencode(wrong)}).json()["hint"]
