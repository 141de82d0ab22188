"""A diagnosis as text: the error, the tensors that were alive, the differences from the estimate, and changes that help."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from fsdp_advisor.diagnosis.facts import CATEGORIES, Diagnosis, Difference, Holding, OutOfMemory, Prediction
from fsdp_advisor.diagnosis.prediction import RISING
from fsdp_advisor.render.terminal import Column, Screen, draw, fitting, wrap
from fsdp_advisor.units import format_bytes

_MAX_HOLDINGS, _MAX_MODULES = 10, 6
_SMALL_SHARE = 0.005
"""Holdings below this share of the memory are not listed."""


def diagnosis_text(found: Diagnosis, screen: Screen) -> str:
    """The diagnosis at the screen's width."""
    sections = [
        "\n".join(wrap(line, screen) for line in _heading(found)),
        _memory(found, screen),
        _holdings(found, screen),
        _ranks(found.ranks, screen),
        _prediction(found.prediction, found.out_of_memory, screen) if found.prediction else "",
        _changes(found, screen),
        "\n".join(wrap(f"note: {note}", screen, indent="  ") for note in found.notes),
        "\n".join(wrap(f"not known: {text}", screen, indent="  ") for text in found.unknown),
    ]
    return "\n\n".join(section for section in sections if section)


def _heading(found: Diagnosis) -> Iterator[str]:
    error = found.out_of_memory
    gpu = "the GPU" if found.device is None else f"GPU {found.device}"
    if error is None:
        yield f"{found.file}: memory of {gpu}, no out-of-memory error"
    else:
        rank = f", rank {error.rank}" if error.rank is not None else ""
        yield f"{found.file}: out of memory on {gpu}{rank}: {_request(error)}"
    yield f"Moment: {found.moment.text}"


def _request(error: OutOfMemory) -> str:
    parts = []
    if error.requested_bytes is not None:
        parts.append(f"{format_bytes(error.requested_bytes)} requested")
    if error.free_bytes is not None:
        of = f" of {format_bytes(error.total_bytes)}" if error.total_bytes is not None else ""
        parts.append(f"{format_bytes(error.free_bytes)}{of} free")
    if error.allowed_bytes is not None:
        parts.append(f"{format_bytes(error.allowed_bytes)} allowed")
    return ", ".join(parts) or "no figures"


def _memory(found: Diagnosis, screen: Screen) -> str:
    total = found.total_bytes
    if not total:
        return ""
    rows = [(name.replace("_", " "), n, CATEGORIES[name]) for name, n in found.memory.items()]
    rows.append(("total", total, ""))
    return _drawn(
        (
            Column("memory", [name for name, _, _ in rows]),
            Column("size", [format_bytes(n) for _, n, _ in rows], right=True),
            Column("share", [f"{n / total:.1%}" for _, n, _ in rows], right=True, rank=1),
            Column("", [about for _, _, about in rows], rank=2),
        ),
        screen,
    )


def _holdings(found: Diagnosis, screen: Screen) -> str:
    limit = _SMALL_SHARE * found.total_bytes
    shown = [holding for holding in found.holdings if holding.n_bytes >= limit][:_MAX_HOLDINGS]
    if not shown:
        return ""
    by_module: Counter[str] = Counter()
    for holding in found.holdings:
        if holding.category == "activations" and holding.module:
            by_module[holding.module] += holding.n_bytes
    largest = ", ".join(f"{module} {format_bytes(n)}" for module, n in by_module.most_common(_MAX_MODULES))
    lines = [wrap(f"Activations by module: {largest}", screen, indent="  ")] if largest else []
    return "\n".join([_table("allocated at", shown, screen), *lines])


def _table(title: str, shown: Sequence[Holding], screen: Screen) -> str:
    return _drawn(
        (
            Column(title, [_place(holding) for holding in shown]),
            Column("size", [format_bytes(holding.n_bytes) for holding in shown], right=True),
            Column("tensors", [f"{holding.count}" for holding in shown], right=True, rank=1),
            Column("as", [holding.category.replace("_", " ") for holding in shown], rank=2),
        ),
        screen,
    )


