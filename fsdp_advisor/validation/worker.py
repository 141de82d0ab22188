"""What a case's own process does, and the record that comes of it."""

from __future__ import annotations

from typing import Any

from fsdp_advisor.validation import child_process, machine
from fsdp_advisor.validation.case import Case
from fsdp_advisor.validation.child_process import Ended, Tell
from fsdp_advisor.validation.failures import NotHere
from fsdp_advisor.validation.predict import Prediction, predict
from fsdp_advisor.validation.records import Record, thinned

_SAME = 0.97
"""A GPU's memory in an error message is rounded, and in a table may be another driver's."""


def run(case: Case) -> tuple[Record, Ended]:
    """One case in a process of its own (or in one per rank), as a record; never raises for what the case does.

    The record of a case that was interrupted says so: it is the caller's to stop there.
    """
    if case.rung == "measure":
        from fsdp_advisor.validation.measure import launch_ranks

        ended = launch_ranks(case)
    else:
        child_process.warm_up()
        ended = child_process.forked(lambda tell: work(case, tell), timeout_seconds=case.timeout_seconds)
    return record_of(case, ended), ended


def work(case: Case, tell: Tell) -> None:
    """Predict, then simulate or stand in; each is told as soon as it is known. Of a GPU, first what it holds before the run."""
    if case.rung == "simulate" and case.snapshot is not None:
        raise NotHere("PyTorch keeps a memory history of GPUs alone", hint="leave --snapshot out, or --rung stand-in")
    cuda = case.device == "cuda" and case.rung != "simulate" and machine.gpu_count() > 0
    tell("versions", machine.versions(deepspeed=case.request.backend == "deepspeed"))
    base = None
    if cuda:
        from fsdp_advisor.validation.stand_in import baseline

        machine.set_allocator(case.request.allocator_conf)
        base = baseline(0)
        tell("versions", machine.versions(cuda=True))
    prediction = predict(case.request, case.rung, case.device)
    tell("prediction", prediction.as_dict())
    if case.rung == "simulate":
        from fsdp_advisor.validation.simulate import simulate

        found = simulate(prediction.source(), prediction.plan, timeline=True)
        alive = {phase: [n for at, _, n in found.timeline if at == phase] for phase in found.phase_peaks}
        measured: dict[str, Any] = {
            "peak_tensor_bytes": found.peak_tensor_bytes,
            "phase_peaks": found.phase_peaks,
            "at_peak": found.at_peak,
            "timeline": {phase: thinned(values) for phase, values in alive.items()},
        }
    else:
        from fsdp_advisor.validation.stand_in import stand_in

        meter = None
        if case.device == "cpu":
            import torch

            from fsdp_advisor.validation.meter import StorageMeter

            torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
            meter = StorageMeter()
        measured = stand_in(
            prediction.source(),
            prediction.plan,
            device=case.device,
            meter=meter,
            snapshot=case.snapshot,
            base=base,
            segments=prediction.segments,
        )
    tell("measured", measured)


def record_of(case: Case, ended: Ended) -> Record:
    """All that is known of a case. Where not even a prediction came about, the request is as it was asked."""
    reported = dict(ended.reported)
    values = reported.get("prediction")
    prediction = Prediction.from_dict(values) if values is not None else None
    measured: dict[str, Any] = reported.get("measured", {})
    predicted = prediction.predicted if prediction else {}
    fits = prediction.fits if prediction else None
    detail = dict(ended.detail) | ({"gpu_memory_bytes": prediction.gpu_memory_bytes} if prediction else {})
    if prediction and prediction.plan.strategy == "zero1" and case.zero1 == "torch":
        predicted, fits = {}, None
        detail["engine"] = "torch.distributed.optim.ZeroRedundancyOptimizer, which the estimate does not model"
    asked = case.request.as_dict()
    return Record(
        request=prediction.request if prediction else asked,
        rung=case.rung,
        device=case.device if case.rung != "simulate" else "cpu",
        outcome=ended.outcome,
        versions=reported.get("versions", {}),
        measured=measured,
        predicted=predicted,
        fits_predicted=fits,
        fits_really=really_fits(ended, measured, prediction),
        message=ended.message,
        detail=detail,
        seconds=ended.seconds,
    )


def really_fits(ended: Ended, measured: dict[str, Any], prediction: Prediction | None) -> bool | None:
    """Out of memory did not fit, unless the GPU that ran out is smaller than the one asked about, or it was the host that did.

    What ended well fits where the strongest figure of the worst rank is within the GPU's memory. Where tensors alone were
    found, what else a GPU holds is taken from the prediction.
    """
    if ended.outcome == "oom":
        if ended.detail.get("memory") == "host":
            return None
        smaller = (
            prediction
            and ended.detail.get("total_bytes", prediction.gpu_memory_bytes) < _SAME * prediction.gpu_memory_bytes
        )
        return None if smaller else False
    measured = {**measured, **measured.get("largest", {})}
    if ended.outcome != "ok" or prediction is None:
        return None
    found = measured.get("peak_device_bytes", measured.get("peak_reserved_bytes"))
    if found is None and "peak_tensor_bytes" in measured and prediction.needed_bytes is not None:
        found = prediction.needed_bytes + measured["peak_tensor_bytes"] - prediction.predicted["peak_tensor_bytes"]
    return None if found is None else bool(found <= prediction.gpu_memory_bytes)
