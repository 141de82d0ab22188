"""The stand-in's logic on the CPU: real tensors, the fake process group, live bytes counted; and what happens to a case's process."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402  # after the check for torch

from fsdp_advisor.estimator import make_request  # noqa: E402
from fsdp_advisor.job.plan import Plan, plans  # noqa: E402
from fsdp_advisor.recording import TransformersSource  # noqa: E402
from fsdp_advisor.recording.modules import ModuleSource  # noqa: E402
from fsdp_advisor.validation import child_process, weights  # noqa: E402
from fsdp_advisor.validation.case import Case  # noqa: E402
from fsdp_advisor.validation.failures import NotHere  # noqa: E402
from fsdp_advisor.validation.meter import StorageMeter  # noqa: E402
from fsdp_advisor.validation.predict import predict  # noqa: E402
from fsdp_advisor.validation.simulate import simulate  # noqa: E402
from fsdp_advisor.validation.stand_in import stand_in  # noqa: E402
from fsdp_advisor.validation.worker import run  # noqa: E402

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
JOB: dict[str, Any] = {"micro_batch_size": 2, "seq_len": 64, "attention": "eager"}
"""Eager attention, for transformers builds the mask that sdpa takes under fake tensors only."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def plan_of(**options: Any) -> Plan:
    (plan,) = plans(make_request({"model": "tiny", **JOB, **options}), seq_len=JOB["seq_len"])
    return plan


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "zero3", "gpus": 4},
        {"strategy": "zero3", "gpus": 1},
        {"strategy": "zero3", "gpus": 4, "backend": "fsdp1"},
        {"strategy": "hsdp", "gpus": 8, "nnodes": 2},
        {"strategy": "zero2", "gpus": 3, "precision": "bf16", "gradient_accumulation_steps": 2},
        {"strategy": "ddp", "gpus": 64, "precision": "fp32"},
        {"strategy": "zero3", "gpus": 4, "precision": "fp16-mixed", "activation_checkpointing": "full"},
    ],
    ids=str,
)
def test_real_tensors_take_what_is_predicted(model: str, options: dict[str, Any]) -> None:
    prediction = predict(make_request({"model": model, **JOB, **options}))
    found = stand_in(prediction.source(), prediction.plan, device="cpu", meter=StorageMeter())
    assert found["phase_peaks"] == prediction.predicted["phase_peaks"]
    assert found["peak_tensor_bytes"] == prediction.predicted["peak_tensor_bytes"]
    assert ("step_seconds" in found) == (options["gpus"] == 1)


@pytest.mark.parametrize("backend", ["fsdp2", "fsdp1"])
def test_no_more_than_one_unit_is_ever_whole_while_weights_are_made(backend: str) -> None:
    """The largest unit, whole and once more while it is sharded, beside the shards of all: far less than the model."""
    from fsdp_advisor.validation.engines import fake_process_group
    from fsdp_advisor.validation.real import assemble, mesh_for

    source = TransformersSource({**CONFIG, "num_hidden_layers": 16, "vocab_size": 64}, name="deep")
    plan = plan_of(strategy="zero3", gpus=8, backend=backend)
    meter = StorageMeter()
    with fake_process_group(8):
        mesh = mesh_for(plan, "cpu", meter)
        with meter:
            trainer = assemble(source, plan, "cpu", mesh, rung="stand-in")
    whole = sum(p.numel() * p.element_size() for p in source.build(torch.float32).parameters())
    layer = whole // 16
    assert meter.high < whole // 8 + 3 * layer
    assert trainer is not None


def test_ties_are_kept_on_the_meta_device_and_off_it() -> None:
    source = TransformersSource(CONFIG, name="tied")
    model: Any = source.build(torch.float32)
    weights.Materialiser("cpu").whole(model)
    assert model.lm_head.weight is model.model.embed_tokens.weight and not model.lm_head.weight.is_meta
    model = source.build(torch.float32)
    weights.shards(model, "cpu")
    assert model.lm_head.weight is model.model.embed_tokens.weight and not model.lm_head.weight.is_meta
    assert float(model.lm_head.weight.detach().std()) == pytest.approx(weights.STANDARD_DEVIATION, rel=0.1)


