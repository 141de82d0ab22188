"""The pages without a browser: every one answers, has JSON beside it, escapes what it is given, and stays small."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from fsdp_advisor.advice import recommend
from fsdp_advisor.estimator import make_request
from fsdp_advisor.job.request import RecommendRequest, fields_of
from fsdp_advisor.server import Settings, create_app, page_accuracy
from fsdp_advisor.server.page_form import EXAMPLE, controls
from fsdp_advisor.server.rendering import render
from fsdp_advisor.units import format_gib
from fsdp_advisor.validation import published

pytestmark = pytest.mark.slow

PAGES = ("/", "/how", "/accuracy", "/models", "/gpus")
HOSTILE = '"><script>alert(1)</script><img src=x onerror=alert(2)>{{7*7}}'
JOBS = {
    "the default": {},
    "one GPU": {"model": "openai-community/gpt2", "gpu": "24GiB"},
    "nodes": {"model": "meta-llama/Llama-3.1-70B", "gpus": "64", "nnodes": "8", "gpu": "H100"},
    "nothing fits": {"model": "meta-llama/Llama-3.1-70B", "gpus": "2", "gpu": "24GiB", "offload": "none"},
    "a count": {"model": "7B", "gpus": "4"},
    "one strategy": {"model": "meta-llama/Llama-2-7b-hf", "gpus": "4", "strategy": "ddp", "micro_batch_size": "1"},
    "no decoder": {"model": "google/vit-base-patch16-224", "gpus": "2"},
    "find": {
        "model": "openai-community/gpt2",
        "gpus": "2",
        "gpu": "24GiB",
        "find": "batch",
        "tokens": "1B",
        "price": "2",
    },
    "a size alone": {"model": "openai-community/gpt2", "gpus": "2", "gpu": "40GiB"},
}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    with TestClient(create_app(Settings(log_level="error"))) as running:
        yield running


class _Reader(HTMLParser):
    """Elements with their attributes, and whether every one is closed."""

    VOID = frozenset({"meta", "link", "input", "br", "col", "img"})
    MAY_STAY_OPEN = frozenset({"option", "tr", "td", "th"})
    """HTML ends them where the next begins or their parent ends."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        while tag not in self.MAY_STAY_OPEN and self.open[-1] in self.MAY_STAY_OPEN:
            self.open.pop()
        assert tag in self.MAY_STAY_OPEN or self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(html: str) -> _Reader:
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_whole_and_runs_nothing_inline(client: TestClient, path: str) -> None:
    reply = client.get(path)
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    page = read(reply.text)
    ids = [attrs["id"] for _, attrs in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    for tag, attrs in page.elements:
        assert tag != "style" and "style" not in attrs
        assert tag != "script" or attrs.get("src")
        assert not [name for name in attrs if name.startswith("on")]
        for name in ("src", "href", "action"):
            assert not (attrs.get(name) or "").startswith(("http:", "https:", "//", "data:", "javascript:"))


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_there_as_json(client: TestClient, path: str) -> None:
    reply = client.get(f"{path}.json")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    assert isinstance(reply.json(), dict)


@pytest.mark.parametrize("path", [*PAGES, "/.json", "/how.json"])
def test_unchanged_pages_are_not_sent_again(client: TestClient, path: str) -> None:
    tag = client.get(path).headers["etag"]
    assert client.get(path, headers={"If-None-Match": tag}).status_code == 304


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_an_answer_for_every_kind_of_job(client: TestClient, job: dict[str, str]) -> None:
    reply = client.get("/", params=job)
    assert reply.status_code == 200, reply.text
    words = "".join(read(reply.text).text)
    for heading in (
        "Recommendation",
        "Why ",
        "What each GPU needs, by strategy",
        "Every figure",
        "Not modelled",
    ):
        assert heading in words


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_the_page_says_what_the_advice_says(client: TestClient, job: dict[str, str]) -> None:
    asked = {"gpu": "H100-80GB", **(job or EXAMPLE)}
    advice = recommend(make_request(asked, RecommendRequest)).recommendation
    words = " ".join("".join(read(client.get("/", params=job).text).text).split())
    if advice.winner is None:
        assert "Nothing fits" in words
        assert all(remedy.because in words for remedy in advice.remedies)
        verdict = client.get("/", params=job).text.partition('class="verdict')[2].partition("</section>")[0]
        links = [
            a["href"] or "" for _, a in read("<p " + verdict + "</p>").elements if "/?model=" in (a.get("href") or "")
        ]
        assert len(links) == len(advice.remedies) > 0
        assert all("comes nearest" not in client.get(link).text for link in links)
        return
    assert advice.estimate is not None
    if advice.estimate.needed_bytes is not None:
        needed = format_gib(advice.estimate.needed_bytes)
        assert f"it needs {needed} of the " in words
        assert f"Memory that one GPU needs at the peak: {needed}" in words
        assert advice.estimate.peak_tensor_bytes is not None
        assert f"Tensors need {format_gib(advice.estimate.peak_tensor_bytes)}; the peak is in" in words
    assert client.get("/.json", params=job).json()["recommendation"]["strategy"] == advice.winner.plan.strategy


@pytest.mark.parametrize("precision", ["fp32", "bf16-mixed"])
def test_summary_chart_and_table_show_the_same_figure(client: TestClient, precision: str) -> None:
    job = {"model": "google/flan-t5-large", "gpus": "4", "gpu": "RTX-4090", "precision": precision}
    html = client.get("/", params=job).text
    (needed, has) = re.search(r"it needs ([\d.]+) GiB of the ([\d.]+) GiB", html).groups()  # type: ignore[union-attr]
    chart = next(words for words in re.findall(r"<desc[^>]*>(.*?)</desc>", html) if words.startswith("Against"))
    free = float(has) - float(needed)
    assert f": {needed} GiB, of which" in chart
    table = html[html.index('id="strategies"') :].partition("</table>")[0]
    chosen = table[table.index('class="chosen"') :].partition("</tr>")[0]
    assert f">{needed}<" in chosen
    assert float(re.search(r"fits, ([\d.]+) GiB free", chosen)[1]) == pytest.approx(free, abs=0.011)  # type: ignore[index]


def test_chart_and_table_show_the_rows_of_the_view(client: TestClient) -> None:
    html = client.get("/", params={"model": "openai-community/gpt2", "gpus": "2", "gpu": "24GiB"}).text
    chart = next(words for words in re.findall(r"<desc[^>]*>(.*?)</desc>", html) if words.startswith("Against"))
    table = html[html.index('id="strategies"') :].partition("</table>")[0]
    shown = re.findall(r"<td>(\w+)</td><td class=\"n\">([\d.]+)</td>", table)
    assert shown
    assert all(f"{needed} GiB, of which" in chart for _, needed in shown)


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
def test_bad_input_is_said_beside_the_form_and_the_form_keeps_it(client: TestClient, query: dict[str, str], status: int, field: str | None) -> None:  # fmt: skip
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
    assert "utm_source is no option and was left aside" in reply.text


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


@pytest.mark.parametrize("path", ["/nosuch", "/static/nosuch.css", "/models/"])
def test_missing_pages_get_status_404_in_the_accepted_form(client: TestClient, path: str) -> None:
    described = client.get(path, headers={"Accept": "application/json"})
    assert (described.status_code, described.json()["status"]) == (404, 404)
    page = client.get(path, headers={"Accept": BROWSER})
    assert (page.status_code, page.headers["content-type"]) == (404, "text/html; charset=utf-8")
    assert "Accept" in page.headers["vary"].split(", ") and page.headers["cache-control"] == "no-store"
    assert described.json()["error"] in page.text and described.json()["hint"] in page.text
    assert read(page.text).elements


@pytest.mark.parametrize(
    ("path", "accept"),
    [
        ("/nosuch", "*/*"),
        ("/nosuch", ""),
        ("/nosuch", "application/json, text/html;q=0.5"),
        ("/nosuch.json", BROWSER),
        ("/api/nosuch", BROWSER),
        ("/api/v1/estimate/more", BROWSER),
    ],
)
def test_programs_get_errors_as_json(client: TestClient, path: str, accept: str) -> None:
    described = client.get(path, headers={"Accept": accept})
    assert described.status_code == 404 and set(described.json()) == {"error", "hint", "status"}


def test_browsers_get_errors_as_pages(client: TestClient) -> None:
    page = client.post("/how", headers={"Accept": BROWSER})
    assert (page.status_code, page.headers["allow"]) == (405, "GET")
    assert "POST is not possible here" in page.text


def test_browsers_find_the_icon(client: TestClient) -> None:
    icon = client.get("/favicon.ico")
    assert (icon.status_code, icon.headers["content-type"]) == (200, "image/svg+xml")
    assert icon.content == client.get("/static/icon.svg").content
    assert client.get("/favicon.ico", headers={"If-None-Match": icon.headers["etag"]}).status_code == 304


@pytest.mark.parametrize("pattern", ["moe", "llama3", "7b", HOSTILE])
def test_lists_are_searched_as_the_api_does(client: TestClient, pattern: str) -> None:
    ids = [row["id"] for row in client.get("/api/v1/models", params={"pattern": pattern[:200]}).json()]
    page = client.get("/models", params={"pattern": pattern})
    shown = re.findall(r'<th scope="row"><a[^>]*>([^<]*)</a>', page.text)
    assert (
        shown == ids == [row["id"] for row in client.get("/models.json", params={"pattern": pattern}).json()["models"]]
    )
    fields = {attrs.get("name"): attrs.get("value") for tag, attrs in read(page.text).elements if tag == "input"}
    assert fields == {"pattern": pattern}
    gpus = [row["name"] for row in client.get("/api/v1/gpus", params={"pattern": "h100"}).json()]
    assert re.findall(r'<th scope="row"[^>]*>([^<]*)</th>', client.get("/gpus?pattern=h100").text) == gpus


def test_every_link_leads_somewhere(client: TestClient) -> None:
    seen = {path: read(client.get(path).text) for path in PAGES}
    anchors = {path: {attrs.get("id") for _, attrs in page.elements} for path, page in seen.items()}
    for path, page in seen.items():
        for tag, attrs in page.elements:
            link = attrs.get("href") or ""
            if tag != "a" or (link.startswith("/?model=") and path == "/models"):  # 131 of a kind
                continue
            if link.startswith("#"):
                assert link[1:] in anchors[path]
            else:
                assert client.get(link).status_code == 200, link


@pytest.mark.parametrize("job", [*JOBS.values()][:3], ids=[*JOBS][:3])
def test_every_export_is_at_hand(client: TestClient, job: dict[str, str]) -> None:
    html = client.get("/", params=job).text
    links = [a["href"] or "" for tag, a in read(html).elements if tag == "a" and "download" in a]
    assert len(links) == html.count('class="export"') >= 6
    for link in links:
        file = client.get(link)
        name = file.headers["content-disposition"].split('"')[1]
        assert file.status_code == 200 and f"Download {name}<" in html


def test_a_strategys_name_links_to_its_own_step(client: TestClient) -> None:
    page = read(client.get("/").text)
    links = [
        attrs["href"] or ""
        for tag, attrs in page.elements
        if tag == "a" and "strategy=" in (attrs.get("href") or "") and "/api/" not in (attrs.get("href") or "")
    ]
    assert len(links) >= 6
    assert "One step under DDP" in client.get(next(link for link in links if "strategy=ddp" in link)).text


BIG = {"gpus": "64", "nnodes": "8", "gpu": "H100"}
FIRST_VIEWS: dict[str, dict[str, str]] = {
    **JOBS,
    "405B": {"model": "meta-llama/Llama-3.1-405B", **BIG},
    "experts": {"model": "Qwen/Qwen3-235B-A22B", **BIG},
    "encoder and decoder": {"model": "google-t5/t5-11b", **BIG},
    "everything offloaded": {
        "model": "meta-llama/Llama-3.1-70B",
        "gpus": "8",
        "gpu": "A100-40GB",
        "host_memory": "2TB",
    },
}


@pytest.mark.parametrize("job", FIRST_VIEWS.values(), ids=FIRST_VIEWS)
def test_the_first_view_is_small(client: TestClient, job: dict[str, str]) -> None:
    """The page and everything it loads, plain and compressed."""
    html = client.get("/", params=job).text
    files = re.findall(r'(?:href|src)="(/static/[^"]+)"', html)
    assert len(files) == 3
    parts = [html.encode(), *(client.get(path).content for path in files)]
    assert sum(map(len, parts)) < 150_000
    assert sum(len(gzip.compress(part)) for part in parts) < 40_000


def test_static_files_change_their_address_with_their_content(client: TestClient) -> None:
    assert re.search(r'/static/page\.css\?v=[0-9a-f]{10}"', client.get("/").text)


def test_every_link_has_the_root_path() -> None:
    with TestClient(create_app(Settings(log_level="error", root_path="/advisor"))) as client:
        page = read(client.get("/").text)
        for path in ("/advisor", "/advisor/"):  # where the proxy leaves it on
            assert client.get(path).text == client.get("/").text
        assert client.get("/advisor/static/page.css").status_code == client.get("/static/page.css").status_code == 200
        assert client.delete("/advisor/api/v1/gpus").headers["allow"] == "GET"
    links = [attrs.get(name) or "" for _, attrs in page.elements for name in ("href", "src", "action") if name in attrs]
    assert links and all(link.startswith(("/advisor/", "#")) for link in links)


# The form


def test_every_option_of_a_recommendation_has_a_control() -> None:
    main, more = controls({})
    assert sorted(c.name for c in (*main, *more)) == sorted(
        n for n, f in fields_of(RecommendRequest).items() if not f.rule.hidden
    )
    assert len(main) == 10
    assert {c.name: c.choices for c in main}["offload"] == ("none", "optimizer", "parameters", "auto")


def test_what_the_form_sends_untouched_is_the_default_request() -> None:
    main, more = controls({})
    sent = {c.name: c.value for c in (*main, *more) if c.value}
    assert make_request({"model": "gpt2", **sent}, RecommendRequest) == RecommendRequest(model="gpt2")


def test_a_pasted_config_says_what_it_needs(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    html = client.get("/", params={"config": "{not json"}).text
    assert "{not json</textarea>" in html
    assert 'id="problem"' in html


# Accuracy


RECORD = {
    "request": {
        "model": HOSTILE, "strategy": "zero3", "backend": "fsdp2", "gpus": 8, "micro_batch_size": 1, "seq_len": 128,
        "precision": "bf16",
    },
    "rung": "measure", "device": "cuda", "outcome": "ok",
    "measured": {"peak_allocated_bytes": 10 * 2**30}, "predicted": {"peak_allocated_bytes": 10 * 2**30 + 2**29},
}  # fmt: skip


def test_without_records_the_page_says_so(tmp_path: Path) -> None:
    assert page_accuracy.view(tmp_path / "none")["cases"] == []


def test_records_are_listed_with_their_errors_and_drawn(tmp_path: Path, client: TestClient) -> None:
    other = {
        **RECORD,
        "rung": "simulate",
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
        assert len(titles) == 3 * len(runs)
        for run in runs:
            assert sum(f"{run['error_percent']:+.1f} % ({escape(run['source'])})" in title for title in titles) >= 3
    table = html[html.index('aria-label="Every published run"') :]
    assert re.findall(r">([+-][\d.]+) %<", table) == [f"{run['error_percent']:+.1f}" for run in runs]
    words = "".join(read(html).text)
    for part in data["published"]:
        assert f"{part['median_percent']} %" in words
    assert {"judged", "fitted"} == {run["part"] for run in runs} == {part["part"] for part in data["published"]}


# How


def test_the_worked_example_is_computed_and_adds_up(client: TestClient) -> None:
    example = client.get("/how.json").json()["example"]
    peak = float(example["peak"].split()[0])
    scale = {"GiB": 1.0, "MiB": 2**-10, "KiB": 2**-20, "B": 2**-30}
    parts = [float(a["size"].split()[0]) * scale[a["size"].split()[1]] for a in example["alive"]]
    assert sum(parts) == pytest.approx(peak, abs=0.05)
    assert float(example["by_thumb"].split()[0]) + float(example["missing"].split()[0]) == pytest.approx(peak, abs=0.02)
    assert example["peak"] in client.get("/how").text


def test_at_least_one_rule_of_thumb_is_wrong(client: TestClient) -> None:
    rules = client.get("/how.json").json()["rules"]
    assert any(rule["by_name_fits"] is False for rule in rules)
    assert all(float(rule["zero3_by_thumb"].split()[0]) < float(rule["zero3_needs"].split()[0]) for rule in rules)
