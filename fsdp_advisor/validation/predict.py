"""The prediction of one case, from a profile recorded with the installed versions of torch and transformers."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

from fsdp_advisor.assumptions import gpu_of
from fsdp_advisor.errors import UsageError
from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.hardware import Gpu
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.kernel_packages import usable
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.memory.allocator import AllocatorConf, AllocatorSegment, takes_newest_first
from fsdp_advisor.memory.live import TimelinePoint
from fsdp_advisor.model import cache
from fsdp_advisor.model.kernels import called_packages
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.step_figures import peak_of_step, timeline_of_step
from fsdp_advisor.strategy_estimate import StrategyEstimate
from fsdp_advisor.tapes import cpu_tape
from fsdp_advisor.validation import machine
from fsdp_advisor.validation.case import Case
from fsdp_advisor.validation.choices import Device, Mode
from fsdp_advisor.validation.on_gpu import GpuPrediction, effective_conf, gpu_run_of, predict_on_gpu
from fsdp_advisor.validation.records import downsampled

if TYPE_CHECKING:
    from fsdp_advisor.recording.source import Source

_KEPT = (
    "peak_tensor_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "peak_device_bytes", "peak_device_bytes_range",
    "device_overhead_bytes_range", "allocator", "peak_phase", "phase_peaks", "states", "at_peak",
    "step_seconds", "tokens_per_second_per_gpu", "warnings",
)  # fmt: skip
"""Keys of an estimate that a record keeps."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The prediction of one case, and the inputs of its run.

    `fits` and `needed_bytes` are for the steps, without loading and saving; None if unknown. `segments` are the allocator's at the
    end of a run on a GPU.
    """

    request: dict[str, Any]
    plan: Plan
    predicted: dict[str, Any]
    fits: bool | None
    needed_bytes: int | None
    gpu_memory_bytes: int
    config: dict[str, Any]
    task: str
    segments: tuple[AllocatorSegment, ...] = ()

    def source(self) -> Source:
        """The model to run. Imports torch."""
        from fsdp_advisor.recording import source_of

        return source_of(self.config, name=str(self.request["model"]), task=self.task)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Prediction:
        """The prediction from the values of `as_dict`, which may have gone through JSON."""
        segments = tuple(
            AllocatorSegment(**{**s, "blocks": tuple(map(tuple, s["blocks"]))}) for s in values["segments"]
        )
        return cls(
            **{
                **values,
                "plan": Plan(**{**values["plan"], "mesh": Mesh(**values["plan"]["mesh"])}),
                "segments": segments,
            }
        )


def predict_case(case: Case, *, gpu_keeps_up: bool = False) -> Prediction:
    """The prediction of a case. A run on a GPU has the kernels that this environment has, unless the request names some."""
    request = case.request
    if case.mode != "simulate" and case.device == "cuda" and "kernel_packages" not in request.changed:
        profile = recorded_with_installed_versions(request.model).profile
        assert profile is not None
        called = called_packages(profile)
        request = replace(request, kernel_packages=usable(called, [each for each in called if _is_importable(each)]))
    newest_first = takes_newest_first(metadata.version("torch"))
    return predict(request, case.mode, case.device, gpu_keeps_up=gpu_keeps_up, newest_first=newest_first)


def _is_importable(package: str) -> bool:
    """Whether transformers can import a package of `--kernel-packages`, and loads kernels from the hub if it is `kernels`."""
    try:
        for name in ("kernels", "ninja") if package == "kernels" else (package.replace("-", "_"),):
            importlib.import_module(name)
    except Exception:  # as transformers does: an extension of another version of torch, for example
        return False
    return True


def predict(
    request: EstimateRequest,
    mode: Mode = "simulate",
    device: Device = "cpu",
    *,
    gpu: Gpu | None = None,
    gpu_keeps_up: bool = False,
    newest_first: bool = False,
) -> Prediction:
    """The prediction of a request for one strategy. Raises AdvisorError as `estimate` does, and for a bare parameter count.

    On a GPU the prediction is for `gpu`, or else for the attached GPU with the memory of the requested one; asking for the attached GPU
    makes a CUDA context. `gpu_keeps_up`, `newest_first`: see `GpuRun`.
    """
    if request.strategy == "all":
        raise UsageError("a run needs one strategy", hint="--strategy ddp, zero1, zero2, zero3 or hsdp")
    model = recorded_with_installed_versions(request.model).adapted(adaptation_of(request))
    on_gpu = mode != "simulate" and device == "cuda"
    report = estimate_resolved(request, model)
    (row,) = report.estimates
    if on_gpu:
        gpu = gpu or _attached_or_requested_gpu(request)
        conf = effective_conf(request)
        run = gpu_run_of(model, row.plan, gpu, mode, AllocatorConf.parse(conf))
        run = replace(run, gpu_keeps_up=gpu_keeps_up, newest_first=newest_first)
        found = predict_on_gpu(model, run)
        gpu_name, gpu_memory_bytes = gpu.name if request.gpu is None else report.gpu_name, gpu.memory_bytes
    else:
        gpu_name, gpu_memory_bytes, conf = report.gpu_name, report.gpu_memory_bytes, request.allocator_conf
        found = _on_cpu(model, row)
    row = found.estimate
    values = {**row.as_dict(), **found.figures}
    resolved = {**request.as_dict(), "model": report.model_name, "gpu": gpu_name, "allocator_conf": conf}
    resolved |= {name: getattr(row.plan, name) for name in resolved if hasattr(row.plan, name)}
    kept = {name: values[name] for name in (*_KEPT, *found.figures) if values.get(name) is not None}
    profile = model.profile
    assert profile is not None
    return Prediction(
        request=resolved,
        plan=row.plan,
        predicted=kept | _step_seconds(row) | _timeline(found.timeline),
        fits=found.fits,
        needed_bytes=row.needed_bytes,
        gpu_memory_bytes=gpu_memory_bytes,
        config=dict(profile.config),
        task=profile.task,
        segments=found.segments,
    )


def _on_cpu(model: Resolved, row: StrategyEstimate) -> GpuPrediction:
    """The prediction of a run on a CPU: the tensors of PyTorch's own step there. The verdict, on a GPU, is only about the steps."""
    assert model.profile is not None
    tape = cpu_tape(model, row.plan)[1]
    step = peak_of_step(model.profile, tape, row.plan)
    figures: dict[str, Any] = {
        "peak_tensor_bytes": step.peak,
        "peak_phase": step.phase,
        "phase_peaks": step.phase_peaks,
        "at_peak": step.at_peak,
    }
    fits = row.fits if row.allocator is None else row.allocator.verdict != "does_not_fit"
    timeline = timeline_of_step(model.profile, tape, row.plan)
    return GpuPrediction(estimate=row, fits=fits, figures=figures, timeline=timeline, segments=())


