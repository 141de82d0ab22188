"""What the first page says of a job, its files, and how large it is."""

from __future__ import annotations

import gzip
import re
from html import escape, unescape
from urllib.parse import parse_qsl, urlsplit

import pytest
from fastapi.testclient import TestClient
from matrix import in_turn, of_today, taken
from page_reader import JOBS, read

from fsdp_advisor.job.fields import dashed, fields_of
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.units import format_gib

pytestmark = pytest.mark.slow

SOME = taken([*JOBS][:2], [*JOBS][2:], days=2)


@pytest.mark.parametrize("name", SOME)
def test_an_answer_for_every_kind_of_job(client: TestClient, name: str) -> None:
    job = JOBS[name]
    reply = client.get("/", params=job)
    assert reply.status_code == 200, reply.text
    words = "".join(read(reply.text).text)
    fits = client.get("/.json", params=job).json()["recommendation"]["fits"] is not False
    for heading in (
        "Recommendation" if fits else "Nothing fits",
        "How it was decided" if fits else "Why nothing fits",
        "What each GPU needs, by strategy",
        "Every figure",
        "Not modelled",
    ):
        assert heading in words


@in_turn(0, of=2)
def test_the_page_does_not_call_a_plan_the_fastest_if_a_faster_one_was_not_chosen(client: TestClient) -> None:
    job = {"model": "openai-community/gpt2", "gpus": "8", "gpu": "H100-80GB"}
    advice = client.get("/.json", params=job).json()["recommendation"]
    words = " ".join("".join(read(client.get("/", params=job).text).text).split())
    fastest = max(advice["rejected"], key=lambda row: row["tokens_per_second_per_gpu"] or 0)
    assert advice["why_not_simpler"] is None
    assert fastest["tokens_per_second_per_gpu"] > advice["tokens_per_second_per_gpu"]
    assert "The fastest of" not in words
    name = fastest["strategy"].replace("zero", "ZeRO-")
    assert f"92 % of the memory. {name} ({fastest['backend']}): {fastest['because']}." in words


@in_turn(2, of=3)
def test_the_page_compares_the_methods_and_says_why_one_was_chosen(client: TestClient) -> None:
    job = {
        "model": "meta-llama/Llama-3.2-1B",
        "gpu": "H100",
        "method": "any",
        "strategy": "ddp",
        "micro_batch_size": "2",
    }
    advice = client.get("/.json", params=job).json()["recommendation"]
    words = " ".join("".join(read(client.get("/", params=job).text).text).split())
    assert "Full fine-tuning, LoRA or QLoRA?" in words and advice["why_method"] in words


@pytest.mark.parametrize("name", SOME)
def test_the_page_says_what_the_advice_says(client: TestClient, name: str) -> None:
    job = JOBS[name]
    advice = client.get("/.json", params=job).json()["recommendation"]
    html = client.get("/", params=job).text
    words = " ".join("".join(read(html).text).split())
    if advice["fits"] is False:
        assert "Nothing fits" in words
        assert all(remedy["because"] in words for remedy in advice["what_would_fit"])
        verdict = html.partition('class="verdict')[2].partition("</section>")[0]
        links = re.findall(r'href="(/\?model=[^"]*)"', verdict)
        assert len(links) == len(advice["what_would_fit"]) > 0
        assert all("comes nearest" not in client.get(unescape(link)).text for link in links)
    elif advice["needed_bytes"] is not None:
        needed, tensors = format_gib(advice["needed_bytes"]), format_gib(advice["estimate"]["peak_tensor_bytes"])
        assert f"it needs {needed} of the " in words
        assert f"Memory that one GPU needs at the peak: {needed}" in words
        assert f"Tensors need {tensors}; the peak is in" in words


@in_turn(1, of=2)
@pytest.mark.parametrize("precision", taken(["fp32"], ["bf16-mixed"]))
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


