"""The page in a real browser, as its readers use it: with JavaScript and without, by mouse and by keyboard, light and dark."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from matrix import ALL, in_turn, of_today
from page_reader import PAGES

pytestmark = pytest.mark.slow

expect = pytest.importorskip("playwright.sync_api").expect
axe = pytest.importorskip("axe_playwright_python.sync_playwright")

Open = Callable[..., Any]
LINK = "/?model=openai-community%2Fgpt2&gpus=2&gpu=24GiB&micro_batch_size=2"


def _query(page: Any) -> dict[str, list[str]]:
    return parse_qs(urlsplit(page.url).query)


def _file(path: str) -> str:
    return path.partition("?")[0].strip("/") or "page"


def _says(page: Any) -> str:
    return str(page.locator(".says").inner_text())


def test_a_changed_input_updates_the_answer_and_the_address_without_a_reload(open_page: Open) -> None:
    page = open_page("/")
    page.evaluate("window.same = true")
    before = _says(page)
    page.get_by_label("Model", exact=True).fill("openai-community/gpt2")
    page.get_by_label("GPUs (total)").fill("2")
    page.get_by_label("GPU type").fill("RTX 4090")
    page.get_by_label("Precision", exact=True).select_option("bf16")
    expect(page.locator(".says")).to_contain_text("RTX-4090")
    page.wait_for_url("**precision=bf16**")
    assert _says(page) != before
    assert page.evaluate("window.same") is True
    assert _query(page) == {
        "model": ["openai-community/gpt2"],
        "gpus": ["2"],
        "gpu": ["RTX 4090"],
        "precision": ["bf16"],
    }
    assert "gpt2" in page.title()
    assert page.locator("#status").inner_text() == _says(page)
    page.go_back()
    expect(page.get_by_label("Precision", exact=True)).to_have_value("")


def test_the_address_is_a_permalink_that_another_reader_can_follow(open_page: Open) -> None:
    page = open_page(LINK)
    page.get_by_label("Sequence length", exact=True).fill("512")
    page.wait_for_url("**seq_len=512**")
    expect(page.locator("#answer")).to_have_attribute("aria-busy", "false")
    shared = page.url.partition(page.evaluate("location.origin"))[2]
    with_it, without = open_page(shared), open_page(shared, java_script_enabled=False)
    assert _says(page) == _says(with_it) == _says(without)
    assert without.get_by_label("Sequence length", exact=True).input_value() == "512"


@in_turn(0, of=3)
def test_everything_is_there_without_javascript(open_page: Open) -> None:
    page = open_page("/", java_script_enabled=False)
    page.get_by_label("Model", exact=True).fill("openai-community/gpt2")
    page.get_by_label("GPUs (total)").fill("4")
    page.get_by_text("More options").click()
    page.get_by_label("Strategy", exact=True).select_option("zero2")
    page.get_by_role("button", name="Estimate").click()
    page.wait_for_url("**strategy=zero2**")
    assert "ZeRO-2" in _says(page)
    page.get_by_text("More options: Strategy").click()
    assert page.get_by_label("Strategy", exact=True).input_value() == "zero2"
    assert page.get_by_role("button", name="Copy").count() == page.get_by_role("button", name="Share").count() == 0
    page.get_by_role("heading", name="Files to launch it").click()
    links = page.locator(".export").get_by_role("link", name="Download")
    assert links.count() == page.locator(".export").count() >= 3
    with page.expect_download() as download:
        links.first.click()
    assert "ZeRO-2" in Path(download.value.path()).read_text()


@in_turn(1, of=3)
def test_an_export_is_copied_and_offered_for_download(open_page: Open) -> None:
    page = open_page(LINK, permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("link", name="The files it needs").click()
    tabs = page.get_by_role("tab")
    assert tabs.count() >= 3
    tab = tabs.nth(1)
    tab.click()
    panel = page.locator(f"#{tab.get_attribute('aria-controls')}")
    assert panel.is_visible() and page.locator(".export:visible").count() == 1
    panel.get_by_role("button", name="Copy").click()
    panel.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == panel.locator("pre").text_content()
    link = panel.get_by_role("link", name="Download")
    with page.expect_download() as download:
        link.click()
    assert Path(download.value.path()).read_text() == panel.locator("pre").text_content()
    address = urlsplit(link.get_attribute("href"))
    assert address.path.startswith("/api/v1/export/")
    assert parse_qs(address.query)["model"] == ["openai-community/gpt2"]
    assert {"strategy", "backend", "offload"} <= parse_qs(address.query).keys()


@in_turn(2, of=3)
def test_the_launch_line_is_copied(open_page: Open) -> None:
    page = open_page(LINK, permissions=["clipboard-read", "clipboard-write"])
    page.locator("[data-copy=launch]").click()
    page.get_by_role("button", name="Copied").wait_for()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert (copied == page.locator("#launch").text_content() and "launch" in copied) or "run" in copied


@in_turn(1, of=3)
def test_tabs_follow_the_arrow_keys(open_page: Open) -> None:
    page = open_page(LINK)
    page.get_by_role("heading", name="Files to launch it").click()
    page.get_by_role("tab").first.focus()
    page.keyboard.press("ArrowRight")
    second = page.get_by_role("tab").nth(1)
    assert second.get_attribute("aria-selected") == "true"
    assert page.evaluate("document.activeElement.id") == second.get_attribute("id")
    page.keyboard.press("End")
    assert page.get_by_role("tab").last.get_attribute("aria-selected") == "true"
    page.keyboard.press("ArrowRight")
    assert page.get_by_role("tab").first.get_attribute("aria-selected") == "true"


@in_turn(2, of=3)
def test_the_keyboard_goes_through_the_form_in_reading_order(open_page: Open) -> None:
    page = open_page("/")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the content"
    assert page.locator(".skip").bounding_box()["width"] > 20
    reached = []
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent.trim()"))
        if reached[-1] == "Estimate":
            break
    fields = ["model", "gpus", "gpu", "nnodes", "seq_len", "precision"]
    fields += [
        "More options",
        "Adapters, frozen and quantized weights",
        "Paste a config.json or a script",
        "Estimate",
    ]
    assert reached[-len(fields) :] == fields
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"
    tops = [page.locator(f"#{name}").bounding_box() for name in fields[:6]]
    assert [(b["y"], b["x"]) for b in tops] == sorted((b["y"], b["x"]) for b in tops)


@in_turn(2, of=3)
def test_the_catalogs_models_are_suggested_when_the_field_is_entered(open_page: Open) -> None:
    page = open_page("/")
    suggested = page.locator("#known-models option")
    assert suggested.count() == 0
    page.get_by_label("Model", exact=True).focus()
    expect(suggested.first).to_be_attached()
    assert "meta-llama/Llama-2-7b-hf" in suggested.evaluate_all("options => options.map((option) => option.value)")


@in_turn(2, of=3)
def test_enter_in_the_form_shows_the_answer(open_page: Open) -> None:
    page = open_page("/")
    page.get_by_label("Model", exact=True).fill("openai-community/gpt2")
    page.keyboard.press("Enter")
    page.wait_for_url("**openai-community%2Fgpt2**")
    expect(page.locator("#answer")).to_contain_text("openai-community/gpt2")


@in_turn(2, of=3)
def test_bad_input_says_so_in_place_and_good_input_mends_it(open_page: Open) -> None:
    page = open_page("/")
    page.get_by_label("Model", exact=True).fill("meta-lama/Llama-2-7b-hf")
    page.locator("#problem").wait_for()
    assert "unknown model" in page.locator("#problem").inner_text()
    assert "unknown model" in page.locator("#status").inner_text()
    page.get_by_label("Model", exact=True).fill("openai-community/gpt2")
    page.locator(".says").wait_for()
    open_page.complaints[:] = [words for words in open_page.complaints if "404" not in words]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", of_today(["config", "peft_config"], days=2))
def test_a_form_too_long_for_an_address_says_so_without_a_request(open_page: Open, name: str) -> None:
    page = open_page(LINK)
    before = page.url
    page.locator(f"#{name}").evaluate("(field) => { field.value = '#'.repeat(20001); }")
    page.locator(f"#{name}").dispatch_event("input")
    expect(page.locator("#status")).to_contain_text(
        "bytes in an address, too many for the page: give files to the command line"
    )
    expect(page.locator(".says")).to_be_hidden()
    assert page.url == before


@in_turn(0, of=3)
def test_markup_in_a_model_name_is_shown_not_run(open_page: Open) -> None:
    name = "<img src=x onerror=window.run=1><script>window.run=1</script>"
    page = open_page("/?model=" + name.replace(" ", "%20"), status=404)
    assert name[:20] in page.locator("#problem").inner_text()
    assert page.evaluate("window.run") is None
    page.get_by_label("Model", exact=True).fill(name + "!")
    page.wait_for_url("**%21**")
    expect(page.locator("#answer")).to_have_attribute("aria-busy", "false")
    assert page.evaluate("window.run") is None and page.locator("#answer img").count() == 0
    open_page.complaints[:] = [words for words in open_page.complaints if "404" not in words]  # type: ignore[attr-defined]


@in_turn(1, of=3)
def test_an_old_answer_is_never_shown_under_a_new_question(open_page: Open) -> None:
    page = open_page(LINK)
    gpus, says = page.get_by_label("GPUs (total)"), page.locator(".says")
    before = _says(page)
    gpus.fill("4")
    expect(says).to_be_hidden()
    expect(page.locator("#status")).to_contain_text("Computing")
    gpus.fill("2")  # the question of the answer again
    expect(says).to_be_visible()
    assert _says(page) == before
    gpus.fill("1")
    page.get_by_label("Model", exact=True).fill("")
    expect(says).to_be_hidden()
    expect(page.locator("#status")).to_contain_text("Complete the form")
    page.route("**/?*", lambda route: route.abort("connectionfailed"))
    page.get_by_label("Model", exact=True).fill("openai-community/gpt2-medium")
    expect(page.locator("#status")).to_contain_text("could not be fetched")
    expect(says).to_be_hidden()
    page.unroute("**/?*")
    page.get_by_role("button", name="Estimate").click()
    expect(says).to_be_visible()
    assert "gpt2-medium" in page.title()
    open_page.complaints[:] = [words for words in open_page.complaints if "ERR_CONNECTION_FAILED" not in words]  # type: ignore[attr-defined]


@in_turn(1, of=4)
def test_the_share_button_copies_the_address(open_page: Open) -> None:
    page = open_page(LINK, permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Share").click()
    page.get_by_role("button", name="Address copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == page.url


@in_turn(2, of=3)
def test_what_if_links_show_their_effects_and_lead_to_the_changed_job(open_page: Open) -> None:
    page = open_page(LINK)
    links = page.get_by_role("navigation", name="What if").get_by_role("listitem")
    for i in range(links.count()):
        expect(links.nth(i).locator("span")).to_contain_text("GiB")
    links.get_by_role("link", name="one GPU more").click()
    assert _query(page)["gpus"] == ["3"] and page.get_by_label("GPUs (total)").input_value() == "3"
    assert "on each of 3 " in _says(page)
    without = open_page(LINK, java_script_enabled=False)
    without.get_by_role("link", name="one GPU more").click()
    assert _says(without) == _says(page)


@in_turn(0, of=4)
def test_another_plan_opens_side_by_side(open_page: Open) -> None:
    page = open_page(LINK, java_script_enabled=False)
    page.get_by_role("heading", name="other plans, and why not").click()
    page.locator("#others tbody a").first.click()
    assert page.get_by_role("heading", name="Compare two plans").is_visible()
    assert page.locator(".sides section").count() == 2
    first = page.locator(".sides a").first
    assert first.inner_text().partition(" with ")[0] in open_page(LINK).locator(".says").inner_text()


@in_turn(0, of=3)
def test_a_phone_shows_the_answer_within_a_screen_of_the_button(open_page: Open) -> None:
    for path in (LINK, LINK + "&tokens=1B&find=batch"):
        page = open_page(path, width=390, height=844, has_touch=True, is_mobile=True)
        button = page.get_by_role("button", name="Estimate").bounding_box()
        says = page.locator(".says").bounding_box()
        assert says["y"] + says["height"] - button["y"] < 844
        page.get_by_label("GPUs (total)").fill("4")
        page.get_by_role("button", name="Estimate").click()
        expect(page.locator(".says")).to_contain_text("on each of 4 ")
        says = page.locator(".says").bounding_box()
        assert says["y"] >= 0 and says["y"] + says["height"] <= 844


@in_turn(1, of=3)
@pytest.mark.parametrize(("width", "height"), [(1280, 2600), (390, 3900)])
def test_the_page_is_short_and_begins_with_the_answer(open_page: Open, width: int, height: int) -> None:
    page = open_page("/", width=width)
    expect(page.locator("[data-change=more]")).to_contain_text("GiB")
    assert page.evaluate("document.documentElement.scrollHeight") < height
    says = page.locator(".says").bounding_box()
    assert says["y"] + says["height"] < 900 or width < 400


@in_turn(0, of=3)
def test_folds_open_by_keyboard_and_stay_open(open_page: Open) -> None:
    page = open_page(LINK)
    page.locator("#rows > summary").focus()
    page.keyboard.press("Enter")
    expect(page.locator("#strategies")).to_be_visible()
    page.get_by_label("GPUs (total)").fill("4")
    expect(page.locator(".says")).to_contain_text("on each of 4 ")
    expect(page.locator("#strategies")).to_be_visible()


@in_turn(0, of=3)
def test_help_is_shown_at_the_field_in_use(open_page: Open) -> None:
    page = open_page("/")
    assert page.locator("#gpu-help").is_hidden()
    page.get_by_label("GPU type, or size").focus()
    expect(page.locator("#gpu-help")).to_be_visible()
    assert page.get_by_label("GPU type, or size").get_attribute("aria-describedby") == "gpu-help"
    page.get_by_text("More options").click()
    assert page.locator("#tokens-help").is_visible()


@in_turn(3, of=4)
def test_light_and_dark_follow_the_readers_setting(open_page: Open) -> None:
    seen = {}
    for scheme in ("light", "dark"):
        page = open_page(LINK, color_scheme=scheme)
        seen[scheme] = page.evaluate(
            """() => [getComputedStyle(document.body).backgroundColor,
                      getComputedStyle(document.querySelector('.chart.wide .f-states')).fill,
                      getComputedStyle(document.querySelector('.chart.wide .l-ink')).stroke]"""
        )
    assert all(a != b for a, b in zip(seen["light"], seen["dark"], strict=True))


@in_turn(1, of=3)
@pytest.mark.parametrize("width", [1280, 390])
def test_the_chart_that_fits_is_shown_and_nothing_overflows(open_page: Open, width: int) -> None:
    page = open_page("/", width=width)
    for fold in ("#step", "#speed"):
        page.locator(f"{fold} > summary").click()
    shown, hidden = (".wide", ".narrow") if width > 700 else (".narrow", ".wide")
    assert page.locator(f".chart{shown}:visible").count() == 3  # bars, step, memory against speed
    assert page.locator(f".chart{hidden}:visible").count() == 0
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator(".scroll > .chart:visible").bounding_box()["width"] == 960  # the streams scroll
    sizes = page.locator(f".chart{shown} text").evaluate_all(
        "all => all.map(t => t.getBoundingClientRect().height / t.getBBox().height * parseFloat(getComputedStyle(t).fontSize))"
    )
    assert min(sizes) >= 11.4


@pytest.mark.parametrize(("path", "scheme"), of_today([*itertools.product(PAGES, ("light", "dark"))], days=8))
def test_no_serious_fault_of_accessibility(open_page: Open, path: str, scheme: str, shots: Path) -> None:
    page = open_page(path, color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(folded => (folded.open = true))")
    found = axe.Axe().run(page, options={"resultTypes": ["violations"]})
    faults = [
        (fault["id"], fault["impact"], [node["html"][:120] for node in fault["nodes"][:3]])
        for fault in found.response["violations"]
        if fault["impact"] in ("serious", "critical")
    ]
    assert faults == []
    page.evaluate("document.querySelectorAll('details').forEach(folded => (folded.open = false))")
    if ALL:
        page.screenshot(path=shots / f"{_file(path)}-1280-{scheme}.png", full_page=True)


@pytest.mark.parametrize("path", of_today(PAGES, 5))
def test_a_phone_shows_every_page(open_page: Open, path: str, shots: Path) -> None:
    page = open_page(path, width=390, height=844, has_touch=True, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    if ALL:
        page.screenshot(path=shots / f"{_file(path)}-390.png", full_page=True)


@in_turn(2, of=4)
def test_the_readmes_screenshots_can_be_made(tmp_path: Path, chromium: Any) -> None:
    from screenshots import SHOTS, shoot

    written = shoot(chromium, "about:blank", SHOTS[:1], tmp_path)
    assert [path.name for path in written] == ["page.png"]
