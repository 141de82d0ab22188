"""The charts of errors: published runs, and predictions against measurements."""

from __future__ import annotations

import itertools
import xml.etree.ElementTree as ET

import pytest
from chart_samples import (
    SVG,
    draw_accuracy,
    draw_two_timelines,
    error_point,
)

from fsdp_advisor.render.svg import (
    speed_errors,
    stacked,
    two_timelines,
)

# The errors of the time


def _marks(svg: str) -> list[ET.Element]:
    """The runs: the shapes that have a title."""
    return [e for e in ET.fromstring(svg).iter() if e.tag != f"{SVG}svg" and e.find(f"{SVG}title") is not None]


def _middle(mark: ET.Element) -> tuple[float, float]:
    def size(name: str) -> float:
        return float(mark.get(name, 0))

    if mark.tag == f"{SVG}circle":
        return size("cx"), size("cy")
    return size("x") + size("width") / 2, size("y") + size("height") / 2


def test_every_run_has_a_mark_of_its_kind_in_every_panel() -> None:
    points = [
        error_point(-5), error_point(-6, caveats=("host",)), error_point(-7, judges=False),
        error_point(-8, judges=False, caveats=("host",)),
    ]  # fmt: skip
    marks = _marks(speed_errors(points))
    assert len(marks) == 3 * len(points)
    for point in points:
        mine = [m for m in marks if m.findtext(f"{SVG}title") == point.label]
        assert len(mine) == 3
        for mark in mine:
            assert (mark.tag == f"{SVG}circle") == point.judges
            assert ("paper-fill" in mark.get("class", "")) == bool(point.caveats)


def test_marks_are_placed_by_error_and_size() -> None:
    sizes = [{"parameters": 10**9 * 3**i, "gpus": 4**i, "seq_len": 512 * 4**i} for i in range(4)]
    points = [error_point(e, **size) for e, size in zip((30, 0, -30, -60), sizes, strict=True)]
    marks = [_middle(m) for m in _marks(speed_errors(points))]
    for panel in (marks[:4], marks[4:8], marks[8:]):
        xs, ys = zip(*panel, strict=True)
        steps = {round(b - a) for a, b in itertools.pairwise(xs)}
        assert list(xs) == sorted(xs) and max(steps) - min(steps) <= 1  # a logarithmic axis
        assert [round(y - ys[0]) for y in ys] == pytest.approx([i * (ys[1] - ys[0]) for i in range(4)], abs=1)


def test_crowded_marks_are_moved_sideways_only() -> None:
    places = [_middle(m) for m in _marks(speed_errors([error_point(-5)] * 5))][:5]
    assert len({y for _, y in places}) == 1
    xs = sorted(x for x, _ in places)
    assert all(b - a >= 6.9 for a, b in itertools.pairwise(xs)) and xs[-1] - xs[0] <= 28.2


def test_sizes_above_the_largest_run_are_hatched() -> None:
    svg = speed_errors([error_point(1), error_point(2, gpus=128, seq_len=8192, parameters=7 * 10**10)])
    hatched = [
        e for e in ET.fromstring(svg).iter(f"{SVG}rect") if "unseen" in e.get("fill", "") and e.get("fill-opacity")
    ]
    largest = [_middle(m)[0] for m in _marks(svg)[1::2]]
    assert [float(e.get("x", 0)) for e in hatched] == pytest.approx(largest, abs=0.2)


def test_description_counts_misses_and_warnings() -> None:
    svg = speed_errors([error_point(-70, caveats=("host",)), error_point(-40), error_point(10)])
    assert "2 are off by more than 30 %, and the estimate itself warns of 1 of these" in svg
    assert "1 within 15 %, 1 within 30 %" in svg and ">hollow: the estimate warns of host (1)<" in svg


# Two timelines


def test_two_timelines_describe_both_peaks() -> None:
    described = ET.fromstring(draw_two_timelines("ZeRO-3", 700)).find(f"{SVG}desc")
    assert described is not None and described.text == "The peaks: predicted 5.00 GiB; measured 4.00 GiB."
    assert "none" in two_timelines({}, {}, label="nothing")


def test_stacked_drawings_are_below_each_other() -> None:
    first, second = draw_accuracy("a", 400), draw_two_timelines("b", 700)
    root = ET.fromstring(stacked(first, second, title="both"))
    inner = [ET.fromstring(one) for one in (first, second)]
    assert root.get("width") == max(one.get("width", "") for one in inner)
    assert [e.get("viewBox") for e in root.iter(f"{SVG}svg")][1:] == [one.get("viewBox") for one in inner]
    assert [e.get("transform") for e in root.findall(f"{SVG}g")] == [
        "translate(0 0)", f"translate(0 {float(inner[0].get('height', '')) + 16:g})",
    ]  # fmt: skip
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