@in_turn(1, of=2)
def test_chart_and_table_show_the_rows_of_the_view(client: TestClient) -> None:
    html = client.get("/", params={"model": "openai-community/gpt2", "gpus": "2", "gpu": "24GiB"}).text
    chart = next(words for words in re.findall(r"<desc[^>]*>(.*?)</desc>", html) if words.startswith("Against"))
    table = html[html.index('id="strategies"') :].partition("</table>")[0]
    shown = re.findall(r"<td>(\w+)</td><td class=\"n\">([\d.]+)</td>", table)
    assert shown
    assert all(f"{needed} GiB, of which" in chart for _, needed in shown)


@in_turn(1, of=5)
@pytest.mark.parametrize(
    ("micro_batch", "settings"),
    of_today([("3", ", and with its PYTORCH_ALLOC_CONF=expandable_segments:True."), ("1", ".")], days=2),
)
def test_the_chart_says_with_which_settings_its_rows_are_estimated(
    client: TestClient, micro_batch: str, settings: str
) -> None:
    job = {
        "model": "google-t5/t5-large",
        "gpus": "3",
        "gpu": "RTX-5090",
        "micro_batch_size": micro_batch,
        "optim": "adafactor",
    }
    html = client.get("/", params={**job, "gradient_accumulation_steps": "4"}).text
    assert f"All with the recommendation's micro-batch and checkpointing{settings}</p>" in html


@in_turn(0, of=5)
@pytest.mark.parametrize(
    "job", taken([*JOBS.values()][:1], [*JOBS.values()][1:3]), ids=taken([*JOBS][:1], [*JOBS][1:3])
)
def test_every_export_and_bundle_can_be_downloaded(client: TestClient, job: dict[str, str]) -> None:
    html = client.get("/", params=job).text
    links = [a["href"] or "" for tag, a in read(html).elements if tag == "a" and "download" in a]
    files = [link for link in links if "bundle" not in link]
    assert len(links) == 2 * len(files) and len(files) == html.count('class="export"') >= 6
    for link in links:
        file = client.get(link)
        name = file.headers["content-disposition"].split('"')[1]
        assert file.status_code == 200 and (f"Download {name}<" in html or name.endswith(".zip"))


def test_a_strategys_name_links_to_its_own_step(client: TestClient) -> None:
    page = read(client.get("/").text)
    links = [
        attrs["href"] or ""
        for tag, attrs in page.elements
        if tag == "a" and "strategy=" in (attrs.get("href") or "") and "/api/" not in (attrs.get("href") or "")
    ]
    assert len(links) >= 6
    assert (
        "Memory through one step under DDP" in client.get(next(link for link in links if "strategy=ddp" in link)).text
    )


@pytest.mark.parametrize("name", SOME)
def test_the_tree_ends_at_the_decision_and_the_rest_is_folded(client: TestClient, name: str) -> None:
    job = JOBS[name]
    html = client.get("/", params=job).text
    path = client.get("/.json", params=job).json()["recommendation"]["path"]
    tree, _, rest = html.partition('<ol class="tree">')[2].partition("</ol>")
    assert re.findall(r'<span class="ask">(.*?)</span>', tree) == [escape(node["question"]) for node in path]
    assert tree.count("<li") == len(path) + 1 and tree.rpartition("<li")[2].startswith(' class="decision"')
    after_bars = rest.partition('id="bars-title"')[2].partition("</section>")[2].partition("<footer")[0]
    folded = re.sub(r"<details class=.fold.*?</details>", "", after_bars, flags=re.DOTALL)
    assert "".join(read(folded.replace("</div></main>", "").replace("</div>", "")).text).split() == []
    assert " open" not in "".join(re.findall(r"<details[^>]*>", after_bars))


