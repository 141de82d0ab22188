"""Real ranks over gloo: they measure what is predicted, and a failing rank ends the others."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken, with_all_cases
from ranks import run_ranks
from tiny_model import CONFIG, JOB

torch = pytest.importorskip("torch")

from fsdp_advisor.errors import UsageError  # after the check for torch
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.program.storages import round_up
from fsdp_advisor.validation import external_launcher, measure
from fsdp_advisor.validation.case import Case
from fsdp_advisor.validation.failures import ModeUnavailable
from fsdp_advisor.validation.predict import predict
from fsdp_advisor.validation.process_tree import is_alive
from fsdp_advisor.validation.rank import combined
from fsdp_advisor.validation.sbatch import sbatch_example
from fsdp_advisor.validation.worker import run

pytestmark = pytest.mark.slow

WIDE = {**CONFIG, "vocab_size": 8000, "tie_word_embeddings": False}
"""With short sequences, its peak is at the reduce-scatter of the root's gradients."""


def case(model: str, timeout_seconds: float = 300, device: Any = "cpu", **options: Any) -> Case:
    request = make_request({"model": model, **JOB, **options})
    return Case(request=request, mode="measure", device=device, timeout_seconds=timeout_seconds)


EXACT: list[dict[str, Any]] = [
    *taken([], [{"strategy": "zero3", "gpus": 2}, {"strategy": "ddp", "gpus": 2, "precision": "fp32"}]),
    {"strategy": "zero3", "gpus": 2, "backend": "fsdp1"},
    {"strategy": "zero2", "gpus": 2, "precision": "bf16", "gradient_accumulation_steps": 2},
    {"strategy": "ddp", "gpus": 2, "activation_checkpointing": "full"},
]
NOT_PREDICTED = {"strategy": "zero1", "gpus": 2}
RANK = """
import json, os, sys
from pathlib import Path
from ranks import as_ranks
from fsdp_advisor.validation.predict import Prediction
from fsdp_advisor.validation.rank import RankSettings, join_group, leave_group, measure
import fsdp_advisor.validation.real  # what a rank imports when it measures

def main():
    join_group("cpu")
    settings = RankSettings(device="cpu", zero1="torch")
    found = [measure(Prediction.from_dict(p), settings) for p in json.loads(Path(sys.argv[1]).read_text())]
    if os.environ["RANK"] == "0":
        Path(sys.argv[2]).write_text(json.dumps(found))
    leave_group()

as_ranks(main)
"""


@in_turn(1, of=5)  # the next day test_nodes.py measures on two nodes
def test_two_ranks_measure_what_is_predicted_under_pytorchs_engines(model: str, tmp_path: Path) -> None:
    predictions = [predict(make_request({"model": model, **JOB, **options})) for options in (*EXACT, NOT_PREDICTED)]
    (tmp_path / "wide.json").write_text(json.dumps(WIDE))
    wide = {**JOB, "model": str(tmp_path / "wide.json"), "seq_len": 8, "strategy": "zero3", "gpus": 2}
    predictions.append(predict(make_request(wide)))
    script, jobs, out = (tmp_path / name for name in ("rank.py", "jobs.json", "out.json"))
    script.write_text(RANK)
    jobs.write_text(json.dumps([p.as_dict() for p in predictions]))
    run_ranks(script, str(jobs), str(out))
    *exact, zero1, by_root = json.loads(out.read_text())
    for options, prediction, measured in zip(EXACT, predictions, exact, strict=False):
        assert measured["phase_peaks"] == prediction.predicted["phase_peaks"], options
        assert ("gloo_bytes" in measured) == (options["strategy"] != "ddp")
    assert by_root["phase_peaks"] == predictions[-1].predicted["phase_peaks"]
    root_gradients = 4 * (2 * 8000 * 64 + 64)  # in fp32
    assert by_root["gloo_bytes"] == round_up(root_gradients)
    ddp, zero1 = exact[-1]["phase_peaks"]["optimizer"], zero1["phase_peaks"]["optimizer"]
    parameters = sum(p.numel() for p in predictions[0].source().build(torch.float32).parameters())
    # each parameter's whole state is on one of the two ranks
    assert ddp - zero1 == pytest.approx(parameters * 8 / 2, rel=0.35)


@with_all_cases
def test_deepspeed_peak_is_within_half_a_percent(model: str) -> None:
    """Its buckets need a gigabyte even for a tiny model, so the error is small."""
    pytest.importorskip("deepspeed")
    record, _ = run(case(model, strategy="zero2", backend="deepspeed", gpus=2))
    assert record.outcome == "ok", record
    assert abs(record.errors["peak_tensor_bytes"]) < 0.005 and "deepspeed" in record.versions


# Failures

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


@in_turn(1, of=3)
def test_killed_rank_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    ended = measure.run_launcher(tmp_path, launch_script(tmp_path, DYING), 300)
    assert ended.outcome == "crash" and ended.exit_status == 3
    assert "rank 1 was killed by SIGKILL" in ended.message
    assert "\n" not in ended.message and not is_alive(int((tmp_path / "pid").read_text()))


WAITING = """
import os, signal, time
if os.environ["RANK"] == "0":
    open(os.path.join(os.environ["FOLDER"], "pid"), "w").write(str(os.getpid()))
    os.kill(int(os.environ["TEST_PID"]), signal.SIGINT)
time.sleep(600)
"""


