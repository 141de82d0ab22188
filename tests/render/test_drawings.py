"""Charts are titled, described, well-formed and legible, whether made of plain data or of real estimates."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fsdp_advisor import estimate
from fsdp_advisor.memory.device import NON_TENSOR_PARTS
from fsdp_advisor.program.accounts import ACCOUNTS
from fsdp_advisor.render.parts import PARTS, PartBytes, bar_parts
from fsdp_advisor.render.svg import (
    AccuracyPoint,
    Bar,
    ErrorPoint,
    FrontierPoint,
    Moment,
    Span,
    TreeNode,
    accuracy,
    decision_tree,
    frontier,
    memory_timeline,
    speed_errors,
    stacked,
    stacked_bars,
    stream_timeline,
    two_timelines,
    unfold,
)
from fsdp_advisor.render.svg.elements import width_of
from fsdp_advisor.render.svg.scale import log_ticks, ticks
from fsdp_advisor.units import GIB

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = '<script>alert(1)</script>" onload="x" & \x00\u202e]]>'
LIVE = {"parameters": 3 * GIB, "optimizer": 6 * GIB, "activations": GIB, "loss": GIB // 2, "temporaries": 7}

Draw = Callable[[str, int], str]


def parts(needed: dict[str, int]) -> PartBytes:
    return tuple((part, part.bytes_in(needed)) for part in PARTS)


def _bars(words: str, width: int) -> str:
    rows = [
        Bar(
            label=words,
            backend=words,
            parts=parts(LIVE | {"libraries": GIB}),
            verdict=words,
            fits=fits,
            chosen=fits is True,
        )
        for fits in (True, False, None)
    ]
    return stacked_bars(rows, 8 * GIB, words, width=width)


def _timeline(words: str, width: int) -> str:
    moments = [
        Moment(phase=phase, where=words, live_bytes=live * GIB, high_bytes=(live + 1) * GIB)
        for phase, live in (("forward", 3), ("forward", 5), ("backward", 4), ("optimizer", 2))
    ]
    return memory_timeline(moments, label=words, capacity_bytes=7 * GIB, kept_bytes=GIB, width=width)


def _tree(words: str, width: int) -> str:
    nodes = [
        TreeNode(id="a", text=words, details=(words,), taken=True),
        TreeNode(id="b", text=words, parent="a", answer="no"),
        TreeNode(id="c", text=words, parent="a", answer="yes", taken=True, outcome=True),
        TreeNode(id="d", text=words, parent="b", answer="yes", outcome=True),
    ]
    return decision_tree(nodes, width=width)


def _streams(words: str, width: int) -> str:
    return stream_timeline(
        [Span(lane=words, kind=words, start_s=0, end_s=0.1), Span(lane="b", kind="c", start_s=0.1, end_s=0.3)],
        label=words,
        width=width,
    )


def _frontier(words: str, width: int) -> str:
    points = [
        FrontierPoint(label=words, memory_bytes=m * GIB, throughput=s, fits=m < 8, chosen=m == 4)
        for m, s in ((4, 90.0), (6, 120.0), (9, 100.0))
    ]
    return frontier(points, capacity_bytes=8 * GIB, width=width)


def _accuracy(words: str, width: int) -> str:
    points = [AccuracyPoint(group=words, measured_bytes=m * GIB, predicted_bytes=m * GIB + 5) for m in (1, 9, 70)]
    return accuracy(points, width=width)


def _both(words: str, width: int) -> str:
    predicted = {"forward": [2 * GIB, 4 * GIB], "backward": [5 * GIB], "optimizer": [GIB]}
    return two_timelines(predicted, {**predicted, "backward": [4 * GIB] * 70}, label=words, width=width)


def _error(error: float, *, judges: bool = True, caveats: tuple[str, ...] = (), **size: int) -> ErrorPoint:
    sizes = {"parameters": 7 * 10**9, "gpus": 8, "seq_len": 2048} | size
    return ErrorPoint(label=f"a run off by {error:g} %", error_percent=error, judges=judges, caveats=caveats, **sizes)


def _errors(words: str, width: int) -> str:
    points = [
        replace(_error(-70, caveats=(words, words)), label=words),
        _error(12, judges=False, gpus=128),
        _error(3, seq_len=65_536, parameters=10**11),
    ]
    return speed_errors(points, width=width)


CHARTS: dict[str, Draw] = {
    "bars": _bars,
    "timeline": _timeline,
    "tree": _tree,
    "streams": _streams,
    "frontier": _frontier,
    "accuracy": _accuracy,
    "two timelines": _both,
    "speed errors": _errors,
}


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


@settings(max_examples=60, deadline=None)
@given(words=st.text(max_size=80), width=st.integers(200, 1400), chart=st.sampled_from(sorted(CHARTS)))
def test_any_text_at_any_width_is_well_formed(words: str, width: int, chart: str) -> None:
    ET.fromstring(CHARTS[chart](words, width))


@given(low=st.floats(0, 1e6), span=st.floats(1e-3, 1e9), about=st.integers(2, 8))
def test_ticks_are_few_and_inside(low: float, span: float, about: int) -> None:
    found = ticks(low, low + span, about)
    assert len(found) <= about + 1
    assert all(low - 1e-6 * span <= t <= (low + span) * (1 + 1e-6) for t in found)


@given(low=st.floats(1e-3, 1e3), times=st.floats(1.1, 1e6))
def test_log_ticks_are_inside(low: float, times: float) -> None:
    assert all(low <= t <= low * times for t in log_ticks(low, low * times))


@pytest.mark.parametrize(
    "draw_none",
    [
        lambda: stacked_bars([], GIB, "gpu"),
        lambda: stream_timeline([], label=""),
        lambda: frontier([]),
        lambda: accuracy([]),
        lambda: decision_tree([]),
        lambda: speed_errors([]),
    ],
)
def test_empty_charts_are_well_formed(draw_none: Callable[[], str]) -> None:
    ET.fromstring(draw_none())


# Bars


def test_bar_parts_sum_to_needed_bytes() -> None:
    for row in estimate(model="meta-llama/Llama-2-7b-hf", gpus=4, gpu="A100-40GB").estimates:
        assert sum(n for _, n in bar_parts(row)) == row.needed_bytes


def test_every_account_belongs_to_one_part() -> None:
    accounts = [account for part in PARTS for account in part.accounts]
    assert sorted(accounts) == sorted([*ACCOUNTS, *NON_TENSOR_PARTS])


def _boxes(svg: str) -> list[tuple[float, float, float, float]]:
    """(left, top, right, bottom) of every box."""
    found = []
    for e in ET.fromstring(svg).iter(f"{SVG}path"):
        if e.get("class") == "box":
            for box in re.findall(r"M([\d.]+) ([\d.]+)H([\d.]+)V([\d.]+)H[\d.]+Z", e.get("d", "")):
                left, top, right, bottom = map(float, box)
                found.append((left, top, right, bottom))
    return found


def test_bar_length_is_proportional_to_bytes_and_long_bars_are_cut() -> None:
    def bar(times: int) -> Bar:
        return Bar(label="x", backend="y", parts=parts({"parameters": times * GIB}), verdict="", fits=True)

    boxes = _boxes(stacked_bars([bar(2), bar(4), bar(400)], 8 * GIB, "gpu"))
    lengths = [right - left for left, _, right, _ in boxes]
    assert lengths[1] == pytest.approx(2 * lengths[0], abs=0.2)
    assert lengths[2] == pytest.approx(8 * 1.7 / 2 * lengths[0], abs=0.5)


def test_bars_description_names_every_total() -> None:
    svg = _bars("ZeRO-3", 960)
    assert svg.count("11.50 GiB") == 2 * 3


# The step


@pytest.mark.parametrize("model", ["meta-llama/Llama-2-7b-hf", "openai-community/gpt2"])
def test_unfolded_step_has_the_same_peak_and_end(model: str) -> None:
    for row in estimate(model=model, gpus=4, gradient_accumulation_steps=2).estimates:
        moments = [
            Moment(phase=p.phase, where=p.where, live_bytes=p.live_bytes, high_bytes=p.high_bytes, repeats=p.repeats)
            for p in row.timeline
        ]
        sections = unfold(moments)
        assert len(sections) == sum(p.repeats for p in row.timeline)
        assert max(m.high_bytes for m in sections) == row.peak_tensor_bytes, row.label
        assert sections[-1].live_bytes == moments[-1].live_bytes
        assert all(m.high_bytes >= m.live_bytes for m in sections)


def test_timeline_marks_the_peak_with_its_size() -> None:
    svg = _timeline("ZeRO-3", 960)
    assert ">peak 6.00 GiB<" in svg
    assert "GPU: 7.00 GiB" in svg


# The tree


def test_tree_highlights_only_the_path_taken() -> None:
    root = ET.fromstring(_tree("fits?", 960))
    boxes = [e.get("class") for e in root.iter(f"{SVG}rect") if (e.get("class") or "").startswith("node")]
    assert boxes.count("node-taken") == 2 and boxes.count("node") == 2
    broken = [e.get("stroke-dasharray") is not None for e in root.iter(f"{SVG}path")]
    assert sorted(broken) == [False, True]  # the edges taken, and the others


def test_tree_boxes_do_not_overlap() -> None:
    nodes = [TreeNode(id="0", text="start", taken=True)]
    for i in range(1, 12):
        nodes.append(
            TreeNode(id=f"{i}y", text="an outcome " * 4, parent=str(i - 1), answer="yes", outcome=True, taken=True)
        )
        nodes.append(TreeNode(id=f"{i}s", text="a branch", parent=str(i - 1), answer="perhaps"))
        nodes.append(
            TreeNode(id=str(i), text="question " * i, details=("numbers " * i,), parent=str(i - 1), answer="no")
        )
    for width in (350, 960):
        root = ET.fromstring(decision_tree(nodes, width=width))
        boxes = [
            tuple(float(e.get(k, 0)) for k in ("x", "y", "width", "height"))
            for e in root.iter(f"{SVG}rect")
            if (e.get("class") or "").startswith("node")
        ]
        assert len(boxes) == len(nodes)
        for i, (x, y, w, h) in enumerate(boxes):
            for x2, y2, w2, h2 in boxes[i + 1 :]:
                assert x + w <= x2 or x2 + w2 <= x or y + h <= y2 + 0.2 or y2 + h2 <= y + 0.2


def test_tree_with_a_cycle_of_parents_is_drawn() -> None:
    ring = [TreeNode(id="a", text="a", parent="b"), TreeNode(id="b", text="b", parent="a")]
    ET.fromstring(decision_tree(ring))
    ET.fromstring(decision_tree([TreeNode(id="r", text="r"), TreeNode(id="r", text="r", parent="r")]))


# The frontier and the streams


def test_frontier_labels_do_not_overlap() -> None:
    points = [
        FrontierPoint(label=f"strategy {i}", memory_bytes=(10 + i % 3) * GIB, throughput=100.0 + i) for i in range(12)
    ]
    root = ET.fromstring(frontier(points, width=500))
    boxes = []
    for e in root.iter(f"{SVG}text"):
        if (e.text or "").startswith("strategy"):
            x, y = float(e.get("x", 0)), float(e.get("y", 0))
            boxes.append((x, y - 10, x + width_of(e.text or "", 12), y + 2))
    assert boxes
    for i, a in enumerate(boxes):
        assert not any(a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3] for b in boxes[i + 1 :])


def test_frontier_always_labels_the_chosen_point() -> None:
    crowd = [
        FrontierPoint(label=f"number {i}", memory_bytes=(30 + i % 5) * GIB, throughput=1700.0 + i) for i in range(20)
    ]
    chosen = FrontierPoint(label="the one that is recommended", memory_bytes=32 * GIB, throughput=1710.0, chosen=True)
    svg = frontier([*crowd, chosen], capacity_bytes=39 * GIB, width=350)
    assert ">the one that is recommended<" in svg


def test_adjacent_spans_are_merged() -> None:
    spans = [Span(lane="compute", kind="forward", start_s=i / 1e4, end_s=(i + 1) / 1e4) for i in range(10_000)]
    assert len(stream_timeline(spans, label="x")) < 4_000
    assert len(re.findall("<rect", _streams("a", 960))) >= 4


def test_spans_shorter_than_a_pixel_stay_visible_and_in_order() -> None:
    spans = [Span(lane="c", kind="all-gather", start_s=i, end_s=i + 0.01) for i in range(300)]
    boxes = _boxes(stream_timeline(spans, label="x", width=960))
    assert len(boxes) == 300
    assert all(right - left >= 0.5 for left, _, right, _ in boxes)
    assert boxes == sorted(boxes)


def test_each_kind_of_span_has_its_own_fill() -> None:
    spans = [Span(lane="compute", kind=f"kind {i}", start_s=i, end_s=i + 1) for i in range(20)]
    root = ET.fromstring(stream_timeline(spans, label="x"))
    looks = [ET.tostring(p).replace((p.get("id") or "").encode(), b"") for p in root.iter(f"{SVG}pattern")]
    assert len(looks) == len(set(looks)) == 20


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
        _error(-5), _error(-6, caveats=("host",)), _error(-7, judges=False), _error(-8, judges=False, caveats=("host",)),
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
    points = [_error(e, **size) for e, size in zip((30, 0, -30, -60), sizes, strict=True)]
    marks = [_middle(m) for m in _marks(speed_errors(points))]
    for panel in (marks[:4], marks[4:8], marks[8:]):
        xs, ys = zip(*panel, strict=True)
        steps = {round(b - a) for a, b in itertools.pairwise(xs)}
        assert list(xs) == sorted(xs) and max(steps) - min(steps) <= 1  # a logarithmic axis
        assert [round(y - ys[0]) for y in ys] == pytest.approx([i * (ys[1] - ys[0]) for i in range(4)], abs=1)


def test_crowded_marks_are_moved_sideways_only() -> None:
    places = [_middle(m) for m in _marks(speed_errors([_error(-5)] * 5))][:5]
    assert len({y for _, y in places}) == 1
    xs = sorted(x for x, _ in places)
    assert all(b - a >= 6.9 for a, b in itertools.pairwise(xs)) and xs[-1] - xs[0] <= 28.2


def test_sizes_above_the_largest_run_are_hatched() -> None:
    svg = speed_errors([_error(1), _error(2, gpus=128, seq_len=8192, parameters=7 * 10**10)])
    hatched = [
        e for e in ET.fromstring(svg).iter(f"{SVG}rect") if "unseen" in e.get("fill", "") and e.get("fill-opacity")
    ]
    largest = [_middle(m)[0] for m in _marks(svg)[1::2]]
    assert [float(e.get("x", 0)) for e in hatched] == pytest.approx(largest, abs=0.2)


def test_description_counts_misses_and_warnings() -> None:
    svg = speed_errors([_error(-70, caveats=("host",)), _error(-40), _error(10)])
    assert "2 are off by more than 30 %, and the estimate itself warns of 1 of these" in svg
    assert "1 within 15 %, 1 within 30 %" in svg and ">hollow: the estimate warns of host (1)<" in svg


# Two timelines


def test_two_timelines_describe_both_peaks() -> None:
    described = ET.fromstring(_both("ZeRO-3", 700)).find(f"{SVG}desc")
    assert described is not None and described.text == "The peaks: predicted 5.00 GiB; measured 4.00 GiB."
    assert "none" in two_timelines({}, {}, label="nothing")


def test_stacked_drawings_are_below_each_other() -> None:
    first, second = _accuracy("a", 400), _both("b", 700)
    root = ET.fromstring(stacked(first, second, title="both"))
    inner = [ET.fromstring(one) for one in (first, second)]
    assert root.get("width") == max(one.get("width", "") for one in inner)
    assert [e.get("viewBox") for e in root.iter(f"{SVG}svg")][1:] == [one.get("viewBox") for one in inner]
    assert [e.get("transform") for e in root.findall(f"{SVG}g")] == [
        "translate(0 0)", f"translate(0 {float(inner[0].get('height', '')) + 16:g})",
    ]  # fmt: skip
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
