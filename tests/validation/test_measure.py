"""Real ranks over gloo: what they measure is what is predicted, and a rank that dies takes the others along."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from fsdp_advisor.errors import UsageError  # noqa: E402  # after the check for torch
from fsdp_advisor.estimator import make_request  # noqa: E402
from fsdp_advisor.program.storages import round_up  # noqa: E402
from fsdp_advisor.validation import measure, started  # noqa: E402
from fsdp_advisor.validation.case import Case  # noqa: E402
from fsdp_advisor.validation.failures import NotHere  # noqa: E402
from fsdp_advisor.validation.predict import predict  # noqa: E402
from fsdp_advisor.validation.rank import combined  # noqa: E402
from fsdp_advisor.validation.sbatch import sbatch_example  # noqa: E402
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


WIDE = {**CONFIG, "vocab_size": 8000, "tie_word_embeddings": False}
"""The peak of short sequences is where the root's gradients are reduced and scattered."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


def case(
    model: str, timeout_seconds: float = 120, device: str = "cpu", zero1: str = "deepspeed", **options: Any
) -> Case:
    request = make_request({"model": model, **JOB, **options})
    return Case(request=request, rung="measure", device=device, timeout_seconds=timeout_seconds, zero1=zero1)  # type: ignore[arg-type]


def test_four_ranks_measure_what_is_predicted(model: str) -> None:
    record, _ = run(case(model, strategy="hsdp", gpus=4, nnodes=2))
    assert record.outcome == "ok", record
    assert record.measured["phase_peaks"] == record.predicted["phase_peaks"]
    assert len(record.measured["by_rank"]["peak_tensor_bytes"]) == 4
    assert record.measured["spread"]["peak_tensor_bytes"] == 0
    assert record.measured["step_seconds"] > 0 and record.fits_really is True


EXACT = [
    {"strategy": "zero3", "gpus": 2},
    {"strategy": "zero3", "gpus": 2, "backend": "fsdp1"},
    {"strategy": "zero2", "gpus": 2, "precision": "bf16", "gradient_accumulation_steps": 2},
    {"strategy": "ddp", "gpus": 2, "precision": "fp32"},
    {"strategy": "ddp", "gpus": 2, "activation_checkpointing": "full"},
]
NOT_PREDICTED = {"strategy": "zero1", "gpus": 2}
RANK = """
import json, os, sys
from pathlib import Path
from fsdp_advisor.validation.predict import Prediction
from fsdp_advisor.validation.rank import end_group, measure, with_group
with_group("cpu")
found = [measure(Prediction.from_dict(p), "cpu", zero1="torch") for p in json.loads(Path(sys.argv[1]).read_text())]
if os.environ["RANK"] == "0":
    Path(sys.argv[2]).write_text(json.dumps(found))
end_group()
"""


def test_two_ranks_measure_what_is_predicted_under_every_engine_of_pytorch(model: str, tmp_path: Path) -> None:
    predictions = [predict(make_request({"model": model, **JOB, **options})) for options in (*EXACT, NOT_PREDICTED)]
    (tmp_path / "wide.json").write_text(json.dumps(WIDE))
    wide = {**JOB, "model": str(tmp_path / "wide.json"), "seq_len": 8, "strategy": "zero3", "gpus": 2}
    predictions.append(predict(make_request(wide)))
    script, jobs, out = (tmp_path / name for name in ("rank.py", "jobs.json", "out.json"))
    script.write_text(RANK)
    jobs.write_text(json.dumps([p.as_dict() for p in predictions]))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, jobs, out],
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [reported["measured"] for reported in json.loads(out.read_text())]
    *exact, zero1, by_root = found
    for options, prediction, measured in zip(EXACT, predictions, exact, strict=False):
        assert measured["phase_peaks"] == prediction.predicted["phase_peaks"], options
        assert ("gloo_bytes" in measured) == (options["strategy"] != "ddp")
    assert by_root["phase_peaks"] == predictions[-1].predicted["phase_peaks"]
    assert by_root["gloo_bytes"] == round_up(
        4 * (2 * 8000 * 64 + 64)
    )  # the root's gradients in fp32, which gloo copies
    ddp, zero1 = exact[-1]["phase_peaks"]["optimizer"], zero1["phase_peaks"]["optimizer"]
    parameters = sum(p.numel() for p in predictions[0].source().build(torch.float32).parameters())
    assert ddp - zero1 == pytest.approx(parameters * 8 / 2, rel=0.35)  # each state is on one of the two ranks, whole


def test_deepspeed_measures_itself(model: str) -> None:
    """DeepSpeed's first engine on the CPU, within what its buckets (a gigabyte for a small model) leave of the error."""
    pytest.importorskip("deepspeed")
    record, _ = run(case(model, strategy="zero2", backend="deepspeed", gpus=2))
    assert record.outcome == "ok", record
    assert abs(record.errors["peak_tensor_bytes"]) < 0.005 and "deepspeed" in record.versions


# Trouble

DYING = """
import os, signal, time
if os.environ["RANK"] == "1":
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
open(os.path.join(os.environ["FOLDER"], "pid"), "w").write(str(os.getpid()))
time.sleep(600)
"""


