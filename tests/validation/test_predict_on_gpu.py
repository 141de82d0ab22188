"""Predictions of runs on a GPU, made without one: the kernels, the allocator and the device's figures of a GPU that is told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fsdp_advisor.errors import UsageError  # noqa: E402  # after the check for torch
from fsdp_advisor.estimator import estimate, make_request  # noqa: E402
from fsdp_advisor.hardware import Gpu, find_gpu  # noqa: E402
from fsdp_advisor.model import cache  # noqa: E402
from fsdp_advisor.validation import machine, stand_in, worker  # noqa: E402
from fsdp_advisor.validation.case import Case  # noqa: E402
from fsdp_advisor.validation.child_process import Ended  # noqa: E402
from fsdp_advisor.validation.on_gpu import CONF_VARIABLES  # noqa: E402
from fsdp_advisor.validation.predict import Prediction, predict  # noqa: E402
from fsdp_advisor.validation.snapshots import compare_snapshot  # noqa: E402

H100 = find_gpu("H100-80GB")
JOB: dict[str, Any] = {"model": "meta-llama/Llama-3.2-1B", "gpus": 8, "micro_batch_size": 2, "seq_len": 2048}
MIB = 2**20
PHASES = ("forward", "backward", "optimizer")


@pytest.fixture(autouse=True)
def at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """An H100, and nothing in the environment that changes a prediction."""
    monkeypatch.setattr(machine, "gpu_here", lambda: H100)
    for name in (*CONF_VARIABLES, "CUBLAS_WORKSPACE_CONFIG", "CUDA_MODULE_LOADING"):
        monkeypatch.delenv(name, raising=False)


def predicted(rung: Any = "stand-in", device: Any = "cuda", gpu: Gpu | None = None, **options: Any) -> Prediction:
    return predict(make_request({**JOB, "strategy": "zero3", **options}), rung, device, gpu=gpu)


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
def test_all_figures_of_a_gpu_are_predicted_and_hang_together(options: dict[str, Any]) -> None:
    found = predicted(**options)
    said, one = found.predicted, estimate(**{**JOB, "strategy": "zero3", **options, "gpu": "H100-80GB"}, reserved=True).estimates[0]  # fmt: skip
    assert one.job is not None
    if not one.job.loading.placed:  # a run empties the cache before its first step, a job does not
        for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
            assert 0 <= getattr(one, name) - said[name] <= MIB  # the first step's blocks may be cut otherwise
    assert sum(said["at_peak"].values()) == said["peak_tensor_bytes"] == max(said["phase_peaks"].values())
    assert sum(said["allocated_breakdown"].values()) <= said["peak_allocated_bytes"] <= said["peak_reserved_bytes"]
    assert [*said["phases"]] == [*PHASES]
    for name in ("allocated", "reserved", "requested"):
        assert said[f"peak_{name}_bytes"] == max(said["phases"][p][f"{name}_bytes"] for p in PHASES)
    low, high = said["peak_device_bytes_range"]
    assert low < said["peak_device_bytes"] < high
    assert low - said["peak_reserved_bytes"] == said["device_overhead_bytes_range"][0]
    assert said["context_bytes_range"][0] < said["context_bytes_range"][1] < 1 << 30
    assert found.fits is True and found.needed_bytes == said["peak_device_bytes"]
    assert sum(segment.n_bytes for segment in found.segments) == said["peak_reserved_bytes"]


def test_of_a_gpu_that_is_nearly_full_the_run_itself_is_predicted() -> None:
    """It gives cached memory back once and goes on within the GPU."""
    roomy = predicted().predicted
    beside = roomy["peak_device_bytes"] - roomy["peak_reserved_bytes"]
    allocated, reserved = roomy["peak_allocated_bytes"], roomy["peak_reserved_bytes"]
    assert reserved - allocated > 64 * MIB
    tight = replace(H100, memory_bytes=beside + reserved - 32 * MIB)
    found = predicted(gpu=tight)
    assert found.fits is True and found.predicted["allocator"]["verdict"] == "fits"
    assert found.predicted["peak_reserved_bytes"] <= reserved - 32 * MIB
    assert found.predicted["peak_device_bytes"] == found.needed_bytes <= tight.memory_bytes
    assert sum(segment.n_bytes for segment in found.segments) <= found.predicted["peak_reserved_bytes"]
    hopeless = predicted(gpu=replace(H100, memory_bytes=beside + allocated - 64 * MIB))
    assert hopeless.fits is False and hopeless.predicted["peak_reserved_bytes"] == reserved


def test_a_stand_in_has_no_nccl_and_real_ranks_have() -> None:
    alone, eight = (predicted(rung).predicted["device_overhead_bytes_range"] for rung in ("stand-in", "measure"))
    assert alone == predicted("measure", gpus=1, strategy="ddp").predicted["device_overhead_bytes_range"]
    assert alone[0] < eight[0] and alone[1] + (1 << 28) < eight[1]


def test_sdpa_is_what_the_gpu_at_hand_makes_of_it(tmp_path: Path) -> None:
    """A flash kernel from Ampere on, with its scratch and without masks, of a model that is recorded here and now too."""
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
    assert on_h100["allocated_breakdown"]["cublas_workspaces"] > on_v100["allocated_breakdown"]["cublas_workspaces"]
    assert "phases" not in on_cpu


def test_a_catalogued_model_recorded_anew_runs_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where other versions are installed than the catalog was recorded with. T5 always hands sdpa a mask."""
    job = {"model": "google-t5/t5-small", "seq_len": 256, "precision": "bf16"}
    shipped = predicted(**job).predicted
    monkeypatch.setattr(cache, "installed_versions", lambda: {"torch": "99", "transformers": "99"})
    recorded = predicted(**job).predicted
    assert recorded["peak_requested_bytes"] == shipped["peak_requested_bytes"]


