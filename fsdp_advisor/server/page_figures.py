"""The page's tables: every figure of every strategy, what is alive at the peak, what is left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fsdp_advisor.memory.device import BESIDE
from fsdp_advisor.memory.ledger import ACCOUNTS
from fsdp_advisor.render import PARTS
from fsdp_advisor.report import Report, StrategyEstimate
from fsdp_advisor.units import format_bytes, format_gib


@dataclass(frozen=True, slots=True, kw_only=True)
class Alive:
    """One account at the peak."""

    part: str
    name: str
    meaning: str
    size: str
    share: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure of every strategy."""

    name: str
    cells: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Figures that belong together."""

    name: str
    rows: tuple[Row, ...]


def alive(live: Mapping[str, int]) -> list[Alive]:
    """The accounts that hold anything, of tensors and of what lies beside them, the largest first."""
    total = sum(live.values()) or 1
    meanings = ACCOUNTS | BESIDE
    part_of = {account: part.key for part in PARTS for account in part.accounts}
    return [
        Alive(
            part=part_of[name],
            name=name.replace("_", " "),
            meaning=meanings[name],
            size=format_bytes(n),
            share=f"{100 * n / total:.1f} %",
        )
        for name, n in sorted(live.items(), key=lambda item: -item[1])
        if n
    ]


_PEAKS = (
    ("peak_tensor_bytes", "tensors, as simulated"),
    ("peak_allocated_bytes", "allocated: on a GPU, with workspaces"),
    ("peak_reserved_bytes", "reserved: with the allocator's segments"),
    ("needed_bytes", "needed: with CUDA context and NCCL"),
    ("fused_loss_peak_bytes", "simulated, if the loss were fused"),
    ("headroom_bytes", "left free"),
)


def _size(value: object) -> str:
    return format_gib(value).removesuffix(" GiB") if isinstance(value, int) else "?"


def figures(report: Report) -> list[Group]:
    """Every figure of every strategy, by kind; figures that no row knows are left to what is not modelled."""
    rows = [e.as_dict() for e in report.estimates]

    def row(name: str, values: Sequence[object], show: Callable[[object], str] = _size) -> list[Row]:
        return [Row(name=name, cells=tuple(map(show, values)))] if any(v is not None for v in values) else []

    def member(of: str, key: str) -> list[object]:
        return [(r[of] or {}).get(key) for r in rows]

    def nonzero(of: str, key: str) -> list[Row]:
        values = member(of, key)
        return row(key.replace("_", " "), values) if any(values) else []

    def end(of: str, which: int) -> list[object]:
        return [(r.get(of) or (None, None))[which] for r in rows]

    states = list(dict.fromkeys(key for e in report.estimates for key in e.states))
    groups = [
        ("Highest of the step", [r for key, name in _PEAKS for r in row(name, [x.get(key) for x in rows])]),
        ("Highest by phase, as simulated", [r for phase in ("forward", "backward", "optimizer") for r in row(phase, member("phase_peaks", phase))]),
        ("Needed at the peak", [r for key in (*ACCOUNTS, *BESIDE) for r in nonzero("needed_breakdown", key)]),
        ("Kept from step to step", [r for key in states for r in nonzero("states", key)]),
        (
            "Host memory per node",
            [
                *(row("while training", [r["host_bytes_per_node"] for r in rows]) if any(r["host_bytes_per_node"] for r in rows) else []),
                *row("loading, one copy", member("host_loading_bytes_per_node", "one_copy")),
                *row("loading, every rank its own", member("host_loading_bytes_per_node", "every_rank")),
            ],
        ),
        (
            "Speed",
            [
                *row("tokens per second per GPU", [r.get("tokens_per_second_per_gpu") for r in rows], _speed),
                *row("at least", end("tokens_per_second_per_gpu_range", 0), _speed),
                *row("at most", end("tokens_per_second_per_gpu_range", 1), _speed),
                *row("seconds per step", [r.get("step_seconds") for r in rows], _seconds),
                *row("model FLOPs utilization", [r.get("mfu") for r in rows], _share),
                *row("communication not hidden", [r.get("exposed_communication_share") for r in rows], _share),
            ],
        ),
        (
            "Seconds of a step, by cause",
            [
                found
                for cause in dict.fromkeys(c for r in rows for c in r.get("step_breakdown") or ())
                if any(values := [(r.get("step_breakdown") or {}).get(cause) for r in rows])
                for found in row(cause, values, _seconds)
            ],
        ),
    ]  # fmt: skip
    return [Group(name=name, rows=tuple(rows)) for name, rows in groups if rows]


def _speed(value: object) -> str:
    return f"{value:,.0f}" if isinstance(value, (int, float)) else "?"


def _share(value: object) -> str:
    return f"{100 * value:.1f} %" if isinstance(value, (int, float)) else "?"


def _seconds(value: object) -> str:
    return f"{value:,.3f}" if isinstance(value, (int, float)) else "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """What no figure holds, and of which rows; no rows: of all."""

    what: str
    rows: tuple[str, ...]


def left_out(report: Report) -> list[LeftOut]:
    """What is not modelled: of all rows first, then of some."""
    rows: dict[str, list[str]] = {}
    for e in report.estimates:
        for item in e.not_modelled:
            rows.setdefault(item.partition(": ")[2] or item, []).append(e.label)
    whole = len(report.estimates)
    found = [LeftOut(what=w, rows=() if len(labels) == whole else tuple(labels)) for w, labels in rows.items()]
    return sorted(found, key=lambda item: bool(item.rows))


def warnings(report: Report, chosen: StrategyEstimate) -> list[str]:
    """Each warning once; those that differ in their figures only stand as one, with the chosen row's figures if it has any."""
    alike: dict[str, list[tuple[StrategyEstimate, str]]] = {}
    for e in sorted(report.estimates, key=lambda e: e is not chosen):
        for warning in e.warnings:
            alike.setdefault(re.sub(r"\d+(\.\d+)?", "#", warning), []).append((e, warning))
    lines = []
    for (first, warning), *others in alike.values():
        same = len({words for _, words in others} | {warning}) == 1 and len(others) + 1 == len(report.estimates)
        likewise = f" (likewise {', '.join(e.label for e, _ in others)})" if others else ""
        lines.append(warning if same else f"{first.label}: {warning}{likewise}")
    return lines
