"""The figures that every view shows of an estimate, and the words for them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fsdp_advisor.cli.selection import row_name
from fsdp_advisor.estimator import NOT_WALKED
from fsdp_advisor.memory.device import BESIDE
from fsdp_advisor.memory.ledger import GROUPS
from fsdp_advisor.model.tasks import task_of
from fsdp_advisor.report import Report, StrategyEstimate
from fsdp_advisor.units import format_bytes, format_count, format_gib

NONE = "-"
UNKNOWN = "?"


@dataclass(frozen=True, slots=True)
class Part:
    """Accounts that are shown as one: a name, how a bar draws it, in colour and without, and in ASCII."""

    name: str
    meaning: str
    accounts: tuple[str, ...]
    colour: str
    glyph: str
    letter: str

    def of(self, needed: dict[str, int]) -> int:
        return sum(needed.get(account, 0) for account in self.accounts)


PARTS = (
    Part("states", "states", GROUPS["states"], "blue", "█", "S"),
    Part(
        "gathered",
        "gathered units + communication",
        GROUPS["gathered"],
        "magenta",
        "▓",
        "G",
    ),
    Part("activ.", "activations", GROUPS["activations"], "cyan", "▒", "A"),
    Part("loss", "loss", GROUPS["loss"], "yellow", "░", "L"),
    Part("other", "other", GROUPS["other"], "white", "▚", "O"),
    Part("beside", "CUDA, NCCL, libraries, fragmentation", tuple(BESIDE), "bright_black", "/", "C"),
)
"""They sum to what a GPU needs (`StrategyEstimate.needed_breakdown`)."""


def parts_of(estimate: StrategyEstimate) -> list[tuple[Part, int]]:
    """What a bar is drawn of, in bytes: all that is needed, or as far as is known the states."""
    needed = estimate.needed_breakdown
    return [(PARTS[0], estimate.kept_bytes)] if needed is None else [(part, part.of(needed)) for part in PARTS]


def decimal_gb(n_bytes: int) -> str:
    """Bytes in GB (10**9), as the textbook's tables have them.

    >>> decimal_gb(28_000_000_000)
    '28.00 GB'
    """
    return f"{n_bytes / 10**9:.2f} GB"


@dataclass(frozen=True, slots=True)
class Sizes:
    """How a report writes bytes: GiB, or decimal GB for the textbook's states of a bare count."""

    decimal: bool

    @classmethod
    def of(cls, report: Report) -> Sizes:
        return cls(decimal=report.model_source == "count")

    @property
    def unit(self) -> str:
        return "GB (10^9 bytes)" if self.decimal else "GiB"

    def full(self, n_bytes: int) -> str:
        return decimal_gb(n_bytes) if self.decimal else format_gib(n_bytes)

    def near(self, n_bytes: int) -> str:
        """In the unit that suits the size, for what may be small."""
        return decimal_gb(n_bytes) if self.decimal else format_bytes(n_bytes)

    def bare(self, n_bytes: int) -> str:
        """Without the unit, for a column that says it."""
        return self.full(n_bytes).split()[0]


def assumed(report: Report, sizes: Sizes) -> str:
    """The one line that says what the figures are of."""
    request = report.request
    nodes = f" on {request.nnodes} nodes" if request.nnodes > 1 else ""
    where = f"{request.gpus} x {report.gpu_name} ({sizes.full(report.gpu_memory_bytes)} each){nodes}"
    model = f"{report.model_name} ({format_count(report.parameters)} parameters)"
    if report.trainable_parameters != report.parameters:
        model = model[:-1] + f", {format_count(report.trainable_parameters)} trainable)"
    job = [f"{request.precision}", request.optim]
    if report.model_source != "count":
        job = [
            f"micro-batch {request.micro_batch_size}",
            task_of(report.task).of_length(report.seq_len),
            *job,
            request.attention,
        ]
        steps, checkpointing = request.gradient_accumulation_steps, request.activation_checkpointing
        job += [f"accumulation {steps}"] if steps > 1 else []
        job += [f"{checkpointing if checkpointing != 'none' else 'no'} activation checkpointing"]
    job += ["FSDP2 in one unit"] if request.wrap == "none" else []
    job += [f"by {request.framework}"] if request.framework != "torch" else []
    if request.offload != "none" and request.offload_device != "cpu":
        job += [f"offload to {request.offload_device}"]
    return f"{model} on {where}: {', '.join(job)}"


