"""Predictions of runs on a GPU, made on a machine without one."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matrix import in_turn

torch = pytest.importorskip("torch")

from fsdp_advisor.errors import UsageError  # after the check for torch
from fsdp_advisor.estimator import estimate
from fsdp_advisor.hardware import Gpu, find_gpu
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.memory.allocator.conf import CONF_VARIABLES
from fsdp_advisor.model import cache
from fsdp_advisor.program.accounts import PHASES
from fsdp_advisor.validation import gpu_memory, machine, stand_in, worker
from fsdp_advisor.validation.case import Case
from fsdp_advisor.validation.predict import Prediction, predict, predict_case
from fsdp_advisor.validation.run_result import RunResult
from fsdp_advisor.validation.snapshots import compare_snapshot

pytestmark = pytest.mark.slow

H100 = find_gpu("H100-80GB")
JOB: dict[str, Any] = {"model": "meta-llama/Llama-3.2-1B", "gpus": 8, "micro_batch_size": 2, "seq_len": 2048}
MIB = 2**20


@pytest.fixture(autouse=True)
def attached_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100 is attached, and no environment variable changes the prediction."""
    monkeypatch.setattr(machine, "gpu_here", lambda: H100)
    for name in (*CONF_VARIABLES, "CUBLAS_WORKSPACE_CONFIG", "CUDA_MODULE_LOADING"):
        monkeypatch.delenv(name, raising=False)


def predicted(mode: Any = "stand-in", device: Any = "cuda", gpu: Gpu | None = None, **options: Any) -> Prediction:
    return predict(make_request({**JOB, "strategy": "zero3", **options}), mode, device, gpu=gpu)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"strategy": "zero2"},
        {"strategy": "ddp", "backend": "ddp"},
        {"backend": "fsdp1"},
        {"backend": "fsdp1", "gpus": 1, "precision": "bf16"},
        {"gradient_accumulation_steps": 4, "activation_checkpointing": "full"},
    ],
    ids=str,
)
def test_gpu_predictions_have_all_figures_and_are_consistent(options: dict[str, Any]) -> None:
    found = predicted(**options)
    said, one = found.predicted, estimate(**{**JOB, "strategy": "zero3", **options, "gpu": "H100-80GB"}).estimates[0]  # fmt: skip
    assert one.job_peaks is not None
    if not one.job_peaks.load_method.transfers:  # a run empties the cache before its first step; a job does not
        for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
            assert 0 <= getattr(one, name) - said[name] <= MIB  # the first step may split blocks differently
    assert sum(said["at_peak"].values()) == said["peak_tensor_bytes"] == max(said["phase_peaks"].values())
    assert said["peak_tensor_bytes"] <= said["peak_allocated_bytes"] <= said["peak_reserved_bytes"]
    assert [*said["phases"]] == [*PHASES]
    for name in ("allocated", "reserved", "requested"):
        assert said[f"peak_{name}_bytes"] == max(said["phases"][p][f"{name}_bytes"] for p in PHASES)
    low, high = said["peak_device_bytes_range"]
    assert low < said["peak_device_bytes"] < high
    assert low - said["peak_reserved_bytes"] == said["device_overhead_bytes_range"][0]
    assert said["context_bytes_range"][0] < said["context_bytes_range"][1] < 1 << 30
    assert found.fits is True and found.needed_bytes == said["peak_device_bytes"]
    assert sum(segment.n_bytes for segment in found.segments) == said["peak_reserved_bytes"]


def test_on_a_nearly_full_gpu_the_prediction_releases_cached_memory() -> None:
    roomy = predicted().predicted
    not_reserved = roomy["peak_device_bytes"] - roomy["peak_reserved_bytes"]
    allocated, reserved = roomy["peak_allocated_bytes"], roomy["peak_reserved_bytes"]
    assert reserved - allocated > 64 * MIB
    tight = replace(H100, memory_bytes=not_reserved + reserved - 32 * MIB)
    found = predicted(gpu=tight)
    assert found.fits is True and found.predicted["allocator"]["verdict"] == "fits"
    assert found.predicted["peak_reserved_bytes"] <= reserved - 32 * MIB
    assert found.predicted["peak_device_bytes"] == found.needed_bytes <= tight.memory_bytes
    assert sum(segment.n_bytes for segment in found.segments) <= found.predicted["peak_reserved_bytes"]
    hopeless = predicted(gpu=replace(H100, memory_bytes=not_reserved + allocated - 64 * MIB))
    assert hopeless.fits is False and hopeless.predicted["peak_reserved_bytes"] == reserved


def test_only_real_ranks_have_memory_of_nccl() -> None:
    alone, eight = (predicted(mode).predicted["device_overhead_bytes_range"] for mode in ("stand-in", "measure"))
    assert alone == predicted("measure", gpus=1, strategy="ddp").predicted["device_overhead_bytes_range"]
    assert alone[0] < eight[0] and alone[1] + (1 << 28) < eight[1]