@pytest.mark.usefixtures("ctrl_c_raises")
def test_ctrl_c_ends_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", str(tmp_path))
    monkeypatch.setenv("TEST_PID", str(os.getpid()))
    ended = measure.run_launcher(tmp_path, launch_script(tmp_path, WAITING), 300)
    assert ended.outcome == "interrupted" and not is_alive(int((tmp_path / "pid").read_text()))


@in_turn(0, of=3)
def test_taken_port_is_reported_with_a_hint(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        arguments = launch_script(tmp_path, "")
        at = arguments.index("--standalone")
        arguments[at : at + 1] = ["--nnodes=1", "--master-addr=127.0.0.1", f"--master-port={taken.getsockname()[1]}"]
        ended = measure.run_launcher(tmp_path, arguments, 300)
    assert ended.outcome == "error" and ended.exit_status == 3
    assert "already in use" in ended.message and "--rdzv-endpoint" in ended.hint


@with_all_cases
def test_rendezvous_with_a_foreign_server_is_reported(model: str) -> None:
    """Another program answers at the port, so no rank is ever started."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        endpoint = f"127.0.0.1:{taken.getsockname()[1]}"
        ended = measure.run_on_ranks(
            replace(case(model, timeout_seconds=25, strategy="zero3", gpus=2), rdzv_endpoint=endpoint)
        )
    assert ended.outcome == "error" and endpoint in ended.message and "every node" in ended.hint
    assert Path(ended.detail["log"]).is_dir()


def test_first_failure_of_any_rank_is_the_result(tmp_path: Path) -> None:
    late = {"outcome": "error", "message": "timed out", "detail": {}, "rank": 0, "time": 2.0}
    first = {"outcome": "oom", "message": "CUDA out of memory.", "detail": {"asked_bytes": 1}, "rank": 3, "time": 1.0}
    for failure in (late, first):
        (tmp_path / f"failure-{failure['rank']}.json").write_text(json.dumps(failure))
    ended = measure.read_result(tmp_path, 1, "")
    assert (ended.outcome, ended.message, ended.detail) == ("oom", "rank 3: CUDA out of memory.", {"asked_bytes": 1})


# Requests that this machine cannot run, and ranks started by others


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_measure_without_gpus_is_refused(model: str) -> None:
    with pytest.raises(ModeUnavailable, match="no GPU") as caught:
        run(case(model, device="cuda", strategy="zero3", gpus=2))
    assert caught.value.exit_status == 2


def test_too_few_gpus_are_refused_with_an_alternative(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure.machine, "gpu_count", lambda: 2)
    with pytest.raises(ModeUnavailable) as caught:
        measure.check(case(model, device="cuda", strategy="zero3", gpus=8))
    assert "stand-in" in caught.value.hint and "8" in caught.value.message and "2" in caught.value.message
    with pytest.raises(ModeUnavailable) as alone:
        measure.check(case(model, device="cuda", strategy="zero1", backend="deepspeed", gpus=8))
    assert "stand-in" not in alone.value.hint and "--gpus 2" in alone.value.hint
    with pytest.raises(UsageError) as missing:
        measure.check(case(model, device="cuda", strategy="zero3", gpus=4, nnodes=2))
    assert "--rdzv-endpoint" in missing.value.hint


def test_slurm_step_is_adopted_as_ranks() -> None:
    assert external_launcher.external_rank({}) is None
    # in the batch script itself
    assert external_launcher.external_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "16"}) is None
    step = {"SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "16", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "1234567"}
    assert external_launcher.external_rank(step) == (9, 16)
    adopted = external_launcher.torch_variables({**step, "SLURM_STEP_NODELIST": "node7,node9"})
    assert adopted == {
        "RANK": "9",
        "WORLD_SIZE": "16",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "node7",
        "MASTER_PORT": "24567",
    }
    assert external_launcher.torch_variables({"RANK": "0"}) == {}


def test_sbatch_example_has_the_nodes_and_options_of_the_request() -> None:
    request = make_request({"model": "Qwen/Qwen2.5-0.5B", "gpus": 16, "nnodes": 2, "strategy": "hsdp"})
    script = sbatch_example(request)
    assert "--nodes=2" in script and "--gpus-per-node=8" in script and "--nproc-per-node=8" in script
    assert "--model Qwen/Qwen2.5-0.5B --gpus 16 --nnodes 2 --strategy hsdp" in script
    assert subprocess.run(["bash", "-n"], input=script, text=True).returncode == 0
    flagged = make_request({"model": "gpt2", "strategy": "ddp", "reserved": True})
    script = sbatch_example(flagged, device="cpu", timeout=None, records=Path("out.jsonl"))
    assert "--strategy ddp --reserved --device cpu --records out.jsonl\n" in script and "gpus-per-node" not in script


def test_figures_of_all_ranks_are_combined() -> None:
    ranks = [{"peak_tensor_bytes": n, "phase_peaks": {"forward": n}, "step_seconds": 1.0} for n in (5, 9, 3)]
    found = combined(ranks)
    assert found["peak_tensor_bytes"] == 5 and found["largest"] == {"peak_tensor_bytes": 9}
    assert found["spread"] == {"peak_tensor_bytes": 6} and found["by_rank"] == {"peak_tensor_bytes": [5, 9, 3]}
