"""Run one case in separate processes, and make its record."""

from __future__ import annotations

from typing import Any

from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.validation import machine
from fsdp_advisor.validation.case import Case, uses_zero_redundancy_optimizer
from fsdp_advisor.validation.child_process import Send, preload, run_in_child
from fsdp_advisor.validation.failures import ModeUnavailable
from fsdp_advisor.validation.predict import Prediction, predict_case
from fsdp_advisor.validation.records import WITHOUT_KERNELS, Record, downsampled
from fsdp_advisor.validation.run_result import RunResult

NEED_KERNELS = (
    "step_seconds", "step_seconds_without_communication", "tokens_per_second_per_gpu",
    "peak_device_bytes", "peak_device_bytes_range",
)  # fmt: skip
"""Figures that a run without kernels cannot measure: times are meaningless, and the size of its CUDA context is taken from the
prediction.
"""
_SAME_MEMORY = 0.97
"""Memory sizes in error messages are rounded, and drivers reserve different amounts."""


def run(case: Case) -> tuple[Record, RunResult]:
    """Run a case in one child process, or in one per rank. Returns its record, and how the run ended.

    Raises AdvisorError if this machine cannot run it at all. A failed or interrupted run is a record with that outcome; the caller decides
    whether to continue.
    """
    if case.mode == "measure":
        from fsdp_advisor.validation.measure import run_on_ranks

        result = run_on_ranks(case)
    else:
        preload()
        result = run_in_child(lambda send: work(case, send), timeout_seconds=case.time_limit_seconds)
    return record_of(case, result), result


def run_or_record_error(case: Case) -> tuple[Record, RunResult]:
    """As `run`; a case that this machine cannot run gets a record with the error as its message."""
    try:
        return run(case)
    except AdvisorError as error:
        result = RunResult.of_exception(error)
        return record_of(case, result), result


def work(case: Case, send: Send) -> None:
    """Predict, then simulate or stand in, and send each result as soon as it is known.

    First measures the memory in use on the GPU, because the prediction then makes a CUDA context.
    """
    if case.mode == "simulate" and case.snapshot is not None:
        raise ModeUnavailable(
            "PyTorch records a memory history only on GPUs", hint="omit --snapshot, or use --mode stand-in"
        )
    send("versions", machine.versions(deepspeed=case.request.backend == "deepspeed"))
    baseline = None
    if case.mode == "stand-in" and case.device == "cuda" and machine.gpu_count() > 0:
        from fsdp_advisor.validation.gpu_memory import measure_baseline

        machine.set_allocator(case.request.allocator_conf)
        baseline = measure_baseline(0)
        send("versions", machine.versions(cuda=True))
    prediction = predict_case(case, gpu_keeps_up=machine.is_simulated())
    send("prediction", prediction.as_dict())
    if case.mode == "simulate":
        send("measured", _simulated(prediction))
        return
    from fsdp_advisor.validation import stand_in

    if case.device == "cpu":
        import torch

        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    measured = stand_in.stand_in(
        prediction.source(),
        prediction.plan,
        device=case.device,
        snapshot=case.snapshot,
        baseline=baseline,
        segments=prediction.segments,
    )
    send("measured", measured)


def _simulated(prediction: Prediction) -> dict[str, Any]:
    """The figures of the simulated step."""
    from fsdp_advisor.validation.simulate import simulate

    found = simulate(prediction.source(), prediction.plan, timeline=True)
    live = {phase: [n for at, _, n in found.timeline if at == phase] for phase in found.phase_peaks}
    return {
        "peak_tensor_bytes": found.peak_tensor_bytes,
        "phase_peaks": found.phase_peaks,
        "at_peak": found.at_peak,
        "timeline": {phase: downsampled(values) for phase, values in live.items()},
    }


def _device(case: Case) -> str:
    if case.mode == "simulate":
        return "cpu"
    return WITHOUT_KERNELS if case.device == "cuda" and machine.is_simulated() else case.device


def record_of(case: Case, result: RunResult) -> Record:
    """The record of a case. Without a prediction, its request is the one that was asked, not the resolved one."""
    reported = result.reported
    values = reported.get("prediction")
    prediction = Prediction.from_dict(values) if values is not None else None
    measured: dict[str, Any] = reported.get("measured", {})
    predicted = prediction.predicted if prediction else {}
    fits = prediction.fits if prediction else None
    detail = dict(result.detail) | ({"gpu_memory_bytes": prediction.gpu_memory_bytes} if prediction else {})
    if _device(case) == WITHOUT_KERNELS:
        measured, predicted = ({k: v for k, v in f.items() if k not in NEED_KERNELS} for f in (measured, predicted))
    if prediction and uses_zero_redundancy_optimizer(prediction.plan, case.zero1):
        predicted, fits = {}, None
        detail["engine"] = "torch.distributed.optim.ZeroRedundancyOptimizer, which the estimate does not model"
    return Record(
        request=prediction.request if prediction else case.request.as_dict(),
        mode=case.mode,
        device=_device(case),
        outcome=result.outcome,
        versions=reported.get("versions", {}),
        measured=measured,
        predicted=predicted,
        fits_predicted=fits,
        fits_really=_fits_really(result, measured, prediction),
        message=result.message,
        detail=detail,
        seconds=result.seconds,
    )


def _fits_really(result: RunResult, measured: dict[str, Any], prediction: Prediction | None) -> bool | None:
    """Whether the job fits, judged by its run; None if the run does not show it.

    A run out of memory does not fit, unless the host ran out or the GPU is smaller than the requested one. A completed run fits if
    the largest figure of the worst rank is within the GPU's memory; if only tensors were measured, the prediction adds the rest.
    """
    if result.outcome == "oom":
        if result.detail.get("memory") == "host":
            return None
        if prediction is None:
            return False
        total = result.detail.get("total_bytes", prediction.gpu_memory_bytes)
        return None if total < _SAME_MEMORY * prediction.gpu_memory_bytes else False
    if result.outcome != "ok" or prediction is None:
        return None
    measured = {**measured, **measured.get("largest", {})}
    needed = measured.get("peak_device_bytes", measured.get("peak_reserved_bytes"))
    if needed is None and "peak_tensor_bytes" in measured and prediction.needed_bytes is not None:
        needed = prediction.needed_bytes + measured["peak_tensor_bytes"] - prediction.predicted["peak_tensor_bytes"]
    return None if needed is None else bool(needed <= prediction.gpu_memory_bytes)
