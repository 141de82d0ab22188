"""What the estimate says of one case, made with a profile recorded under the very versions that are about to run it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from fsdp_advisor.errors import UsageError
from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.models import cache
from fsdp_advisor.plan import Plan
from fsdp_advisor.report import StrategyEstimate
from fsdp_advisor.request import EstimateRequest
from fsdp_advisor.resolve import Resolved, resolve
from fsdp_advisor.validation.records import thinned

if TYPE_CHECKING:
    from fsdp_advisor.tracing.source import Source

PREDICTED = (
    "peak_tensor_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes", "peak_phase", "phase_peaks",
    "states", "at_peak", "step_seconds", "tokens_per_second_per_gpu", "warnings",
)  # fmt: skip
"""Keys of an estimate that a record keeps."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One case as estimated, and what is needed to run it."""

    request: dict[str, Any]
    plan: Plan
    predicted: dict[str, Any]
    fits: bool | None
    gpu_memory_bytes: int
    config: dict[str, Any]
    task: str

    def source(self) -> Source:
        """The model, to be run. Imports torch."""
        from fsdp_advisor.tracing import TransformersSource

        return TransformersSource(self.config, name=str(self.request["model"]), task=self.task)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Prediction:
        return cls(**{**values, "plan": Plan(**values["plan"])})


def predict(request: EstimateRequest) -> Prediction:
    """The prediction of a request for one strategy. Raises AdvisorError as `estimate` does, and for a bare count."""
    if request.strategy == "all":
        raise UsageError("one strategy at a time is run", hint="--strategy ddp, zero1, zero2, zero3 or hsdp")
    model = resolve_here(request.model)
    profile = model.profile
    assert profile is not None
    report = estimate_resolved(request, model)
    (one,) = report.estimates
    values = one.as_dict()
    plan = one.plan
    resolved = {**request.model_dump(), "model": report.model_name, "gpu": report.gpu_name}
    resolved |= {name: getattr(plan, name) for name in resolved if hasattr(plan, name)}
    return Prediction(
        request=resolved,
        plan=plan,
        predicted={name: values[name] for name in PREDICTED if values.get(name) is not None}
        | _time(one)
        | _timeline(one),
        fits=one.fits,
        gpu_memory_bytes=report.gpu_memory_bytes,
        config=dict(profile.config),
        task=profile.task,
    )


def resolve_here(name: str) -> Resolved:
    """The model, its profile recorded anew where the shipped one is of other versions than those installed."""
    model = resolve(name)
    profile = model.profile
    if profile is None:
        raise UsageError(f"{name} is a bare parameter count: it cannot be run", hint="name a model or its config.json")
    if profile.versions == cache.installed_versions():
        return model
    task = profile.task if model.source == "catalog" else None
    kept = cache.fetch(profile.config, task)
    if kept is None:
        from fsdp_advisor.tracing import Recorder, TransformersSource

        kept = Recorder(TransformersSource(profile.config, name=model.name, task=task)).profile
    return replace(model, profile=kept)


def _time(one: StrategyEstimate) -> dict[str, float]:
    """The step without collectives, which is what one GPU that plays one of many ranks takes."""
    return {} if one.step is None else {"step_seconds_without_communication": one.step.seconds_without_communication}


def _timeline(one: StrategyEstimate) -> dict[str, Any]:
    """The highest bytes of each stretch of the step, by phase, for a plot beside the measured ones."""
    highs: dict[str, list[int]] = {}
    for point in one.timeline:
        highs.setdefault(point.phase, []).extend([point.high_bytes] * point.repeats)
    return {"timeline": {phase: thinned(values) for phase, values in highs.items()}} if highs else {}