def _place(holding: Holding) -> str:
    return f"{holding.module}: {holding.where}" if holding.module else holding.where


def _ranks(ranks: Sequence[OutOfMemory], screen: Screen) -> str:
    if len(ranks) < 2:
        return ""
    return _drawn(
        (
            Column("rank", ["-" if e.rank is None else str(e.rank) for e in ranks], right=True),
            Column("GPU", ["-" if e.gpu is None else str(e.gpu) for e in ranks], right=True, rank=2),
            Column("requested", [_size(e.requested_bytes) for e in ranks], right=True),
            Column("free", [_size(e.free_bytes) for e in ranks], right=True, rank=1),
            Column("allocated", [_size(e.allocated_bytes) for e in ranks], right=True),
            Column("unallocated", [_size(e.unallocated_bytes) for e in ranks], right=True, rank=3),
        ),
        screen,
    )


def _prediction(found: Prediction, error: OutOfMemory | None, screen: Screen) -> str:
    verdict = {True: "fits", False: "does not fit", None: "may fit"}[found.fits]
    needs = "" if found.needed_bytes is None else f", needs {format_bytes(found.needed_bytes)}"
    at = f", with its peak in {found.peak_at}" if found.peak_at else ""
    lines = [wrap(f"Estimate of the job: {found.job}: {verdict}{needs}{at}", screen, indent="  ")]
    if found.differences:
        rows = found.differences
        gaps = [_gap(d, error) for d in rows]
        if error is None:
            measured, heading = "measured", f"Differences from the estimate for {found.moment}:"
        else:
            measured = "at the error"
            heading = (
                f"Memory at the failed request, and the estimate for {found.moment} on a GPU that is large enough:"
            )
        lines.append(wrap(heading, screen))
        lines.append(
            _drawn(
                (
                    Column("memory", [d.category.replace("_", " ") for d in rows]),
                    Column(measured, [format_bytes(d.measured_bytes) for d in rows], right=True),
                    Column("estimate", [format_bytes(d.predicted_bytes) for d in rows], right=True),
                    *([Column("difference", gaps, right=True, rank=1)] if set(gaps) != {"-"} else []),
                ),
                screen,
            )
        )
        for d in rows:
            name = d.category.replace("_", " ")
            if d.measured_bytes > d.predicted_bytes and d.holdings:
                held = "; ".join(f"{_place(h)} {format_bytes(h.n_bytes)}, {_tensors(h.count)}" for h in d.holdings)
                lines.append(wrap(f"{name}, mostly: {held}", screen, indent="  "))
            if d.because:
                lines.append(wrap(f"{name}: {d.because}", screen, indent="  "))
    elif found.at_moment:
        lines.append(f"No category differs from the estimate for {found.moment}.")
    lines += [wrap(f"note: {note}", screen, indent="  ") for note in found.notes]
    return "\n".join(lines)


def _changes(found: Diagnosis, screen: Screen) -> str:
    if not found.changes:
        return ""
    lines = ["Changes to try, the cheapest first:"]
    for number, change in enumerate(found.changes, 1):
        lines.append(wrap(f"{number}. {change.what}: {change.because}", screen, first="  ", indent="     "))
    return "\n".join(lines)


def _drawn(columns: Sequence[Column], screen: Screen) -> str:
    return draw(fitting(columns, screen.width), screen)


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


def _size(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else format_bytes(n_bytes)


def _gap(found: Difference, error: OutOfMemory | None) -> str:
    """The difference from the estimate; `-` for memory that would have grown further if the request had not failed."""
    gap = found.measured_bytes - found.predicted_bytes
    return "-" if error is not None and gap < 0 and found.category in RISING else _signed(gap)


def _signed(n_bytes: int) -> str:
    return f"{'+' if n_bytes > 0 else ''}{format_bytes(n_bytes)}"