def counted(report: Report) -> str:
    """What a step's speed counts."""
    return task_of(report.task).counted


def speed(report: Report, estimate: StrategyEstimate) -> str:
    """Of what is counted, each second on each GPU, to three digits: the time model promises no more."""
    if estimate.step is None:
        return UNKNOWN
    tokens = 1 if task_of(report.task).takes_any_length else report.seq_len
    return f"{float(f'{estimate.step.tokens_per_second_per_gpu / tokens:.3g}'):,.0f}"


def step_lines(report: Report, estimate: StrategyEstimate) -> list[str]:
    """A step's time with its range, and what it is spent on, from the largest part down."""
    step = estimate.step
    if step is None:
        return []
    ends = f"{_seconds(step.low_seconds)} to {_seconds(step.high_seconds)}"
    parts = sorted(((seconds, name) for name, seconds in step.breakdown.items()), reverse=True)
    spent = ", ".join(
        f"{name} {seconds / step.seconds:.0%}" for seconds, name in parts if seconds >= 0.005 * step.seconds
    )
    rate = f"{speed(report, estimate)} {counted(report)}/s per GPU"
    return [
        f"Step: {_seconds(step.seconds)} ({ends}), {rate}, MFU {step.mfu:.0%}",
        f"Spent on: {spent}",
    ]


def _seconds(seconds: float) -> str:
    """Two or three digits.

    >>> _seconds(0.0123), _seconds(1.234), _seconds(123.4)
    ('12.3 ms', '1.23 s', '123 s')
    """
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


def warnings(report: Report) -> list[str]:
    """Each warning once, with the rows it is about; those that differ in their figures only stand as one."""
    alike: dict[str, list[tuple[str, str]]] = {}
    for estimate in report.estimates:
        for warning in estimate.warnings:
            alike.setdefault(re.sub(r"\d+(\.\d+)?", "#", warning), []).append((estimate.label, warning))
    lines = []
    for rows in alike.values():
        (first, warning), others = rows[0], [label for label, _ in rows[1:]]
        if len({w for _, w in rows}) == 1 and len(rows) == len(report.estimates):
            lines.append(warning)
        else:
            lines.append(f"{first}: {warning}" + (f" (likewise {', '.join(others)})" if others else ""))
    return lines


def left_out(report: Report) -> str:
    """What no figure holds, in one line. What is left out of some rows only is named by `--explain`."""
    common = _common(report)
    more = [row_name(e) for e in report.estimates if len(reasons(e)) > len(common)]
    if more:
        common.append(f"{'more for ' if common else 'what --explain says of '}{', '.join(more)}")
    return "; ".join(common)


def left_out_besides(report: Report, estimate: StrategyEstimate) -> list[str]:
    """What this row's figures leave out and others' do not."""
    common = _common(report)
    return [what for what in reasons(estimate) if what not in common]


def _common(report: Report) -> list[str]:
    first, *others = (reasons(e) for e in report.estimates)
    return [what for what in first if all(what in row for row in others)]


def reasons(estimate: StrategyEstimate) -> list[str]:
    """What the row's figures do not hold, without the names of the JSON keys; reserved memory is there for the asking."""
    return [item.partition(": ")[2] or item for item in estimate.not_modelled if item != NOT_WALKED]


def loss_line(estimate: StrategyEstimate) -> str:
    """What the loss chain costs, and what a loss that never makes it whole would save."""
    if estimate.at_peak is None or estimate.peak_tensor_bytes is None or estimate.fused_loss_peak_bytes is None:
        return ""
    saved = estimate.peak_tensor_bytes - estimate.fused_loss_peak_bytes
    chain = f"Loss chain (logits and what the loss makes of them): {format_bytes(estimate.at_peak['loss'])} at the simulated peak"
    if saved * 1000 < estimate.peak_tensor_bytes:
        return f"{chain}; it does not set the peak, so a fused or chunked loss would save nothing"
    after = format_gib(estimate.fused_loss_peak_bytes)
    return f"{chain}; a fused or chunked loss would save {format_bytes(saved)}: a peak of {after}"


def host_lines(estimate: StrategyEstimate, sizes: Sizes) -> list[str]:
    """Host memory per node in the steady state."""
    steady = sizes.full(estimate.host_bytes_per_node) if estimate.host_bytes_per_node else "nothing is kept there"
    return [f"Host memory per node: {steady}"]