def test_the_gpu_at_hand_runs_with_the_memory_of_the_one_asked_for() -> None:
    small = predicted(model=JOB["model"]).predicted
    asked = predict(make_request({**JOB, "strategy": "zero3", "gpu": "8GiB"}), "stand-in", "cuda")
    assert asked.gpu_memory_bytes == 8 << 30 and asked.fits is False and asked.request["gpu"] == "8GiB"
    assert asked.predicted["peak_allocated_bytes"] == small["peak_allocated_bytes"]
    unasked = predicted()
    assert unasked.request["gpu"] == "H100-80GB" and unasked.gpu_memory_bytes == H100.memory_bytes


@pytest.mark.parametrize("name", CONF_VARIABLES)
def test_the_environments_allocator_settings_are_in_force(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = predicted(model="openai-community/gpt2", seq_len=1024)
    monkeypatch.setenv(name, "expandable_segments:True")
    changed = predicted(model="openai-community/gpt2", seq_len=1024)
    assert plain.request["allocator_conf"] is None and changed.request["allocator_conf"] == "expandable_segments:True"
    assert changed.predicted["peak_reserved_bytes"] != plain.predicted["peak_reserved_bytes"]
    assert all(segment.is_expandable for segment in changed.segments)
    asked = predicted(model="openai-community/gpt2", seq_len=1024, allocator_conf="max_split_size_mb:64")
    assert asked.request["allocator_conf"] == "max_split_size_mb:64"  # the request's own come first
    assert predicted("simulate", "cpu", model="openai-community/gpt2", seq_len=1024).request["allocator_conf"] is None


def test_settings_that_pytorch_does_not_have_are_refused_with_a_hint() -> None:
    with pytest.raises(UsageError) as caught:
        machine.set_allocator("expandable_segment:True")
    assert "expandable_segments" in caught.value.hint


def test_a_prediction_survives_json() -> None:
    found = predicted(model="openai-community/gpt2", seq_len=1024)
    assert Prediction.from_dict(json.loads(json.dumps(found.as_dict()))) == found


# A run on a GPU that is made up


class FakeCuda:
    """The part of torch.cuda that figures are read from: 80 GiB, 300 MiB of other processes', a context of 500 MiB."""

    TOTAL, OTHERS, CONTEXT, LATER = 80 << 30, 300 << 20, 500 << 20, 100 << 20

    def __init__(self, snapshot: list[dict[str, Any]], reserved: int, nvml: bool = True) -> None:
        self.snapshot, self.steady, self.nvml = snapshot, reserved, nvml
        self.reserved, self.beside = 0, 0

    def device_memory_used(self, index: int) -> int:
        if not self.nvml:
            raise ModuleNotFoundError("pynvml")
        return self.OTHERS + self.beside + self.reserved

    def zeros(self, *_: Any, **__: Any) -> None:
        self.beside, self.reserved = self.CONTEXT, 2 << 20

    def step(self) -> None:
        self.beside, self.reserved = self.CONTEXT + self.LATER, self.steady

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("device_memory_used",):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch, "zeros", self.zeros)
        monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda index=None: None)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index=None: self.reserved)
        used = lambda: self.OTHERS + self.beside + self.reserved  # noqa: E731  # asked anew each time
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index=None: (self.TOTAL - used(), self.TOTAL))
        monkeypatch.setattr(torch.cuda, "memory_stats", lambda index=None: {"num_alloc_retries": 1, "segment.all.current": 7})  # fmt: skip
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: self.snapshot)


