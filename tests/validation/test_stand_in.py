"""The stand-in on the CPU: real tensors and the fake process group; live bytes are counted. And child processes."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, of_today
from tiny_model import CONFIG, JOB

torch = pytest.importorskip("torch")

from torch import nn  # after the check for torch

from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.recording import TransformersSource
from fsdp_advisor.recording.modules import ModuleSource
from fsdp_advisor.validation import child_process, weights
from fsdp_advisor.validation.case import Case
from fsdp_advisor.validation.engines import fake_process_group
from fsdp_advisor.validation.failures import ModeUnavailable
from fsdp_advisor.validation.meter import StorageMeter
from fsdp_advisor.validation.predict import predict
from fsdp_advisor.validation.process_tree import is_alive
from fsdp_advisor.validation.real import RealRun, assemble, mesh_for
from fsdp_advisor.validation.simulate import simulate
from fsdp_advisor.validation.stand_in import stand_in
from fsdp_advisor.validation.worker import run

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def plan_of(**options: Any) -> Plan:
    (plan,) = plans(make_request({"model": "tiny", **JOB, **options}), seq_len=JOB["seq_len"])
    return plan


@pytest.mark.parametrize(
    "options",
    of_today(
        [
            {"strategy": "zero3", "gpus": 4},
            {"strategy": "zero3", "gpus": 1},
            {"strategy": "zero3", "gpus": 4, "backend": "fsdp1"},
            {"strategy": "hsdp", "gpus": 8, "nnodes": 2},
            {"strategy": "zero2", "gpus": 3, "precision": "bf16", "gradient_accumulation_steps": 2},
            {"strategy": "ddp", "gpus": 64, "precision": "fp32"},
            {"strategy": "zero3", "gpus": 4, "precision": "fp16-mixed", "activation_checkpointing": "full"},
        ],
        4,
    ),
    ids=str,
)
def test_real_tensors_need_what_is_predicted(model: str, options: dict[str, Any]) -> None:
    prediction = predict(make_request({"model": model, **JOB, **options}))
    found = stand_in(prediction.source(), prediction.plan, device="cpu")
    assert found["phase_peaks"] == prediction.predicted["phase_peaks"]
    assert found["peak_tensor_bytes"] == prediction.predicted["peak_tensor_bytes"]
    assert ("step_seconds" in found) == (options["gpus"] == 1)


def test_real_experts_run_the_implementation_of_the_plan() -> None:
    source = TransformersSource({**CONFIG, "model_type": "mixtral", "num_local_experts": 2}, name="mixture")
    plan = plan_of(strategy="ddp", gpus=1, experts_implementation="eager")
    with fake_process_group(1):
        trainer: Any = assemble(RealRun(source=source, plan=plan, mode="stand-in", device="cpu"), None)
    assert trainer.model.config._experts_implementation == "eager"


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp1"])
def test_sharded_weights_are_made_one_unit_at_a_time(backend: str) -> None:
    """The peak is the shards of all units and two copies of the largest unit, far less than the model."""
    source = TransformersSource({**CONFIG, "num_hidden_layers": 16, "vocab_size": 64}, name="deep")
    plan = plan_of(strategy="zero3", gpus=8, backend=backend)
    meter = StorageMeter()
    with fake_process_group(8):
        mesh = mesh_for(plan, "cpu", meter)
        with meter:
            trainer = assemble(RealRun(source=source, plan=plan, mode="stand-in", device="cpu"), mesh)
    whole = sum(p.numel() * p.element_size() for p in source.build(torch.float32).parameters())
    layer = whole // 16
    assert meter.high < whole // 8 + 3 * layer
    del trainer


def test_tied_weights_stay_tied_when_they_are_made() -> None:
    source = TransformersSource(CONFIG, name="tied")
    model: Any = source.build(torch.float32)
    weights.Materialiser("cpu").model(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight and not model.lm_head.weight.is_meta
    model = source.build(torch.float32)
    weights.materialise_shards(model, "cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight and not model.lm_head.weight.is_meta
    assert float(model.lm_head.weight.detach().std()) == pytest.approx(weights.STANDARD_DEVIATION, rel=0.1)


@in_turn(1, of=2)
@pytest.mark.parametrize(
    "options",
    of_today(
        [
            {"strategy": "zero3", "gpus": 4},
            {"strategy": "ddp", "gpus": 2},
            {"strategy": "hsdp", "gpus": 8, "nnodes": 2},
        ],
        3,
    ),
    ids=str,
)
def test_simulated_bytes_at_the_peak_are_split_by_account(model: str, options: dict[str, Any]) -> None:
    prediction = predict(make_request({"model": model, **JOB, **options, "gradient_accumulation_steps": 2}))
    found = simulate(prediction.source(), prediction.plan)
    expected = prediction.predicted["at_peak"]
    assert found.phase_peaks == prediction.predicted["phase_peaks"]
    assert sum(found.at_peak.values()) == found.peak_tensor_bytes
    assert found.at_peak["parameters"] == expected["parameters"]
    assert found.at_peak["optimizer"] == expected["optimizer"]
    assert found.at_peak["gradients"] == expected["gradients"] > 0


def test_steady_step_pauses_after_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's watchdog keeps the tensors of the first step's collectives for a while."""
    from fsdp_advisor.validation import real

    done: list[object] = []
    monkeypatch.setattr(real.time, "sleep", done.append)

    class CountingTrainer:
        def forward(self) -> Any:
            return torch.zeros(())

        def backward(self, loss: Any) -> None: ...

        def step(self) -> None:
            done.append("step")

        def zero_grad(self) -> None: ...

    sampling = real.Sampling(counted_steps=2, pause_seconds=real.WATCHDOG_SECONDS)
    real.steady_step(CountingTrainer(), StorageMeter(), 1, sampling)
    assert done == ["step", real.WATCHDOG_SECONDS, "step", "step", "step"]


