"""Every chart is titled, described, well-formed and legible, whatever its texts and its width."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest
from chart_samples import (
    CHARTS,
    HOSTILE,
    SVG,
    Draw,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from matrix import examples

from fsdp_advisor.render.svg import (
    accuracy,
    frontier,
    speed_errors,
    stacked_bars,
    stream_timeline,
)
from fsdp_advisor.render.svg.elements import width_of
from fsdp_advisor.render.svg.scale import log_ticks, ticks
from fsdp_advisor.units import GIB


@pytest.fixture(params=CHARTS.values(), ids=CHARTS)
def draw(request: pytest.FixtureRequest) -> Draw:
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("width", [350, 960])
def test_chart_is_titled_described_and_self_contained(draw: Draw, width: int) -> None:
    root = ET.fromstring(draw("ZeRO-3", width))
    title, desc = root.find(f"{SVG}title"), root.find(f"{SVG}desc")
    assert title is not None and desc is not None and title.text and desc.text
    assert root.get("role") == "img"
    assert (root.get("aria-labelledby"), root.get("aria-describedby")) == (title.get("id"), desc.get("id"))
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    for e in root.iter():
        assert e.tag.removeprefix(SVG) not in ("script", "style", "image", "use", "foreignObject", "a")
        assert not {name for name in e.attrib if name == "style" or name.startswith("on") or "href" in name}
        for paint in (e.get("fill", ""), e.get("stroke", "")):
            assert not paint.startswith("url(") or paint[5:-1] in ids
        broken = [float(n) for n in re.findall(r"-?[\d.]+", e.get("stroke-dasharray", ""))]
        assert all(n >= 0 for n in broken)


@pytest.mark.parametrize("width", [350, 960])
def test_text_stays_within_the_drawing(draw: Draw, width: int) -> None:
    root = ET.fromstring(draw("ZeRO-3", width))
    _, _, wide, high = map(float, root.get("viewBox", "").split())
    assert wide <= width
    for e in root.iter(f"{SVG}text"):
        long = width_of(e.text or "", float(e.get("font-size", 12)), bold=e.get("font-weight") == "600")
        x, y = float(e.get("x", "nan")), float(e.get("y", "nan"))
        begin = {"start": x, "middle": x - long / 2, "end": x - long}[e.get("text-anchor", "start")]
        assert 0 <= y <= high, e.text
        assert begin >= -1 and begin + long <= wide + 12, e.text


@pytest.mark.parametrize("width", [350, 960])
def test_markup_in_a_name_is_escaped(draw: Draw, width: int) -> None:
    svg = draw(HOSTILE, width)
    root = ET.fromstring(svg)
    assert "<script" not in svg
    assert not any(name.startswith("on") for e in root.iter() for name in e.attrib)
    assert any("<script>" in (e.text or "") or "<scrip" in (e.text or "") for e in root.iter())


@settings(max_examples=examples(60), deadline=None)
@given(words=st.text(max_size=80), width=st.integers(200, 1400), chart=st.sampled_from(sorted(CHARTS)))
def test_any_text_at_any_width_is_well_formed(words: str, width: int, chart: str) -> None:
    ET.fromstring(CHARTS[chart](words, width))


@given(low=st.floats(0, 1e6), span=st.floats(1e-3, 1e9), about=st.integers(2, 8))
def test_ticks_are_few_and_inside(low: float, span: float, about: int) -> None:
    found = ticks(low, low + span, about)
    assert found or about < 3  # a step may be 2.5 times as long as asked for
    assert len(found) <= about + 1
    assert all(low - 1e-6 * span <= t <= (low + span) * (1 + 1e-6) for t in found)


@given(low=st.floats(1e-3, 1e3), times=st.floats(1.1, 1e6))
def test_log_ticks_are_inside(low: float, times: float) -> None:
    found = log_ticks(low, low * times)
    assert found or times < 2.5
    assert all(low <= t <= low * times for t in found)


@pytest.mark.parametrize(
    "draw_none",
    [
        lambda: stacked_bars([], GIB, "gpu"),
        lambda: stream_timeline([], label=""),
        lambda: frontier([]),
        lambda: accuracy([]),
        lambda: speed_errors([]),
    ],
)
def test_empty_charts_are_well_formed(draw_none: Callable[[], str]) -> None:
    ET.fromstring(draw_none())
