"""Campaigns continue where they stopped; the campaigns of the package cover engines, sizes and GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matrix import ALL, in_turn, taken, with_all_cases

from fsdp_advisor.cli import main
from fsdp_advisor.errors import UsageError
from fsdp_advisor.hardware import GPUS, find_gpu
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.model.catalog import find, profile
from fsdp_advisor.validation import campaign, modes, records
from fsdp_advisor.validation.case import Case
from fsdp_advisor.validation.predict import Prediction, predict
from fsdp_advisor.validation.records import Record

pytestmark = pytest.mark.slow

BASE: dict[str, Any] = {"model": "openai-community/gpt2", "strategy": "zero3", "gpus": 8}


def cases(count: int) -> list[Case]:
    requests = [make_request({**BASE, "micro_batch_size": n}) for n in range(1, count + 1)]
    return [Case(request=request, mode="simulate", device="cpu") for request in requests]


class Runner:
    """Replaces the worker: the cases end with these outcomes, one after the other."""

    def __init__(self, *outcomes: str) -> None:
        self.outcomes = list(outcomes)
        self.ran: list[int] = []

    def __call__(self, case: Case) -> Record:
        self.ran.append(case.request.micro_batch_size)
        request = {**case.request.as_dict(), "backend": "fsdp2", "seq_len": 1024, "gpu": "H100-80GB"}
        return Record(request=request, mode=case.mode, device="cpu", outcome=self.outcomes.pop(0))  # type: ignore[arg-type]


def test_campaign_continues_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    first = Runner("ok", "error", "oom", "interrupted")
    events = campaign.run(cases(5), path, first)
    assert next(events).total == 5
    with pytest.raises(KeyboardInterrupt):
        list(events)
    assert [r.outcome for r in records.read(path)[0]] == ["ok", "error", "oom", "interrupted"]
    second = Runner("ok", "timeout", "ok")
    found = list(campaign.run(cases(5), path, second))
    assert second.ran == [2, 4, 5]  # those that failed to start or were interrupted, and the rest
    assert [e.done for e in found] == [2, 3, 4, 5]
    assert list(campaign.run(cases(5), path, Runner()))[-1].done == 5


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2"),
        ("[]", "not a JSON object"),
        ('{"model": "gpt2", "gpus": 0, "strategy": "ddp"}', "gpus"),
        ('{"model": "gpt2"}', "no strategy"),
        ('{"model": "gpt2", "nonsense": 1}', "nonsense"),
    ],
)
def test_bad_line_is_reported_with_its_number(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text(f"# a comment\n{line}\n")
    with pytest.raises(UsageError, match=said) as caught:
        campaign.load(str(path))
    assert "line 2" in caught.value.message and caught.value.hint


def test_unreadable_and_empty_campaigns_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read") as caught:
        campaign.load("nothing-like-it")
    assert "full" in caught.value.hint and "quick" in caught.value.hint
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="no cases"):
        campaign.load(str(tmp_path / "empty.jsonl"))


def test_command_line_options_replace_those_of_the_campaign() -> None:
    assert {r.gpu for r in campaign.load("quick", gpu="24GiB")} == {"24GiB"}


# The campaigns of the package


def test_full_campaign_covers_engines_precisions_and_world_sizes() -> None:
    requests = campaign.load("full")
    assert len(requests) >= 60 and len({json.dumps(r.as_dict()) for r in requests}) == len(requests)
    families = {str(profile(entry).config["model_type"]) for r in requests if (entry := find(r.model))}
    assert all(find(r.model) for r in requests) and len(families) >= 8
    assert {r.backend for r in requests} >= {"ddp", "fsdp1", "fsdp2"}
    assert {(r.backend, r.strategy) for r in requests} >= {
        (b, s) for b in ("fsdp1", "fsdp2") for s in ("zero2", "zero3")
    }
    assert {r.gpus for r in requests} >= {1, 2, 8, 64}
    assert {r.precision for r in requests} >= {"fp32", "bf16", "bf16-mixed"}
    assert {r.activation_checkpointing for r in requests} == {"none", "full"}
    assert {r.attention for r in requests} == {"sdpa", "eager"}
    assert {r.optim for r in requests} == {"adamw_torch_fused", "adamw_torch"}


def predicted_shares(name: str, gpu: str, step: int = 1) -> list[tuple[Prediction, float, float]]:
    """Predictions as a stand-in on a GPU, and allocated and device peaks as shares of its memory, of every `step`th case."""
    here = find_gpu(gpu)
    found = [predict(request, "stand-in", "cuda", gpu=here) for request in campaign.load(name)[::step]]
    shares = (
        (p.predicted[f"peak_{figure}_bytes"] / here.memory_bytes for figure in ("allocated", "device")) for p in found
    )
    return [(p, *both) for p, both in zip(found, shares, strict=True)]


@in_turn(0, of=3)
@pytest.mark.parametrize("gpu", taken(["H100-80GB"], ["A100-80GB"]))
def test_full_campaign_ranges_from_small_cases_to_cases_beyond_an_80_gb_gpu(gpu: str) -> None:
    """Cases that do not fit exceed the GPU by their tensors alone. No case is so close to full that both verdicts are possible."""
    pytest.importorskip("torch")
    found = predicted_shares("full", gpu, step=1 if ALL else 3)
    beyond = [allocated for prediction, allocated, _ in found if not prediction.fits]
    assert len(beyond) >= (12 if ALL else 4) and min(beyond) > 1.04
    fitting = [device for prediction, _, device in found if prediction.fits]
    assert max(fitting) < 0.97
    assert sum(device > 0.88 for device in fitting) >= (6 if ALL else 2)
    assert sum(device < 0.3 for device in fitting) >= (15 if ALL else 5)


SMALL = sorted((gpu.memory_bytes, gpu.name) for gpu in GPUS if 23 * 10**9 < gpu.nominal_memory_bytes < 27 * 10**9)
_LEAST, *_BETWEEN, _MOST = (name for _, name in SMALL)


@in_turn(3, of=6)
@pytest.mark.parametrize("gpu", taken([_LEAST], [*_BETWEEN, _MOST]))
def test_quick_campaign_suits_every_24_gb_gpu(gpu: str) -> None:
    """Two cases exceed the GPU; all others are far from full."""
    pytest.importorskip("torch")
    found = predicted_shares("quick", gpu)
    assert len(found) <= 20 and len(SMALL) >= 5
    assert [allocated > 1.2 for prediction, allocated, _ in found if not prediction.fits] == [True, True]
    assert all(device < 0.85 for prediction, _, device in found if prediction.fits)


# The choice of the mode


def test_best_mode_depends_on_the_number_of_gpus() -> None:
    assert modes.best_mode(8, "fsdp2", gpus_here=0).mode == "simulate"
    assert modes.best_mode(8, "fsdp2", gpus_here=4).mode == "stand-in"
    assert modes.best_mode(8, "deepspeed", gpus_here=4).mode == "measure"
    assert modes.best_mode(4, "fsdp2", gpus_here=4).mode == "measure"


# The command


def program(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "fsdp_advisor", "validate", *arguments],
        capture_output=True,
        text=True,
        timeout=1200,
        env={**os.environ, **environment},
    )


@in_turn(2, of=3)
def test_campaign_command_records_every_case(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    path, out = tmp_path / "c.jsonl", tmp_path / "r.jsonl"
    rows = [{"model": model, "strategy": s, "gpus": 4, "micro_batch_size": 2, "seq_len": 16} for s in ("ddp", "zero1")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ("--campaign", str(path), "--mode", "simulate", "--records", str(out))
    first = program(*arguments, "--gpu", "24GiB")
    assert first.returncode == 0, first.stderr
    assert "2/2" in first.stderr and "deepspeed cannot be simulated" in first.stdout
    made, _ = records.read(out)
    assert [r.outcome for r in made] == ["ok", "error"]
    assert made[0].errors["peak_tensor_bytes"] == 0 and made[0].fits_really
    assert main(["validate", "report", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcomes"] == {"ok": 1, "error": 1}


@with_all_cases
def test_single_case_is_shown_as_its_record(model: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    job = ("--model", model, "--gpus", "4", "--strategy", "zero3", "--seq-len", "16", "--micro-batch-size", "2")
    done = program(*job, "--mode", "simulate", "--format", "json", "--records", str(tmp_path / "r.jsonl"))
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown["errors"]["peak_tensor_bytes"] == 0 and shown["mode"] == "simulate" and "mode: simulate" in done.stderr
    assert json.loads((tmp_path / "r.jsonl").read_text()) == shown


def test_rung_is_an_alias_of_mode(capsys: pytest.CaptureFixture[str]) -> None:
    """The refusal of what cannot be simulated is one line and a hint, like the others below."""
    job = ["--model", "gpt2", "--gpus", "4", "--strategy", "zero1"]
    assert main(["validate", *job, "--rung", "simulate"]) == 2
    said = capsys.readouterr()
    lines = [line for line in said.err.splitlines() if not line.startswith("note:")]
    assert "mode: simulate, as requested" in said.err and not said.out
    assert "deepspeed" in lines[0] and len(lines) <= 2
    assert main(["validate", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--mode NAME, --rung NAME" in shown


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ((), 2, "nothing to validate"),
        (("--model", "7B", "--strategy", "ddp", "--mode", "simulate"), 2, "bare parameter count"),
        (("--model", "13B", "--gpus", "2"), 2, "13B is a bare parameter count"),
        (("--campaign", "quick"), 2, "--records"),
        (("--campaign", "quick", "--records", "r.jsonl", "--sbatch"), 2, "--sbatch takes a single case"),
        (("report", "nowhere.jsonl"), 2, "cannot read"),
    ],
    ids=str,
)
def test_refusals_are_one_line_and_a_hint(
    arguments: tuple[str, ...], status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", *arguments]) == status
    printed = capsys.readouterr()
    lines = [line for line in printed.err.splitlines() if not line.startswith("note:")]
    assert said in lines[0] and len(lines) <= 2 and not printed.out


def test_rehearsal_of_cases_for_several_gpus_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("".join(json.dumps({**BASE, "gpu": gpu}) + "\n" for gpu in ("B300", "A100-80GB")))
    files = ["--campaign", str(path), "--records", str(tmp_path / "r.jsonl")]
    assert main(["validate", "--mode", "rehearse", *files]) == 2
    assert "several GPUs: A100-80GB, B300" in capsys.readouterr().err
