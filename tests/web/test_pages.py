"""Every page answers, has its JSON, runs nothing inline, and every link leads somewhere."""

from __future__ import annotations

import re
from collections import Counter
from html import unescape

import pytest
from fastapi.testclient import TestClient
from matrix import ALL, in_turn
from page_reader import HOSTILE, PAGES, read

from fsdp_advisor.server import Settings, create_app

pytestmark = pytest.mark.slow

FOLLOWED = 4 if ALL else 2
"""Links with a query that are followed of each kind on all pages. Each has a job to compute."""


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
    path, _, query = path.partition("?")
    reply = client.get(f"{path}.json?{query}")
    assert reply.status_code == 200
    assert reply.headers["content-type"] == "application/json"
    assert isinstance(reply.json(), dict)


@pytest.mark.parametrize("path", [*PAGES, "/.json", "/how.json"])
def test_unchanged_pages_are_not_sent_again(client: TestClient, path: str) -> None:
    tag = client.get(path).headers["etag"]
    assert client.get(path, headers={"If-None-Match": tag}).status_code == 304


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


@in_turn(2, of=3)
def test_every_link_leads_somewhere(client: TestClient) -> None:
    seen = {path: read(client.get(path).text) for path in PAGES}
    anchors = {path: {attrs.get("id") for _, attrs in page.elements} for path, page in seen.items()}
    followed: Counter[str] = Counter()
    for path, page in seen.items():
        for tag, attrs in page.elements:
            link = attrs.get("href") or ""
            kind = link.partition("?")[0]
            followed[kind] += tag == "a" and "?" in link
            if tag != "a" or followed[kind] > FOLLOWED or "download" in attrs:  # test_answers.py downloads every file
                continue
            if link.startswith("#"):
                assert link[1:] in anchors[path]
            else:
                assert client.get(link).status_code == 200, link


def test_static_files_change_their_address_with_their_content(client: TestClient) -> None:
    assert re.search(r'/static/page\.css\?v=[0-9a-f]{10}"', client.get("/").text)


@in_turn(0, of=3)
def test_every_link_has_the_root_path() -> None:
    with TestClient(create_app(Settings(workers=1, log_level="error", root_path="/advisor"))) as client:
        page = read(client.get("/").text)
        for path in ("/advisor", "/advisor/"):  # where the proxy leaves it on
            assert client.get(path).text == client.get("/").text
        assert client.get("/advisor/static/page.css").status_code == client.get("/static/page.css").status_code == 200
        assert client.delete("/advisor/api/v1/gpus").headers["allow"] == "GET"
    links = [attrs.get(name) or "" for _, attrs in page.elements for name in ("href", "src", "action") if name in attrs]
    assert links and all(link.startswith(("/advisor/", "#")) for link in links)


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


# The API


def test_the_example_on_the_api_page_is_a_whole_address(client: TestClient) -> None:
    html = client.get("/docs").text
    (address,) = re.findall(r"curl '([^']*)'", unescape(html))
    assert address.startswith("http://testserver/api/v1/estimate?")
    assert client.get(address).status_code == 200
