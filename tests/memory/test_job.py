"""The phases of a job: load, first step, steady step, save."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from fsdp_advisor import estimate
from fsdp_advisor.engines.job_peaks import JobPeaks, Limits, StepPeaks, job_peaks
from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.job.choices import Backend, Strategy
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.memory.device import device_overhead
from fsdp_advisor.memory.live import StepPeak
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.parallelism.mesh import Mesh
from fsdp_advisor.program.storages import States, Storages
from fsdp_advisor.report import Report

LLAMA = "meta-llama/Llama-2-7b-hf"
GIB = 2**30


@pytest.fixture(scope="module")
def report() -> Report:
    return estimate(model=LLAMA, gpus=4, gpu="H100")


def test_every_strategy_reports_all_phases(report: Report) -> None:
    for e in report.estimates:
        assert e.job_peaks is not None
        assert tuple(e.job_peaks.phases) == ("load", "first_step", "steady_step", "save")
        assert e.job_peaks.phases["steady_step"].gpu_bytes == e.peak_tensor_bytes
        document = e.as_dict()
        assert (
            json.loads(json.dumps(document))["job_peaks"]["load"]["gpu_bytes"] == e.job_peaks.phases["load"].gpu_bytes
        )
        low, high = document["device_overhead_bytes_range"]
        assert 0 < low < high


def test_the_first_step_has_no_optimizer_states_before_its_optimizer_phase(report: Report) -> None:
    """So its peak is at most the steady step's."""
    by_name = {(e.plan.strategy, e.plan.offload): e for e in report.estimates}
    for e in report.estimates:
        assert e.job_peaks is not None
        first, steady = e.job_peaks.phases["first_step"].gpu_bytes, e.job_peaks.phases["steady_step"].gpu_bytes
        assert first is not None and steady is not None and first <= steady
    zero3 = by_name["zero3", "none"]
    assert zero3.job_peaks is not None and zero3.phase_peaks is not None
    states = zero3.states["optimizer"]
    expected = max(zero3.phase_peaks["optimizer"], zero3.phase_peaks["backward"] - states)
    assert zero3.job_peaks.phases["first_step"].gpu_bytes == pytest.approx(expected, rel=1e-3)


def test_full_offload_keeps_optimizer_states_on_the_host(report: Report) -> None:
    full = next(e for e in report.estimates if e.plan.offload == "parameters")
    assert full.job_peaks is not None
    assert full.job_peaks.phases["first_step"].gpu_bytes == full.job_peaks.phases["steady_step"].gpu_bytes
    assert (
        full.job_peaks.phases["save"].host_bytes_per_node
        == full.host_bytes_per_node + full.job_peaks.save_method.host_bytes_per_node
    )


def peaks(
    memory_gib: float, *, strategy: Strategy = "zero3", backend: Backend = "deepspeed", host: int | None = None
) -> JobPeaks:
    """Peaks of a 7B job whose steps need 1 GiB, on 8 GPUs of `memory_gib` in a node with `host` bytes."""
    profile = resolve(LLAMA).profile
    assert profile is not None
    plan = Plan(strategy=strategy, backend=backend, mesh=Mesh(dp_shard=8), seq_len=1)
    gpu = replace(find_gpu("H100"), memory_bytes=int(memory_gib * GIB))
    return job_peaks(
        profile,
        plan,
        Limits(gpu=gpu, overhead=device_overhead(gpu, plan), host_memory_bytes=host),
        StepPeaks(
            steady=StepPeak(
                peak=GIB,
                phase="forward",
                where="embedding",
                phase_peaks={"forward": GIB, "backward": GIB, "optimizer": GIB},
                at_peak={"parameters": GIB},
                tape_phase_peaks={"forward": GIB, "backward": GIB},
            )
        ),
        states=States(parameters=Storages.of(GIB)),
        host=0,
    )


def test_a_job_that_fits_has_no_failing_phase() -> None:
    assert peaks(80).fails is None


def test_the_first_phase_that_does_not_fit_is_named() -> None:
    assert peaks(8, strategy="zero2").fails == "load"  # each GPU first holds the whole model, 12.6 GiB
    assert peaks(1.2).fails == "load"
    assert peaks(80, host=2**20).fails == "load"


def test_load_and_save_methods_depend_on_the_nodes_memory() -> None:
    roomy = peaks(80, backend="fsdp2", host=2048 * GIB)
    assert (roomy.load_method.way, roomy.save_method.way) == ("every_rank", "sharded")
    tight = peaks(80, backend="fsdp1", host=100 * GIB)
    assert (tight.load_method.way, tight.save_method.way) == ("rank0", "full")
    tighter = peaks(80, backend="fsdp1", host=60 * GIB)
    assert tighter.save_method.way == "sharded"
    assert peaks(80, backend="fsdp1", host=40 * GIB).save_method.way == "local"  # leaves optimizer states on the GPU


def test_unknown_step_peaks_stay_unknown() -> None:
    profile, gpu = resolve(LLAMA).profile, find_gpu("H100")
    assert profile is not None
    plan = Plan(strategy="zero3", backend="fsdp2", mesh=Mesh(dp_shard=8), seq_len=1)
    limits = Limits(gpu=gpu, overhead=device_overhead(gpu, plan))
    job = job_peaks(profile, plan, limits, StepPeaks(), states=States(), host=0)
    assert job.phases["first_step"].gpu_bytes is None
    assert job.phases["steady_step"].gpu_bytes is None
    assert job.fails is None


def test_a_job_that_cannot_load_does_not_fit() -> None:
    """ZeRO-2 shards the optimizer states of a 7B model over 64 GPUs, but every GPU first holds the whole model."""
    report = estimate(
        model=LLAMA, gpus=64, nnodes=8, gpu="11GiB", strategy="zero2", backend="deepspeed", offload="optimizer"
    )
    (e,) = report.estimates
    assert e.fits is False
    assert e.job_peaks is not None and e.job_peaks.fails == "load"


def test_a_bare_parameter_count_reports_no_phases() -> None:
    (e, *_) = estimate(model="7e9", gpus=4, gpu="H100").estimates
    assert e.job_peaks is None
    document = e.as_dict()
    assert document["job_peaks"] is document["fails_in"] is document["device_overhead_bytes_range"] is None