def test_simulation_tells_whose_the_bytes_at_the_peak_are(model: str) -> None:
    for options in (
        {"strategy": "zero3", "gpus": 4},
        {"strategy": "ddp", "gpus": 2},
        {"strategy": "hsdp", "gpus": 8, "nnodes": 2},
    ):
        prediction = predict(make_request({"model": model, **JOB, **options, "gradient_accumulation_steps": 2}))
        found = simulate(prediction.source(), prediction.plan)
        expected = prediction.predicted["at_peak"]
        assert found.phase_peaks == prediction.predicted["phase_peaks"]
        assert sum(found.at_peak.values()) == found.peak_tensor_bytes
        assert found.at_peak["parameters"] == expected["parameters"]
        assert found.at_peak["optimizer"] == expected["optimizer"]
        assert found.at_peak["gradients"] == expected["gradients"] > 0


def test_ranks_wait_between_the_warm_up_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """For NCCL's watchdog, which holds the tensors of the first step's collectives for a while."""
    from fsdp_advisor.validation import real

    done: list[object] = []
    monkeypatch.setattr(real.time, "sleep", done.append)

    class Counts:
        def forward(self) -> Any:
            return torch.zeros(())

        def backward(self, loss: Any) -> None: ...

        def step(self) -> None:
            done.append("step")

        def zero_grad(self) -> None: ...

    real.steady_step(Counts(), StorageMeter(), 1, steady=2, pause_seconds=real.WATCHDOG_SECONDS)
    assert done == ["step", real.WATCHDOG_SECONDS, "step", "step", "step"]


def test_any_module_can_be_simulated_and_stood_in_for() -> None:
    source = ModuleSource(
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(3))),
        lambda b, t: {"x": torch.zeros(b, 32)},
        lambda module, batch: module(batch["x"]).square().mean(),
        ("0", "1", "2"),
        "mlp",
    )
    plan = plan_of(strategy="zero3", gpus=4)
    simulated = simulate(source, plan)
    stood_in = stand_in(source, plan, device="cpu", meter=StorageMeter())
    assert stood_in["phase_peaks"] == simulated.phase_peaks


def test_what_cannot_be_told_apart_is_refused() -> None:
    source = TransformersSource(CONFIG, name="tiny")
    offloaded = plan_of(strategy="zero3", gpus=4, offload="parameters")
    for refused in (
        lambda: simulate(source, offloaded),
        lambda: simulate(source, plan_of(strategy="zero1", gpus=4)),
        lambda: simulate(source, plan_of(strategy="zero3", gpus=4, optim="adafactor")),
        lambda: stand_in(source, offloaded, device="cpu", meter=StorageMeter()),
        lambda: stand_in(source, plan_of(strategy="zero1", gpus=4), device="cpu", meter=StorageMeter()),
        lambda: stand_in(
            source, plan_of(strategy="zero3", gpus=4), device="cpu", meter=StorageMeter(), snapshot=Path("x")
        ),
    ):
        with pytest.raises(NotHere) as caught:
            refused()
        assert caught.value.exit_status == 2 and caught.value.hint


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so nothing is to refuse")
def test_without_a_gpu_a_stand_in_says_so(model: str) -> None:
    request = make_request({"model": model, **JOB, "strategy": "zero3", "gpus": 4})
    record, ended = run(Case(request=request, rung="stand-in", device="cuda", timeout_seconds=60))
    assert record.outcome == "error" and "no GPU" in record.message and ended.exit_status == 2


def test_a_simulation_keeps_no_memory_history(model: str, tmp_path: Path) -> None:
    request = make_request({"model": model, **JOB, "strategy": "zero3", "gpus": 4})
    record, ended = run(
        Case(request=request, rung="simulate", device="cpu", timeout_seconds=60, snapshot=tmp_path / "x")
    )
    assert record.outcome == "error" and "memory history" in record.message and ended.exit_status == 2