@in_turn(1, of=2)
def test_any_module_can_be_simulated_and_stood_in() -> None:
    source = ModuleSource(
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(3))),
        lambda b, t: {"x": torch.zeros(b, 32)},
        lambda module, batch: module(batch["x"]).square().mean(),
        ("0", "1", "2"),
        "mlp",
    )
    plan = plan_of(strategy="zero3", gpus=4)
    simulated = simulate(source, plan)
    stood_in = stand_in(source, plan, device="cpu")
    assert stood_in["phase_peaks"] == simulated.phase_peaks


def test_unsupported_plans_are_refused_with_a_hint() -> None:
    source = TransformersSource(CONFIG, name="tiny")
    offloaded = plan_of(strategy="zero3", gpus=4, offload="parameters")
    for refused in (
        lambda: simulate(source, offloaded),
        lambda: simulate(source, plan_of(strategy="zero1", gpus=4)),
        lambda: simulate(source, plan_of(strategy="zero3", gpus=4, optim="adafactor")),
        lambda: stand_in(source, offloaded, device="cpu"),
        lambda: stand_in(source, plan_of(strategy="zero1", gpus=4), device="cpu"),
        lambda: stand_in(source, plan_of(strategy="zero3", gpus=4), device="cpu", snapshot=Path("x")),
    ):
        with pytest.raises(ModeUnavailable) as caught:
            refused()
        assert caught.value.exit_status == 2 and caught.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_stand_in_without_a_gpu_is_refused(model: str) -> None:
    request = make_request({"model": model, **JOB, "strategy": "zero3", "gpus": 4})
    record, ended = run(Case(request=request, mode="stand-in", device="cuda", timeout_seconds=300))
    assert record.outcome == "error" and "no GPU" in record.message and ended.exit_status == 2


def test_simulation_has_no_memory_history(model: str, tmp_path: Path) -> None:
    request = make_request({"model": model, **JOB, "strategy": "zero3", "gpus": 4})
    record, ended = run(
        Case(request=request, mode="simulate", device="cpu", timeout_seconds=300, snapshot=tmp_path / "x")
    )
    assert record.outcome == "error" and "memory history" in record.message and ended.exit_status == 2


