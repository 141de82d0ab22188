"""What the estimate says of one case, made with a profile recorded under the very versions that are about to run it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from fsdp_advisor.errors import UsageError
from fsdp_advisor.estimator import estimate_resolved, gpu_of
from fsdp_advisor.hardware import Gpu
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.memory.allocator import AllocatorConf, Segment
from fsdp_advisor.memory.ledger import Point
from fsdp_advisor.model import cache
from fsdp_advisor.model.resolve import Resolved, resolve
from fsdp_advisor.report import StrategyEstimate
from fsdp_advisor.validation import machine
from fsdp_advisor.validation.case import Device
from fsdp_advisor.validation.on_gpu import conf_in_force, estimate_on
from fsdp_advisor.validation.records import Rung, thinned

if TYPE_CHECKING:
    from fsdp_advisor.recording.source import Source

PREDICTED = (
    "peak_tensor_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes", "peak_device_bytes_range",
    "device_overhead_bytes_range", "allocated_breakdown", "allocator", "peak_phase", "phase_peaks", "states", "at_peak",
    "step_seconds", "tokens_per_second_per_gpu", "warnings",
)  # fmt: skip
"""Keys of an estimate that a record keeps."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One case as estimated, and what is needed to run it.

    `fits` is of the steps, which are all that is run. `needed_bytes` is what they take of the GPU, None where it is not known;
    `segments` what the allocator of a run on a GPU holds in the end.
    """

    request: dict[str, Any]
    plan: Plan
    predicted: dict[str, Any]
    fits: bool | None
    needed_bytes: int | None
    gpu_memory_bytes: int
    config: dict[str, Any]
    task: str
    segments: tuple[Segment, ...] = ()

    def source(self) -> Source:
        """The model, to be run. Imports torch."""
        from fsdp_advisor.recording import TransformersSource

        return TransformersSource(self.config, name=str(self.request["model"]), task=self.task)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Prediction:
        """What `as_dict` gave, through JSON or not."""
        segments = tuple(Segment(**{**s, "blocks": tuple(map(tuple, s["blocks"]))}) for s in values["segments"])
        return cls(**{**values, "plan": Plan(**values["plan"]), "segments": segments})


def predict(
    request: EstimateRequest, rung: Rung = "simulate", device: Device = "cpu", *, gpu: Gpu | None = None
) -> Prediction:
    """The prediction of a request for one strategy. Raises AdvisorError as `estimate` does, and for a bare count.

    For a rung on a GPU it is of `gpu`, or else of the one at hand, with the memory of the one asked for; to ask what is at
    hand makes a CUDA context.
    """
    if request.strategy == "all":
        raise UsageError("one strategy at a time is run", hint="--strategy ddp, zero1, zero2, zero3 or hsdp")
    model = resolve_here(request.model)
    profile = model.profile
    assert profile is not None
    on_gpu = rung != "simulate" and device == "cuda"
    conf = conf_in_force(request) if on_gpu else request.allocator_conf
    report = estimate_resolved(request, model, walk="never" if on_gpu else "if open")
    (one,) = report.estimates
    plan, needed = one.plan, one.needed_bytes
    gpu_name, gpu_memory_bytes = report.gpu_name, report.gpu_memory_bytes
    fits = _steps_fit(one, gpu_memory_bytes)
    timeline: tuple[Point, ...] = one.timeline
    segments: tuple[Segment, ...] = ()
    figures: dict[str, Any] = {}
    if on_gpu:
        gpu = gpu or _at_hand(request)
        gpu_memory_bytes = gpu.memory_bytes
        gpu_name = gpu.name if request.gpu is None else gpu_name
        found = estimate_on(model, plan, gpu, rung, AllocatorConf.parse(conf) if conf else AllocatorConf())
        one, fits, figures, timeline, segments = (
            found.estimate, found.fits, found.figures, found.timeline, found.segments
        )  # fmt: skip
        needed = one.needed_bytes
    values = {**one.as_dict(), **figures}
    resolved = {**request.as_dict(), "model": report.model_name, "gpu": gpu_name, "allocator_conf": conf}
    resolved |= {name: getattr(plan, name) for name in resolved if hasattr(plan, name)}
    kept = {name: values[name] for name in (*PREDICTED, *figures) if values.get(name) is not None}
    return Prediction(
        request=resolved,
        plan=plan,
        predicted=kept | _time(one) | _timeline(timeline),
        fits=fits,
        needed_bytes=needed,
        gpu_memory_bytes=gpu_memory_bytes,
        config=dict(profile.config),
        task=profile.task,
        segments=segments,
    )


def _steps_fit(one: StrategyEstimate, gpu_memory_bytes: int) -> bool | None:
    """The estimate's verdict less what it says of loading and saving, which no run does."""
    if one.reserved is not None:
        return one.reserved.verdict != "does_not_fit"
    return one.fits if one.needed_bytes is None else one.needed_bytes <= gpu_memory_bytes


def _at_hand(request: EstimateRequest) -> Gpu:
    """The attached GPU, with the memory and the network of the one asked for; that one itself where there is none."""
    asked, _ = gpu_of(request)
    here = machine.gpu_here()
    if here is None:
        return asked
    here = replace(here, inter_node=asked.inter_node or here.inter_node)
    return here if request.gpu is None else replace(here, memory_bytes=asked.memory_bytes)


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
        from fsdp_advisor.recording import Recorder, TransformersSource

        kept = Recorder(TransformersSource(profile.config, name=model.name, task=task)).profile
    return replace(model, profile=kept, recorded_locally=True)


def _time(one: StrategyEstimate) -> dict[str, float]:
    """The step without collectives, which is what one GPU that plays one of many ranks takes."""
    return {} if one.step is None else {"step_seconds_without_communication": one.step.seconds_without_communication}


def _timeline(points: Iterable[Point]) -> dict[str, Any]:
    """The highest bytes of each stretch of the step, by phase, for a plot beside the measured ones."""
    highs: dict[str, list[int]] = {}
    for point in points:
        highs.setdefault(point.phase, []).extend([point.high_bytes] * point.repeats)
    return {"timeline": {phase: thinned(values) for phase, values in highs.items()}} if highs else {}