@pytest.mark.parametrize(
    "job", [*(JOBS[name] for name in SOME), {"model": "gpt2", "gpus": "3", "nnodes": "2"}, {"model": "nosuch"}]
)
def test_no_option_of_the_command_line_is_named(client: TestClient, job: dict[str, str]) -> None:
    html = re.sub(r"<(pre|code)\b.*?</\1>", "", client.get("/", params=job).text, flags=re.DOTALL)
    words = "".join(read(html).text)
    ours = {*map(dashed, fields_of(RecommendRequest)), "--explain", "--json"}  # exports name other programs' options
    assert ours.isdisjoint(re.findall(r"--[a-z][a-z_-]*", words))
    assert "nnodes" not in words and "fsdp-advisor gpus" not in words and "fsdp-advisor models" not in words


def test_tokens_give_the_duration_and_a_price_the_cost(client: TestClient) -> None:
    job = {"model": "openai-community/gpt2", "gpus": "2", "gpu": "RTX-4090", "tokens": "20B", "price": "2"}
    training = client.get("/.json", params=job).json()["recommendation"]["training"]
    said = re.search(r"<strong>(20\.0B tokens: [^<]*)</strong>", client.get("/", params=job).text)
    assert said is not None
    assert f"{training['days']:,.1f} days" in said[1] and f"{training['cost']:,.0f}" in said[1]


@pytest.mark.parametrize("find", taken(["gpus", "batch"], ["sequence", "gpu-type"]))
def test_a_search_shows_its_table_with_the_answer_marked(client: TestClient, find: str) -> None:
    job = {"model": "openai-community/gpt2", "gpus": "2", "gpu": "24GiB", "find": find}
    html = client.get("/", params=job).text
    found = client.get("/.json", params=job).json()["recommendation"]["find"]["rows"]
    table = html[html.index('aria-label="Found"') :].partition("</table>")[0]
    assert 1 <= table.count("<tr") - 1 == min(len(found), 8)
    assert table.count('class="chosen"') == 1
    if len(found) > 8:
        assert f"<summary>All {len(found)}</summary>" in html


@pytest.mark.parametrize(("label", "options"), of_today([("Found", {"find": "batch"}), ("Other plans", {})], days=2))
def test_memory_beyond_what_is_available_has_a_footnote(
    client: TestClient, label: str, options: dict[str, str]
) -> None:
    job = {"model": "meta-llama/Llama-2-7b-hf", "gpus": "4", "gpu": "A100-40GB", **options}
    html = unescape(client.get("/", params=job).text)
    table = html[html.index(f'aria-label="{label}"') :].partition("</p>")[0]
    assert "*</td>" in table and table.endswith("* with the allocator's cache; 36.24 GiB are enough with less cache.")


def _link(html: str, label: str) -> dict[str, str]:
    """The query of a link, by what it says."""
    href = next(a["href"] or "" for a, words in _links(html) if words == label)
    return dict(parse_qsl(urlsplit(href).query))


def _links(html: str) -> list[tuple[dict[str, str | None], str]]:
    anchors = [attrs for tag, attrs in read(html).elements if tag == "a"]
    return list(zip(anchors, re.findall(r"<a\b[^>]*>(.*?)</a>", html, re.DOTALL), strict=True))


def test_no_sequence_past_a_table_of_positions_is_suggested(client: TestClient) -> None:
    job = {"model": "openai-community/gpt2", "gpus": "2", "gpu": "24GiB", "micro_batch_size": "1", "seq_len": "1024"}
    html = client.get("/", params=job).text
    assert "one GPU more" in html and "twice as long" not in html