def test_sdpa_kernel_depends_on_the_gpu(tmp_path: Path) -> None:
    """From Ampere on, sdpa is a flash kernel with scratch memory and without masks, also for models that are not in the catalog."""
    config = {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 64,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = str(tmp_path)
    on_cpu = predicted("simulate", "cpu", model=model).predicted
    on_h100 = predicted(model=model).predicted
    on_v100 = predicted(model=model, gpu=find_gpu("V100")).predicted
    assert on_h100["peak_tensor_bytes"] < on_cpu["peak_tensor_bytes"] == on_v100["peak_tensor_bytes"]
    h100_libraries, v100_libraries = (
        found["peak_requested_bytes"] - found["peak_tensor_bytes"] for found in (on_h100, on_v100)
    )
    assert h100_libraries > v100_libraries  # cuBLAS's workspaces are larger on Hopper
    assert "phases" not in on_cpu


@in_turn(1, of=2)
def test_catalogued_model_recorded_again_has_the_same_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is recorded again if other versions are installed than those of the catalog. T5 always passes a mask to sdpa."""
    job = {"model": "google-t5/t5-small", "seq_len": 256, "precision": "bf16"}
    shipped = predicted(**job).predicted
    monkeypatch.setattr(cache, "installed_versions", lambda: {"torch": "99", "transformers": "99"})
    recorded = predicted(**job).predicted
    assert recorded["peak_requested_bytes"] == shipped["peak_requested_bytes"]


def test_attached_gpu_gets_the_memory_of_the_requested_one() -> None:
    small = predicted(model=JOB["model"]).predicted
    asked = predict(make_request({**JOB, "strategy": "zero3", "gpu": "8GiB"}), "stand-in", "cuda")
    assert asked.gpu_memory_bytes == 8 << 30 and asked.fits is False and asked.request["gpu"] == "8GiB"
    assert asked.predicted["peak_allocated_bytes"] == small["peak_allocated_bytes"]
    unasked = predicted()
    assert unasked.request["gpu"] == "H100-80GB" and unasked.gpu_memory_bytes == H100.memory_bytes


@pytest.mark.parametrize("name", CONF_VARIABLES)
def test_environment_configures_the_allocator_unless_the_request_does(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = predicted(model="openai-community/gpt2", seq_len=1024)
    monkeypatch.setenv(name, "expandable_segments:True")
    changed = predicted(model="openai-community/gpt2", seq_len=1024)
    assert plain.request["allocator_conf"] is None and changed.request["allocator_conf"] == "expandable_segments:True"
    assert changed.predicted["peak_reserved_bytes"] != plain.predicted["peak_reserved_bytes"]
    assert all(segment.is_expandable for segment in changed.segments)
    asked = predicted(model="openai-community/gpt2", seq_len=1024, allocator_conf="max_split_size_mb:64")
    assert asked.request["allocator_conf"] == "max_split_size_mb:64"  # the request's configuration wins
    assert predicted("simulate", "cpu", model="openai-community/gpt2", seq_len=1024).request["allocator_conf"] is None


def test_unknown_allocator_settings_are_refused_with_a_hint() -> None:
    with pytest.raises(UsageError) as caught:
        machine.set_allocator("expandable_segment:True")
    assert "expandable_segments" in caught.value.hint


def test_prediction_survives_json() -> None:
    found = predicted(model="openai-community/gpt2", seq_len=1024)
    assert Prediction.from_dict(json.loads(json.dumps(found.as_dict()))) == found


# A run on a simulated GPU


class FakeCuda:
    """The part of torch.cuda that figures are read from: 80 GiB, of which other processes use 300 MiB and the context 500 MiB."""

    TOTAL, OTHERS, CONTEXT, LATER = 80 << 30, 300 << 20, 500 << 20, 100 << 20

    def __init__(self, snapshot: list[dict[str, Any]], reserved: int, nvml: bool = True) -> None:
        self.snapshot, self.steady, self.nvml = snapshot, reserved, nvml
        self.reserved, self.not_reserved = 0, 0

    def device_memory_used(self, index: int) -> int:
        if not self.nvml:
            raise ModuleNotFoundError("pynvml")
        return self.OTHERS + self.not_reserved + self.reserved

    def zeros(self, *_: Any, **__: Any) -> None:
        self.not_reserved, self.reserved = self.CONTEXT, 2 << 20

    def step(self) -> None:
        self.not_reserved, self.reserved = self.CONTEXT + self.LATER, self.steady

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("device_memory_used",):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch, "zeros", self.zeros)
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda index=None: None)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index=None: self.reserved)
        used = lambda: self.OTHERS + self.not_reserved + self.reserved  # noqa: E731  # evaluated at each call
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index=None: (self.TOTAL - used(), self.TOTAL))
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda index=None: {"num_alloc_retries": 1, "segment.all.current": 7})  # fmt: skip
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: self.snapshot)


def as_recorded(found: Prediction) -> list[dict[str, Any]]:
    """The predicted segments in the form of torch.cuda.memory_snapshot()."""
    return [
        {
            "device": 0, "segment_type": "large" if s.is_large else "small", "is_expandable": s.is_expandable,
            "blocks": [{"size": n, "state": "active_allocated" if used else "inactive"} for n, used in s.blocks],
        }
        for s in found.segments
    ]  # fmt: skip


@pytest.mark.parametrize("nvml", [True, False])
def test_device_figures_exclude_other_processes_if_nvml_answers(nvml: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = predicted(model="openai-community/gpt2", seq_len=1024)
    reserved = found.predicted["peak_reserved_bytes"]
    snapshot = as_recorded(found)
    snapshot.append({**snapshot[0], "device": 1})  # another GPU's
    cuda = FakeCuda(snapshot, reserved, nvml)
    cuda.install(monkeypatch)
    baseline = gpu_memory.measure_baseline(0)
    others = cuda.OTHERS if nvml else 0
    assert (baseline.context_bytes, baseline.others_bytes) == (cuda.CONTEXT + cuda.OTHERS - others, others)
    cuda.step()
    reported = gpu_memory.allocator_figures(0, baseline, reserved, found.segments)
    assert reported["peak_device_bytes"] == reserved + cuda.CONTEXT + cuda.LATER + cuda.OTHERS - others
    assert (reported["allocator_retries"], reported["segments"], reported["device_memory_bytes"]) == (1, 7, cuda.TOTAL)
    kept = reported["snapshot"]
    assert kept["equal_segments"] == kept["segments"] == kept["modelled_segments"] == len(found.segments) > 1
    assert kept["recorded_bytes"] == kept["modelled_bytes"] == reserved and kept["only_recorded"] == []
    snapshot[0]["blocks"][0]["size"] += 512
    reported = gpu_memory.allocator_figures(0, baseline, reserved, found.segments)
    assert (
        reported["snapshot"]["equal_segments"] == len(found.segments) - 1
        and len(reported["snapshot"]["only_recorded"]) == 1
    )
    assert "snapshot" not in gpu_memory.allocator_figures(0, baseline, reserved, None)


def test_record_of_a_stand_in_compares_measured_and_predicted_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker runs in this process; only the run itself is replaced."""
    monkeypatch.setattr(machine, "gpu_count", lambda: 1)
    monkeypatch.setattr(machine, "versions", lambda **_: {"torch": "2", "transformers": "5", "gpu": "NVIDIA H100"})
    monkeypatch.setattr(gpu_memory, "measure_baseline", lambda index: gpu_memory.Baseline(500 << 20, 0))

    def run(source: Any, plan: Any, *, device: str, baseline: Any, segments: Any, **_: Any) -> dict[str, Any]:
        assert device == "cuda" and baseline.context_bytes == 500 << 20
        snapshot = compare_snapshot(as_recorded(replace(predicted(), segments=segments)), segments)
        peaks = {"allocated_bytes": 1010, "reserved_bytes": 2020, "requested_bytes": 1000, "active_bytes": 1010}
        return {
            "peak_allocated_bytes": 1010, "peak_reserved_bytes": 2020, "peak_device_bytes": H100.memory_bytes + 1,
            "phases": dict.fromkeys(PHASES, peaks), "context_bytes": baseline.context_bytes, "snapshot": snapshot.as_dict(),
        }  # fmt: skip

    monkeypatch.setattr(stand_in, "stand_in", run)
    request = make_request({**JOB, "strategy": "zero3"})
    case = Case(request=request, mode="stand-in", device="cuda")
    reported: dict[str, Any] = {}
    worker.work(case, lambda name, value: reported.update({name: value}))
    record = worker.record_of(case, RunResult(outcome="ok", reported=reported))
    said = record.predicted
    assert record.errors["peak_reserved_bytes"] == said["peak_reserved_bytes"] / 2020 - 1
    assert record.errors["phases.backward.allocated_bytes"] == said["phases"]["backward"]["allocated_bytes"] / 1010 - 1
    assert record.fits_predicted is True and record.fits_really is False  # a byte more than the GPU has
    assert record.detail["gpu_memory_bytes"] == H100.memory_bytes
    assert record.measured["snapshot"]["equal_segments"] == record.measured["snapshot"]["segments"]


@in_turn(2, of=6)
@pytest.mark.parametrize(("installed", "expected"), [(False, "fla"), (True, "all")])
def test_a_run_on_a_gpu_is_predicted_with_the_kernels_of_its_environment(
    installed: bool, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fla", ModuleType("fla"))
    monkeypatch.setitem(sys.modules, "causal_conv1d", ModuleType("causal_conv1d") if installed else None)
    config = {
        "model_type": "qwen3_5_text", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 100, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32, "layer_types": ["linear_attention"],
    }  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    request = make_request({"model": str(path), "strategy": "ddp", "seq_len": 64, "precision": "bf16"})
    found = predict_case(Case(request=request, mode="stand-in", device="cuda"))
    assert found.request["kernel_packages"] == found.plan.kernel_packages == expected
