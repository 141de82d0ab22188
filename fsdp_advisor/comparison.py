"""Compares two jobs: which of them fits, and what each difference between them costs in memory and time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdp_advisor.assumptions import settled
from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.job.fields import fields_of
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.report import Report
from fsdp_advisor.strategy_estimate import StrategyEstimate

_TOGETHER = (("gpus", "nnodes"), ("strategy", "backend", "offload", "offload_device"))
"""Options that make sense only together. Every other option is a difference of its own."""
_WITHOUT_EFFECT = {"reserved"}
_OF_TRAINERS = {"Trainer arguments", "TRL"}
"""Formats whose files leave sharding to a launcher's configuration."""
_HARDWARE = {"gpu", "gpus", "nnodes", "interconnect", "host_memory"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two jobs: its request with every option decided, and its row of the report.

    `leaves_strategy_open`: whether `best_row` chose the strategy; `runs_as_ddp`: the function of that name of the job's own request.
    """

    request: EstimateRequest
    report: Report
    row: StrategyEstimate
    runs_as_ddp: bool = False
    leaves_strategy_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Options that differ, and the effect on job A if it takes the values of job B for these options only.

    `needed_bytes` is the change of the memory that one GPU needs, `step_time` the factor by which the time per token changes.
    Both are None if they are unknown or if the change alone is impossible, which `reason` then explains. `cures` says
    whether job B, which does not fit, fits with the values of job A for these options; None if job B fits anyway or job A does not.
    """

    options: tuple[str, ...]
    a: tuple[Any, ...]
    b: tuple[Any, ...]
    needed_bytes: int | None
    step_time: float | None
    cures: bool | None
    reason: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two jobs, and their differences with the largest effect first.

    `cure` names the options of job B that must take the values of job A so that B fits. It is empty unless A fits, B does not, and no
    single option is enough. Options are added until B fits, those that save most memory first and the hardware last.
    """

    a: Side
    b: Side
    differences: tuple[Difference, ...]
    cure: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What both answers assume and leave out, without repetitions."""
        notes = [*self.a.report.notes, *self.b.report.notes]
        notes += [UNSHARDED for side in (self.a, self.b) if side.runs_as_ddp]
        a, b = self.a.row, self.b.row
        if self.a.leaves_strategy_open and self.b.leaves_strategy_open and a.label != b.label:
            notes.append(
                f"no strategy was given, so each job has the fastest that fits it, or the closest: A {a.label}, B {b.label}; a given"
                " strategy is that of both"
            )
        notes += [
            f"{name} fits only because the allocator empties its cache in each step, so it needs no more than the GPU has"
            for name, row in (("A", a), ("B", b))
            if row.fits and row.allocator_retries_per_step
        ]
        return tuple(dict.fromkeys(notes))

    def as_dict(self) -> dict[str, Any]:
        """The comparison as JSON."""
        return {
            "schema_version": 1,
            "a": self.a.report.as_dict(),
            "b": self.b.report.as_dict(),
            "differences": [
                {
                    "options": dict(
                        zip(d.options, ({"a": x, "b": y} for x, y in zip(d.a, d.b, strict=True)), strict=True)
                    ),
                    "needed_bytes": d.needed_bytes,
                    "step_time": None if d.step_time is None else round(d.step_time, 4),
                    "cures": d.cures,
                    "reason": d.reason,
                }
                for d in self.differences
            ],
            "cure": list(self.cure),
        }


def compare(a: EstimateRequest, b: EstimateRequest) -> Comparison:
    """The comparison of two jobs. Raises the errors of `estimate`.

    A job that leaves the strategy open is compared with its best row.
    """
    model_a = resolve(a.model)
    return compare_resolved((settled(a), model_a), (settled(b), model_a if b.model == a.model else resolve(b.model)))


def compare_resolved(a: tuple[EstimateRequest, Resolved], b: tuple[EstimateRequest, Resolved]) -> Comparison:
    """The comparison of two jobs, each with the model that `resolve` found for it."""
    left, right = _side(*a), _side(*b)
    models = {left.request.model: a[1], right.request.model: b[1]}
    found: list[Difference] = [
        _difference(left, right, names, models)
        for names in _groups()
        if _values(left.request, names) != _values(right.request, names)
    ]
    found.sort(key=lambda d: -_size(d, left))
    return Comparison(a=left, b=right, differences=tuple(found), cure=_cure(left, right, found, models))


def _cure(a: Side, b: Side, found: list[Difference], models: dict[str, Resolved]) -> tuple[str, ...]:
    if not (a.row.fits and b.row.fits is False) or any(d.cures for d in found):
        return ()
    names: tuple[str, ...] = ()
    for d in sorted(found, key=lambda d: (bool(_HARDWARE & set(d.options)), -(d.needed_bytes or 0))):
        names += d.options
        row, _ = _with(b, a, names, models)
        if row is not None and row.fits:
            return names
    return ()


def best_row(report: Report) -> StrategyEstimate:
    """The row by which a job is judged. On one GPU it is plain PyTorch (DDP's row) if that fits. Otherwise it is the fastest row that fits,
    with offload only if no other fits. If none fits, it is the one that needs least. A Trainer whose files name no strategy is judged
    by DDP.
    """
    if runs_as_ddp(report.request) and (ddp := next((r for r in report.estimates if r.strategy == "ddp"), None)):
        return ddp
    fitting = [row for row in report.estimates if row.fits]
    fitting = [row for row in fitting if row.offload == "none"] or fitting
    plain = next((row for row in fitting if row.plan.strategy == "ddp" and row.plan.world_size == 1), None)
    if plain is not None:
        return plain
    if fitting:
        return max(fitting, key=lambda row: row.step.tokens_per_second_per_gpu if row.step else 0.0)
    return report.closest_row


def runs_as_ddp(request: EstimateRequest) -> bool:
    """Whether the job's files have the arguments of a Trainer and neither they nor an option name a strategy.

    The job then runs without sharding, unless its launcher has a configuration that was not given.
    """
    formats = {name for reading in request.configs for name in reading.format.split(", ")}
    return bool(formats & _OF_TRAINERS) and not {"strategy", "backend", "offload"} & request.given


UNSHARDED = (
    "no file names FSDP or DeepSpeed, so the job is checked as DDP, or on one GPU as plain PyTorch; add the launcher's configuration,"
    " or give strategy all for the best of all strategies"
)
"""The note on a job that `runs_as_ddp`."""


def _side(request: EstimateRequest, model: Resolved) -> Side:
    request = settled(request)
    report = estimate_resolved(request, model)
    row, as_ddp = best_row(report), runs_as_ddp(report.request)
    is_open = request.strategy == "all" and not as_ddp
    plan = row.plan
    decided = {name: getattr(plan, name) for name in fields_of(EstimateRequest) if hasattr(plan, name)}
    full = request.but(**{**decided, "gpu": report.gpu_name, "global_batch_size": None})
    report = estimate_resolved(full, model)
    return Side(request=full, report=report, row=row, runs_as_ddp=as_ddp, leaves_strategy_open=is_open)


def _groups() -> tuple[tuple[str, ...], ...]:
    """The options, those that belong together in one group."""
    single = [n for n in fields_of(EstimateRequest) if n not in _WITHOUT_EFFECT and not any(n in g for g in _TOGETHER)]
    return (*_TOGETHER, *((name,) for name in single))


def _values(request: EstimateRequest, names: tuple[str, ...]) -> tuple[Any, ...]:
    values = {name: getattr(request, name) for name in names}
    if values.get("offload") == "none":
        values["offload_device"] = "cpu"  # the default
    return tuple(values.values())


def _difference(a: Side, b: Side, names: tuple[str, ...], models: dict[str, Resolved]) -> Difference:
    values_a, values_b = _values(a.request, names), _values(b.request, names)
    changed, reason = _with(a, b, names, models)
    cured = None
    if b.row.fits is False and a.row.fits:
        other, _ = _with(b, a, names, models)
        cured = None if other is None else bool(other.fits)
    return Difference(
        options=names,
        a=values_a,
        b=values_b,
        needed_bytes=_needed_change(a.row, changed),
        step_time=_time_change(a.row, changed),
        cures=cured,
        reason=reason,
    )


def _with(
    a: Side, b: Side, names: tuple[str, ...], models: dict[str, Resolved]
) -> tuple[StrategyEstimate | None, str | None]:
    """The row of job `a` with the values of job `b` for the options `names`; None and the reason if that is impossible."""
    request = a.request.but(**{name: getattr(b.request, name) for name in names})
    try:
        (row,) = estimate_resolved(request, models[request.model]).estimates
    except (AdvisorError, ValueError) as error:
        return None, str(error)
    return row, None


def _needed_change(before: StrategyEstimate, after: StrategyEstimate | None) -> int | None:
    if after is None or after.needed_bytes is None or before.needed_bytes is None:
        return None
    return after.needed_bytes - before.needed_bytes


def _time_change(before: StrategyEstimate, after: StrategyEstimate | None) -> float | None:
    """The factor by which the GPU time per token changes; None if it is unknown."""
    if after is None or after.step is None or before.step is None:
        return None
    return before.step.tokens_per_second_per_gpu / after.step.tokens_per_second_per_gpu


def _size(difference: Difference, a: Side) -> float:
    """The size of a difference: the larger of the relative changes of memory and time. An unknown effect counts as infinite."""
    if difference.needed_bytes is None and difference.step_time is None:
        return float("inf")
    memory = abs(difference.needed_bytes or 0) / (a.row.needed_bytes or 1)
    return max(memory, abs((difference.step_time or 1.0) - 1))
