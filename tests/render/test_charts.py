"""Bars, timelines and points show the figures they are given."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from chart_samples import (
    SVG,
    draw_bars,
    draw_timeline,
    parts,
)

from fsdp_advisor import estimate
from fsdp_advisor.memory.device import NON_TENSOR_PARTS
from fsdp_advisor.program.accounts import ACCOUNTS
from fsdp_advisor.render.parts import PARTS, bar_parts
from fsdp_advisor.render.svg import (
    Bar,
    FrontierPoint,
    frontier,
    stacked_bars,
    stream_timeline,
)
from fsdp_advisor.render.svg.elements import width_of
from fsdp_advisor.timing import Interval
from fsdp_advisor.units import GIB

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
            for box in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-[\d.]+z", e.get("d", "")):
                left, top, wide, high = map(float, box)
                found.append((left, top, left + wide, top + high))
    return found


def test_bar_length_is_proportional_to_bytes_and_long_bars_are_cut() -> None:
    def bar(times: int) -> Bar:
        return Bar(label="x", backend="y", parts=parts({"parameters": times * GIB}), verdict="", fits=True)

    boxes = _boxes(stacked_bars([bar(2), bar(4), bar(400)], 8 * GIB, "gpu"))
    lengths = [right - left for left, _, right, _ in boxes]
    assert lengths[1] == pytest.approx(2 * lengths[0], abs=0.2)
    assert lengths[2] == pytest.approx(8 * 1.7 / 2 * lengths[0], abs=0.5)


def test_bars_description_names_every_total() -> None:
    svg = draw_bars("ZeRO-3", 960)
    assert svg.count("11.50 GiB") == 2 * 3


# The step


def test_timeline_ends_at_the_peak_of_the_estimate() -> None:
    for row in estimate(model="openai-community/gpt2", gpus=4, gradient_accumulation_steps=2).estimates:
        assert max(point.high_bytes for point in row.timeline) == row.peak_tensor_bytes, row.label
        assert all(point.high_bytes >= point.live_bytes for point in row.timeline)


def test_timeline_marks_the_peak_with_its_size() -> None:
    svg = draw_timeline("ZeRO-3", 960)
    assert ">peak 6.00 GiB<" in svg
    assert "GPU: 7.00 GiB" in svg


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
    spans = [Interval("compute", "forward", i / 1e4, (i + 1) / 1e4) for i in range(10_000)]
    assert len(_boxes(stream_timeline(spans, label="x"))) == 1


def test_spans_shorter_than_a_pixel_stay_visible_and_in_order() -> None:
    spans = [Interval("c", "all-gather", i, i + 0.01) for i in range(300)]
    boxes = _boxes(stream_timeline(spans, label="x", width=960))
    assert len(boxes) == 300
    assert all(right - left >= 0.9 for left, _, right, _ in boxes)
    assert boxes == sorted(boxes)


def test_spans_within_one_pixel_share_a_box_of_the_kind_that_takes_longest() -> None:
    spans = [Interval("c", "reduce" if i % 4 == 3 else "gather", i, i + 0.9) for i in range(40_000)]
    root = ET.fromstring(stream_timeline(spans, label="x", width=960))
    drawn = {
        e.get("fill"): len(re.findall("M", e.get("d", ""))) for e in root.iter(f"{SVG}path") if e.get("class") == "box"
    }
    assert list(drawn.values()) == [1]  # everywhere gathers take most of the time
    half = [s._replace(name="reduce" if s.begin_seconds >= 20_000 else "gather") for s in spans]
    assert len(_boxes(stream_timeline(half, label="x", width=960))) == 2


def test_each_kind_of_span_has_its_own_fill() -> None:
    spans = [Interval("compute", f"kind{i}", i, i + 1) for i in range(20)]
    root = ET.fromstring(stream_timeline(spans, label="x"))
    looks = [ET.tostring(p).replace((p.get("id") or "").encode(), b"") for p in root.iter(f"{SVG}pattern")]
    assert len(looks) == len(set(looks)) == 20