def as_recorded(found: Prediction) -> list[dict[str, Any]]:
    """A snapshot as torch.cuda.memory_snapshot() would give it, of exactly what is predicted."""
    return [
        {
            "device": 0, "segment_type": "large" if s.is_large else "small", "is_expandable": s.is_expandable,
            "blocks": [{"size": n, "state": "active_allocated" if used else "inactive"} for n, used in s.blocks],
        }
        for s in found.segments
    ]  # fmt: skip


@pytest.mark.parametrize("nvml", [True, False])
def test_a_devices_figures(nvml: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    found = predicted(model="openai-community/gpt2", seq_len=1024)
    reserved = found.predicted["peak_reserved_bytes"]
    snapshot = as_recorded(found)
    snapshot.append({**snapshot[0], "device": 1})  # another GPU's
    cuda = FakeCuda(snapshot, reserved, nvml)
    cuda.install(monkeypatch)
    base = stand_in.baseline(0)
    others = cuda.OTHERS if nvml else 0
    assert (base.context_bytes, base.others_bytes) == (cuda.CONTEXT + cuda.OTHERS - others, others)
    cuda.step()
    reported = stand_in.allocator_figures(0, base, {"peak_reserved_bytes": reserved}, found.segments)
    assert reported["peak_device_bytes"] == reserved + cuda.CONTEXT + cuda.LATER + cuda.OTHERS - others
    assert (reported["allocator_retries"], reported["segments"], reported["device_memory_bytes"]) == (1, 7, cuda.TOTAL)
    kept = reported["snapshot"]
    assert kept["alike"] == kept["segments"] == kept["modelled_segments"] == len(found.segments) > 1
    assert kept["recorded_bytes"] == kept["modelled_bytes"] == reserved and kept["only_recorded"] == []
    snapshot[0]["blocks"][0]["size"] += 512
    reported = stand_in.allocator_figures(0, base, {"peak_reserved_bytes": reserved}, found.segments)
    assert reported["snapshot"]["alike"] == len(found.segments) - 1 and len(reported["snapshot"]["only_recorded"]) == 1
    assert "snapshot" not in stand_in.allocator_figures(0, base, {"peak_reserved_bytes": reserved}, None)


def test_a_workers_record_of_a_run_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's part in this process, with the run itself made up: 1 % above what is predicted."""
    monkeypatch.setattr(machine, "gpu_count", lambda: 1)
    monkeypatch.setattr(machine, "versions", lambda **_: {"torch": "2", "transformers": "5", "gpu": "NVIDIA H100"})
    monkeypatch.setattr(stand_in, "baseline", lambda index: stand_in.Baseline(500 << 20, 0))

    def run(source: Any, plan: Any, *, device: str, meter: Any, base: Any, segments: Any, **_: Any) -> dict[str, Any]:
        assert device == "cuda" and meter is None and base.context_bytes == 500 << 20
        snapshot = compare_snapshot(as_recorded(replace(predicted(), segments=segments)), segments)
        peaks = {"allocated_bytes": 1010, "reserved_bytes": 2020, "requested_bytes": 1000, "active_bytes": 1010}
        return {
            "peak_allocated_bytes": 1010, "peak_reserved_bytes": 2020, "peak_device_bytes": H100.memory_bytes + 1,
            "phases": dict.fromkeys(PHASES, peaks), "context_bytes": base.context_bytes, "snapshot": snapshot.as_dict(),
        }  # fmt: skip

    monkeypatch.setattr(stand_in, "stand_in", run)
    request = make_request({**JOB, "strategy": "zero3"})
    case = Case(request=request, rung="stand-in", device="cuda", timeout_seconds=60)
    reported: dict[str, Any] = {}
    worker.work(case, lambda name, value: reported.update({name: value}))
    record = worker.record_of(case, Ended(outcome="ok", reported=reported))
    said = record.predicted
    assert record.errors["peak_reserved_bytes"] == said["peak_reserved_bytes"] / 2020 - 1
    assert record.errors["phases.backward.allocated_bytes"] == said["phases"]["backward"]["allocated_bytes"] / 1010 - 1
    assert record.fits_predicted is True and record.fits_really is False  # a byte more than the GPU has
    assert record.detail["gpu_memory_bytes"] == H100.memory_bytes
    assert record.measured["snapshot"]["alike"] == record.measured["snapshot"]["segments"]