def launch_script(tmp_path: Path, source: str) -> list[str]:
    script = tmp_path / "rank.py"
    script.write_text(source)
    arguments = ["--standalone", "--nproc-per-node=2", "--monitor-interval=0.1", "--redirects=3"]
    return [sys.executable, "-m", "torch.distributed.run", *arguments, f"--log-dir={tmp_path / 'ranks'}", str(script)]


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_rank_that_dies_ends_the_others_and_names_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    ended = measure._watch(tmp_path, launch_script(tmp_path, DYING), 120)
    assert ended.outcome == "crash" and ended.exit_status == 3
    assert "rank 1 was killed by SIGKILL" in ended.message
    assert "\n" not in ended.message and not alive(int((tmp_path / "pid").read_text()))


def test_an_interrupt_leaves_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    source = DYING.replace('os.environ["RANK"] == "1"', "False")

    def interrupt() -> None:
        for _ in range(600):
            if (tmp_path / "pid").exists():
                os.kill(os.getpid(), signal.SIGINT)
                return
            time.sleep(0.1)

    threading.Thread(target=interrupt, daemon=True).start()
    ended = measure._watch(tmp_path, launch_script(tmp_path, source), 120)
    assert ended.outcome == "interrupted"
    time.sleep(0.2)
    assert not alive(int((tmp_path / "pid").read_text()))


def test_a_taken_port_is_one_clear_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        arguments = launch_script(tmp_path, "")
        at = arguments.index("--standalone")
        arguments[at : at + 1] = ["--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={taken.getsockname()[1]}"]
        ended = measure._watch(tmp_path, arguments, 60)
    assert ended.outcome == "error" and ended.exit_status == 3
    assert "port is taken" in ended.message and "--rdzv-endpoint" in ended.hint


def test_a_place_where_nobody_meets_is_named(model: str) -> None:
    """Something else answers at the port, so that no rank is ever started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = measure.launch_ranks(
            replace(case(model, timeout_seconds=12, strategy="zero3", gpus=2), rdzv_endpoint=endpoint)
        )
    assert ended.outcome == "error" and endpoint in ended.message and "every node" in ended.hint
    assert Path(ended.detail["log"]).is_dir()


def test_a_rank_s_own_error_is_told(tmp_path: Path) -> None:
    late = {"outcome": "error", "message": "timed out", "detail": {}, "rank": 0, "time": 2.0}
    first = {"outcome": "oom", "message": "CUDA out of memory.", "detail": {"asked_bytes": 1}, "rank": 3, "time": 1.0}
    for failure in (late, first):
        (tmp_path / f"failure-{failure['rank']}.json").write_text(json.dumps(failure))
    ended = measure.ended_with(tmp_path, 1, "")
    assert (ended.outcome, ended.message, ended.detail) == ("oom", "rank 3: CUDA out of memory.", {"asked_bytes": 1})


# Asking for what is not there, and being started by others


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, so nothing is to refuse")
def test_without_gpus_a_measurement_is_refused(model: str) -> None:
    with pytest.raises(NotHere, match="no GPU") as caught:
        run(case(model, device="cuda", strategy="zero3", gpus=2))
    assert caught.value.exit_status == 2


def test_too_few_gpus_offer_a_stand_in_and_nodes_a_meeting_place(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.machine, "gpu_count", lambda: 2)
    with pytest.raises(NotHere) as caught:
        measure.check(case(model, device="cuda", strategy="zero3", gpus=8))
    assert "stand-in" in caught.value.hint and "8" in caught.value.message and "2" in caught.value.message
    with pytest.raises(NotHere) as alone:
        measure.check(case(model, device="cuda", strategy="zero1", backend="deepspeed", gpus=8))
    assert "stand-in" not in alone.value.hint and "--gpus 2" in alone.value.hint
    with pytest.raises(UsageError) as missing:
        measure.check(case(model, device="cuda", strategy="zero3", gpus=4, nnodes=2))
    assert "--rdzv-endpoint" in missing.value.hint


def test_started_by_torchrun_by_srun_or_by_hand() -> None:
    assert started.started_rank({}) is None
    assert started.started_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}) is None  # the batch script itself
    step = {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "1234567"}
    assert started.started_rank(step) == (9, 16)
    adopted = started.adopt_slurm({**step, "SLURM_STEP_NODELIST": "node7,node9"})
    assert adopted == {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "node7",
        "MASTER_PORT": "24567",
    }
    assert started.adopt_slurm({"RANK": "0"}) == {}


def test_the_sbatch_example_asks_for_what_the_request_says(model: str) -> None:
    request = make_request({"model": "Qwen/Qwen2.5-0.5B", "gpus": 16, "nnodes": 2, "strategy": "hsdp"})
    script = sbatch_example(request)
    assert "--nodes=2" in script and "--gpus-per-node=8" in script and "--nproc-per-node=8" in script
    assert "--model Qwen/Qwen2.5-0.5B --gpus 16 --nnodes 2 --strategy hsdp" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    flagged = make_request({"model": "gpt2", "strategy": "ddp", "reserved": True})
    script = sbatch_example(flagged, device="cpu", timeout=None, records=Path("out.jsonl"))
    assert "--strategy ddp --reserved --device cpu --records out.jsonl\n" in script and "gpus-per-node" not in script


def test_ranks_are_summed_up() -> None:
    ranks = [{"peak_tensor_bytes": n, "phase_peaks": {"forward": n}, "step_seconds": 1.0} for n in (5, 9, 3)]
    found = combined(ranks)
    assert found["peak_tensor_bytes"] == 5 and found["largest"] == {"peak_tensor_bytes": 9}
    assert found["spread"] == {"peak_tensor_bytes": 6} and found["by_rank"] == {"peak_tensor_bytes": [5, 9, 3]}