def test_a_case_in_a_process_of_its_own_becomes_a_record(model: str) -> None:
    request = make_request({"model": model, **JOB, "strategy": "zero3", "gpus": 4, "gpu": "24GiB"})
    for rung in ("simulate", "stand-in"):
        record, _ = run(Case(request=request, rung=rung, device="cpu", timeout_seconds=120))  # type: ignore[arg-type]
        assert record.outcome == "ok", record
        assert record.errors["peak_tensor_bytes"] == 0 and record.errors["phase_peaks.backward"] == 0
        assert record.fits_predicted is True and record.fits_really is True
        assert record.request["backend"] == "fsdp2" and {"torch", "transformers"} <= set(record.versions)


# What happens to processes


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_crash_ends_the_case_alone_and_what_it_had_started() -> None:
    def crash(tell: child_process.Tell) -> None:
        child = os.fork()
        if child == 0:
            time.sleep(600)
        tell("child", child)
        os.kill(os.getpid(), signal.SIGKILL)

    ended = child_process.forked(crash, timeout_seconds=30)
    assert ended.outcome == "crash" and "SIGKILL" in ended.message
    time.sleep(0.1)
    assert not alive(ended.reported["child"])


def test_what_was_told_outlives_a_crash() -> None:
    ended = child_process.forked(
        lambda tell: (tell("seen", 1), os.kill(os.getpid(), signal.SIGKILL)), timeout_seconds=30
    )  # type: ignore[func-returns-value]
    assert ended.outcome == "crash" and "SIGKILL" in ended.message and ended.reported == {"seen": 1}


def test_a_hang_is_ended_with_all_that_it_started() -> None:
    def hang(tell: child_process.Tell) -> None:
        child = os.fork()
        if child == 0:
            os.setsid()
            time.sleep(600)
        tell("pids", [os.getpid(), child])
        time.sleep(600)

    ended = child_process.forked(hang, timeout_seconds=1)
    assert ended.outcome == "timeout" and ended.seconds < 10
    assert not any(alive(pid) for pid in ended.reported["pids"])


def test_out_of_memory_carries_what_was_asked_and_what_was_free() -> None:
    def out_of_memory(tell: child_process.Tell) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.50 GiB is free."
        )

    ended = child_process.forked(out_of_memory, timeout_seconds=30)
    assert ended.outcome == "oom"
    assert ended.detail["asked_bytes"] == 2 * 2**30 and ended.detail["free_bytes"] == 3 * 2**29

    def on_the_host(tell: child_process.Tell) -> None:
        torch.empty(2**60, dtype=torch.uint8)

    ended = child_process.forked(on_the_host, timeout_seconds=30)
    assert ended.outcome == "oom" and ended.detail["asked_bytes"] == 2**60


def test_an_error_is_told_with_its_traceback_and_a_refusal_with_its_hint() -> None:
    ended = child_process.forked(lambda tell: 1 / 0, timeout_seconds=30)  # type: ignore[arg-type, return-value]
    assert ended.outcome == "error" and "ZeroDivisionError" in ended.message and "1 / 0" in ended.detail["traceback"]

    def refuse(tell: child_process.Tell) -> None:
        raise NotHere("no", hint="yes")

    ended = child_process.forked(refuse, timeout_seconds=30)
    assert (ended.message, ended.hint, ended.exit_status) == ("no", "yes", 2)


def test_an_interrupt_ends_the_case_and_is_recorded() -> None:
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    pids: list[int] = []

    def sleep(tell: child_process.Tell) -> None:
        tell("pid", os.getpid())
        time.sleep(600)

    ended = child_process.forked(sleep, timeout_seconds=60)
    pids.append(ended.reported["pid"])
    assert ended.outcome == "interrupted" and not any(alive(pid) for pid in pids)


def test_a_case_starts_at_once() -> None:
    child_process.warm_up()
    began = time.monotonic()
    assert child_process.forked(lambda tell: None, timeout_seconds=30).outcome == "ok"
    assert time.monotonic() - began < 1