@in_turn(0, of=3)
def test_case_in_a_child_process_becomes_a_record(model: str) -> None:
    request = make_request({"model": model, **JOB, "strategy": "zero3", "gpus": 4, "gpu": "24GiB"})
    for mode in ("simulate", "stand-in"):
        record, _ = run(Case(request=request, mode=mode, device="cpu", timeout_seconds=300))  # type: ignore[arg-type]
        assert record.outcome == "ok", record
        assert record.errors["peak_tensor_bytes"] == 0 and record.errors["phase_peaks.backward"] == 0
        assert record.fits_predicted is True and record.fits_really is True
        assert record.request["backend"] == "fsdp2" and {"torch", "transformers"} <= set(record.versions)


# Child processes


def wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + 300
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still alive"
        time.sleep(0.05)


def test_crash_of_a_child_ends_its_own_children() -> None:
    def crash(send: child_process.Send) -> None:
        child = os.fork()
        if child == 0:
            time.sleep(600)
        send("child", child)
        os.kill(os.getpid(), signal.SIGKILL)

    ended = child_process.run_in_child(crash, timeout_seconds=300)
    assert ended.outcome == "crash" and "SIGKILL" in ended.message
    wait_for_end(ended.reported["child"])


def test_sent_values_survive_a_crash() -> None:
    ended = child_process.run_in_child(
        lambda send: (send("seen", 1), os.kill(os.getpid(), signal.SIGKILL)), timeout_seconds=300
    )  # type: ignore[func-returns-value]
    assert ended.outcome == "crash" and "SIGKILL" in ended.message and ended.reported == {"seen": 1}


@in_turn(2, of=3)
def test_timeout_ends_a_child_and_its_descendants() -> None:
    def hang(send: child_process.Send) -> None:
        child = os.fork()
        if child == 0:
            os.setsid()
            time.sleep(600)
        send("pids", [os.getpid(), child])
        time.sleep(600)

    ended = child_process.run_in_child(hang, timeout_seconds=5)
    assert ended.outcome == "timeout" and ended.seconds < 120
    assert not any(is_alive(pid) for pid in ended.reported["pids"])


def test_out_of_memory_has_its_sizes() -> None:
    def out_of_memory(send: child_process.Send) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.50 GiB is free."
        )

    ended = child_process.run_in_child(out_of_memory, timeout_seconds=300)
    assert ended.outcome == "oom"
    assert ended.detail["asked_bytes"] == 2 * 2**30 and ended.detail["free_bytes"] == 3 * 2**29

    def on_the_host(send: child_process.Send) -> None:
        torch.empty(2**60, dtype=torch.uint8)

    ended = child_process.run_in_child(on_the_host, timeout_seconds=300)
    assert ended.outcome == "oom" and ended.detail["asked_bytes"] == 2**60


def test_errors_have_a_traceback_and_refusals_a_hint() -> None:
    ended = child_process.run_in_child(lambda send: 1 / 0, timeout_seconds=300)  # type: ignore[arg-type, return-value]
    assert ended.outcome == "error" and "ZeroDivisionError" in ended.message and "1 / 0" in ended.detail["traceback"]

    def refuse(send: child_process.Send) -> None:
        raise ModeUnavailable("no", hint="yes")

    ended = child_process.run_in_child(refuse, timeout_seconds=300)
    assert (ended.message, ended.hint, ended.exit_status) == ("no", "yes", 2)


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_ends_the_child(tmp_path: Path) -> None:
    def interrupt_parent(send: child_process.Send) -> None:
        (tmp_path / "pid").write_text(str(os.getpid()))
        os.kill(os.getppid(), signal.SIGINT)
        time.sleep(600)

    ended = child_process.run_in_child(interrupt_parent, timeout_seconds=300)
    assert ended.outcome == "interrupted" and not is_alive(int((tmp_path / "pid").read_text()))


def test_preloaded_modules_are_not_imported_again_in_a_child() -> None:
    child_process.preload()
    ended = child_process.run_in_child(
        lambda send: send("loaded", "transformers.modeling_utils" in sys.modules), timeout_seconds=300
    )
    assert ended.outcome == "ok" and ended.reported == {"loaded": True}