def test_what_if_links_change_one_thing_and_say_what_it_does_to_the_plan(client: TestClient) -> None:
    job = {"model": "openai-community/gpt2", "gpus": "2", "gpu": "RTX-4090", "micro_batch_size": "16", "seq_len": "512"}
    html = client.get("/", params=job).text
    assert _link(html, "one GPU more") == job | {"gpus": "3"}
    assert _link(html, "one GPU fewer") == job | {"gpus": "1"}
    assert _link(html, "sequences twice as long (1,024)") == job | {"seq_len": "1024"}
    assert _link(html, "on A100-40GB") == job | {"gpu": "A100-40GB"}
    assert _link(html, "with activation checkpointing") == job | {"activation_checkpointing": "full"}
    address = re.search(r'data-effects="([^"]*)"', html)
    assert address is not None
    effects = client.get(unescape(address[1])).json()
    assert list(effects) == re.findall(r'data-change="([^"]*)"', html)
    plan = dict(parse_qsl(urlsplit(unescape(address[1])).query))
    more = client.get("/api/v1/estimate", params=plan | {"activation_checkpointing": "full"}).json()["estimates"][0]
    before = client.get("/api/v1/estimate", params=plan).json()["estimates"][0]
    slower = 100 * (1 - more["tokens_per_second_per_gpu"] / before["tokens_per_second_per_gpu"])
    assert effects["checkpointing"].startswith(f"{format_gib(more['needed_bytes'])} of 23.52 GiB")
    assert effects["checkpointing"].endswith(f", {slower:.0f}\u00a0%\u00a0slower")


def test_a_change_that_no_longer_fits_takes_a_smaller_micro_batch_or_says_so(client: TestClient) -> None:
    job = {"model": "openai-community/gpt2", "gpus": "2", "gpu": "24GiB", "strategy": "ddp", "micro_batch_size": "16"}
    job |= {"backend": "ddp", "offload": "none", "activation_checkpointing": "none"}
    assert "micro-batch 8" in client.get("/what-if.json", params=job).json()["smaller"]
    large = job | {"model": "openai-community/gpt2-xl", "micro_batch_size": "1", "gpus": "8", "gpu": "A100-40GB"}
    assert client.get("/what-if.json", params=large).json()["smaller"].startswith("this plan no longer fits: ")


@in_turn(0, of=2)
def test_the_number_of_nodes_is_assumed_unless_it_is_given(client: TestClient) -> None:
    job = {"model": "openai-community/gpt2", "gpus": "16", "gpu": "A100-40GB"}
    html = client.get("/", params=job).text
    assert "2 nodes of 8 GPUs each are assumed" in html and "“Nodes” changes it" in html
    assert _link(html, "one node fewer (8 GPUs)") == job | {"gpus": "8", "nnodes": "1"}
    one = client.get("/", params=job | {"nnodes": "1"}).text
    assert "are assumed" not in one
    assert _link(one, "ZeRO-3")["nnodes"] == "1"


def test_a_gpu_without_bf16_is_suggested_with_fp16(client: TestClient) -> None:
    html = client.get("/", params={"model": "openai-community/gpt2", "gpu": "A10"}).text
    assert _link(html, "on T4") == {"model": "openai-community/gpt2", "gpu": "T4", "precision": "fp16-mixed"}


def test_whole_nodes_are_added_to_several_nodes(client: TestClient) -> None:
    job = {"model": "openai-community/gpt2", "gpus": "16", "nnodes": "2", "gpu": "A100-40GB"}
    html = client.get("/", params=job).text
    assert _link(html, "one node more (24 GPUs)") == job | {"gpus": "24", "nnodes": "3"}
    assert _link(html, "one node fewer (8 GPUs)") == job | {"gpus": "8", "nnodes": "1"}


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
LARGEST = ("experts", "the default", "one GPU", "nodes")


@pytest.mark.parametrize("name", taken(LARGEST, [name for name in FIRST_VIEWS if name not in LARGEST], days=4))
def test_the_first_view_has_less_than_150_kb(client: TestClient, name: str) -> None:
    """The page and everything it loads, plain and compressed."""
    html = client.get("/", params=FIRST_VIEWS[name]).text
    files = re.findall(r'(?:href|src)="(/static/[^"]+)"', html)
    assert len(files) == 3
    parts = [html.encode(), *(client.get(path).content for path in files)]
    assert sum(map(len, parts)) < 150_000
    assert sum(len(gzip.compress(part)) for part in parts) < 40_000
