"""The result of a rehearsal as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from fsdp_advisor.rehearsal.report import PEAKS, PhasePeak, RankResult, Rehearsal
from fsdp_advisor.render.sizes import format_seconds
from fsdp_advisor.render.terminal import Column, Screen, draw, fitting, wrap
from fsdp_advisor.units import GIB, format_bytes, format_gib

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = ".:-=+*#@"
_MOST_RANKS = 8
_SMALL_BYTES = 1 << 20
"""Categories below it are not listed."""
_MOST_DECISIONS = 5
_HEADERS = {
    "peak_allocated_bytes": "allocated",
    "peak_reserved_bytes": "reserved",
    "peak_device_bytes": "device memory",
}
_RANKS = {"peak_allocated_bytes": None, "peak_reserved_bytes": 2, "peak_device_bytes": 3}
"""Figure -> `Column.rank`: the higher, the earlier its column is dropped on a narrow screen; None: never."""


def rehearsal_text(found: Rehearsal, screen: Screen) -> str:
    """The answer in one sentence, the peaks of the ranks and phases, the timeline, and notes on them."""
    blocks = [wrap(_answer(found), screen)]
    worst = found.worst
    if worst is not None:
        blocks += [_ranks(found, screen), _phases(worst, screen), _timeline(worst, screen)]
        blocks += [wrap(line, screen) for line in (*_out_of_memory(worst), *_decisions(worst))]
    blocks += [wrap(line, screen) for line in _notes(found)]
    return "\n\n".join(filter(None, blocks))


def rehearsal_json(found: Rehearsal) -> dict[str, Any]:
    """The result as JSON: outcome, exit status, peaks of the worst rank, ranks, prediction."""
    worst = found.worst
    return {
        "outcome": found.outcome,
        "exit_status": found.exit_status,
        "worst_rank": None if worst is None else worst.rank,
        **{name: None if worst is None else worst.peak(name) for name in PEAKS},
        **asdict(found),
    }


def _answer(found: Rehearsal) -> str:
    steps = max((rank.steps for rank in found.ranks), default=0)
    where = f"{found.gpus} x {found.gpu}" + (f" on {found.nnodes} nodes" if found.nnodes > 1 else "")
    counted = f"{steps} step{'' if steps == 1 else 's'}"
    said = f"{found.outcome.capitalize()} after {counted} on {where}, in {format_seconds(found.ended.seconds)}"
    if found.outcome == "failed":
        said += f", with exit status {found.ended.status}"
    worst = found.worst
    if worst is None:
        return f"{said}. No process used a GPU."
    peak, memory = worst.peak("peak_device_bytes"), worst.gpu_memory_bytes
    return (
        f"{said}. Rank {worst.rank} needs {format_gib(peak)} of {format_gib(memory)}: "
        f"{format_gib(worst.peak('peak_allocated_bytes'))} allocated, {format_gib(worst.peak('peak_reserved_bytes'))} reserved."
    )


def _ranks(found: Rehearsal, screen: Screen) -> str:
    """A line per rank, the worst first, and the prediction as the last one."""
    ranks = sorted(found.ranks, key=lambda rank: -rank.peak("peak_device_bytes"))[:_MOST_RANKS]
    prediction = found.prediction
    names = [str(rank.rank) for rank in ranks]
    cells = {name: [_size(rank.peak(name)) for rank in ranks] for name in PEAKS}
    status, retries = [rank.status for rank in ranks], [str(rank.allocator_retries) for rank in ranks]
    if prediction is not None and prediction.figures:
        names.append("predicted")
        for name in PEAKS:
            cells[name].append(_size(prediction.figures[name]) if name in prediction.figures else "?")
        status.append("")
        retries.append("")
    columns = [
        Column("rank", names),
        *(Column(f"{_HEADERS[name]}, GiB", cells[name], right=True, rank=_RANKS[name]) for name in PEAKS),
        Column("retries", retries, right=True, rank=4),
        Column("status", status, rank=5),
    ]
    text = draw(fitting(columns, screen.width), screen)
    left_out = len(found.ranks) - len(ranks)
    return text + (f"\n{left_out} more ranks need less." if left_out else "")


def _phases(rank: RankResult, screen: Screen) -> str:
    phases: list[PhasePeak] = [phase for phase in rank.phases if phase.peak_allocated_bytes]
    several = len({phase.device for phase in phases}) > 1
    columns = [
        Column("step", [str(phase.step) if phase.step else "" for phase in phases], right=True),
        Column(f"phase of rank {rank.rank}", [phase.phase for phase in phases]),
        *([Column("GPU", [str(phase.device) for phase in phases], right=True)] if several else []),
        *(
            Column(f"{_HEADERS[n]}, GiB", [_size(getattr(p, n)) for p in phases], right=True, rank=_RANKS[n])
            for n in PEAKS
        ),
        Column("at its end", [_size(phase.allocated_bytes_at_end) for phase in phases], right=True, rank=4),
    ]
    return draw(fitting(columns, screen.width), screen)


def _timeline(rank: RankResult, screen: Screen) -> str:
    """Allocated bytes through the rehearsal, highest value per column."""
    if not rank.timeline:
        return ""
    bars = _BARS if screen.unicode else _ASCII_BARS
    width = min(screen.width, len(rank.timeline))
    high = max(alive for _, alive in rank.timeline) or 1
    parts = [rank.timeline[i * len(rank.timeline) // width :][: -(-len(rank.timeline) // width)] for i in range(width)]
    heights = [max(alive for _, alive in part) for part in parts]
    line = "".join(bars[min(len(bars) - 1, height * len(bars) // high)] for height in heights)
    return f"Memory of tensors through the rehearsal, at most {format_gib(high)}:\n{line}"


def _out_of_memory(rank: RankResult) -> Iterator[str]:
    for each in rank.out_of_memory[:1]:
        yield (
            f"Out of memory on GPU {each.device} in step {each.step}, {each.phase}: {format_bytes(each.requested_bytes)} were "
            f"requested; {format_bytes(each.allocated_bytes)} were allocated, {format_bytes(each.reserved_bytes)} reserved, "
            f"{format_bytes(each.free_bytes)} free. At: {' < '.join(each.frames[:4])}"
        )
        alive = sorted(((n, name) for name, n in each.alive.items() if n >= _SMALL_BYTES), reverse=True)
        if alive:
            yield "Alive: " + ", ".join(f"{name} {format_bytes(n)}" for n, name in alive)
        if each.changes:
            yield "To try: " + "; ".join(f"({i}) {change}" for i, change in enumerate(each.changes, 1))
        if each.snapshot:
            yield f"What was alive: fsdp-advisor diagnose {each.snapshot}"


def _decisions(rank: RankResult) -> Iterator[str]:
    """Lines about the places where the script read values from the GPU, and the values that it got. Only integers and scalars are
    computed.
    """
    if rank.decisions:
        places = "; ".join(
            f"{each['place']} ({each['operation']}: {each['value']})" for each in rank.decisions[:_MOST_DECISIONS]
        )
        yield (
            f"The script read values from the GPU, where a rehearsal computes integers and scalars only: {places}. "
            "Check that its behaviour does not depend on them."
        )


def _notes(found: Rehearsal) -> Iterator[str]:
    prediction, ended = found.prediction, found.ended
    if prediction is not None:
        if prediction.reason:
            yield f"No prediction: {prediction.reason}."
        else:
            files = {"model": "<its config.json>", "peft-config": "<its adapter_config.json>"}
            words = " ".join(f"--{name} {files.get(name, value)}" for name, value in prediction.options.items())
            yield f"Predicted by: estimate {words}"
    killed = ended.status == 128 + 9
    for rank in found.ranks:
        if rank.error and not rank.out_of_memory:
            yield f"Rank {rank.rank}: {rank.error}"
        elif rank.status == "running" and found.outcome not in ("timed out", "interrupted"):
            killed = True
            yield f"Rank {rank.rank} was ended from outside after {rank.steps} steps."
    if found.outcome == "failed" and killed:
        yield f"A process was killed. The host's memory may be exhausted: the processes used {format_gib(ended.peak_host_bytes)}."
    if ended.timed_out:
        yield f"The command was ended after {format_seconds(ended.seconds)}. --timeout allows more."
    if ended.leftovers:
        yield f"{ended.leftovers} processes were still running after the command had ended. They were killed."


def _size(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f}"