def _attached_or_requested_gpu(request: EstimateRequest) -> Gpu:
    """The attached GPU with the memory and the network of the requested one; the requested one if no GPU is attached."""
    requested, _ = gpu_of(request)
    attached = machine.gpu_here()
    if attached is None:
        return requested
    attached = replace(attached, inter_node=requested.inter_node or attached.inter_node)
    return attached if request.gpu is None else replace(attached, memory_bytes=requested.memory_bytes)


def recorded_with_installed_versions(name: str) -> Resolved:
    """The model; recorded again if its profile was recorded with other versions of torch or transformers."""
    model = resolve(name)
    profile = model.profile
    if profile is None:
        raise UsageError(f"{name} is a bare parameter count: it cannot be run", hint="name a model or its config.json")
    if profile.versions == cache.installed_versions():
        return model
    task = profile.task if model.is_catalogued else None
    kept = cache.fetch(profile.config, task)
    if kept is None:
        from fsdp_advisor.recording import Recorder, TransformersSource

        kept = Recorder(TransformersSource(profile.config, name=model.name, task=task)).profile
    return replace(model, profile=kept, recorded_locally=True)


def _step_seconds(one: StrategyEstimate) -> dict[str, float]:
    """The step's seconds without communication, which is what a stand-in measures."""
    return {} if one.step is None else {"step_seconds_without_communication": one.step.seconds_without_communication}


def _timeline(points: Iterable[TimelinePoint]) -> dict[str, Any]:
    """The predicted live bytes through the step by phase, downsampled, for a drawing together with the measured ones."""
    highs: dict[str, list[int]] = {}
    for point in points:
        highs.setdefault(point.phase, []).append(point.high_bytes)
    return {"timeline": {phase: downsampled(values) for phase, values in highs.items()}} if highs else {}
