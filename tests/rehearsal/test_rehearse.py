"""`rehearse` on small scripts: what it measures, how it ends, and that it leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken, with_all_cases

from fsdp_advisor.cli import main
from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.rehearsal.build import Installation, find_installation, libraries_for
from fsdp_advisor.rehearsal.launch import interpreter_of
from fsdp_advisor.rehearsal.rehearse import Settings, rehearse
from fsdp_advisor.rehearsal.report import Rehearsal

pytestmark = pytest.mark.slow

Run = Callable[..., tuple[int, dict[str, Any], str]]

TRAIN = """
import json, torch
model = torch.nn.Linear(4096, 4096).cuda()
optimizer = torch.optim.AdamW(model.parameters())
own = []
for step in range(3):
    loss = model(torch.randn(1024, 4096, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    own.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
    if step == 0:
        torch.cuda.reset_peak_memory_stats()
        own.append([torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()])
print(json.dumps(own), flush=True)
"""

UNUSUAL = """
import os, subprocess, torch
x = torch.randn(64, 64, device="cuda")
for function in (torch.linalg.qr, torch.linalg.svd, torch.linalg.eigh, torch.linalg.eig, torch.linalg.pinv, torch.fft.fft,
                 torch.linalg.cholesky_ex, torch.linalg.lu_factor_ex, torch.linalg.inv_ex, torch.sort, torch.cumsum):
    function(x) if function is not torch.cumsum else function(x, 0)
torch.linalg.svd(torch.randn(4, 16, 16, device="cuda"))
torch.linalg.solve_ex(x, x)
print("functions ran", flush=True)
if os.fork() == 0:
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError as error:
        print("child:", error, flush=True)
    os._exit(0)
os.wait()
model = torch.nn.Linear(64, 64, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters())
backwards = 0
def step_every_second_time(parameter):
    global backwards
    backwards += 1
    if backwards % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
model.weight.register_post_accumulate_grad_hook(step_every_second_time)
for micro_batch in range(4):
    model(torch.randn(2, 64, device="cuda")).sum().backward()
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000) # orphan-of-rehearsal"], start_new_session=True)
"""

EXHAUST = """
import resource
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), -1))
bytearray(1 << 30)
"""
"""The script asks for more host memory than is left."""


@pytest.fixture
def run(rehearsal_python: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Run:
    """A function that rehearses a script: its exit status, JSON and standard error, which also has the script's own output."""

    def rehearsed(text: str, *options: str) -> tuple[int, dict[str, Any], str]:
        (tmp_path / "train.py").write_text(text)
        words = ["rehearse", "--gpu", "A100-80GB", "--json", "--no-predict", *options, "--"]
        status = main([*words, str(rehearsal_python), str(tmp_path / "train.py")])
        printed = capfd.readouterr()
        return status, json.loads(printed.out) if printed.out else {}, printed.err

    return rehearsed


def still_running(word: str) -> list[str]:
    """The processes whose command line contains a word."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if word in command and int(folder.name) != os.getpid():
            found.append(command)
    return found


@in_turn(0, of=2)
def test_the_report_has_the_peaks_that_the_script_reads_and_a_caught_out_of_memory_error_is_no_failure(
    run: Run,
) -> None:
    caught = (
        "try:\n    torch.empty(90 << 30, device='cuda', dtype=torch.uint8)\nexcept torch.OutOfMemoryError:\n    pass\n"
    )
    status, found, printed = run(TRAIN + caught, "--steps", "0")
    assert (status, found["outcome"]) == (0, "completed")
    assert len(found["ranks"][0]["out_of_memory"]) == 1
    own = json.loads(next(line for line in printed.splitlines() if line.startswith("[[")))
    weights, inputs, state = 4096 * 4097 * 4, 1024 * 4096 * 4, 2 * 4096 * 4097 * 4
    assert own[1][0] < own[0][0], "the script's own reset lowers its peak"
    assert own[-1][0] >= weights + state + inputs
    (rank,) = found["ranks"]
    assert rank["steps"] == 3
    assert found["peak_allocated_bytes"] == max(peak for peak, _ in own)
    assert found["peak_reserved_bytes"] == max(reserved for _, reserved in own)
    assert found["peak_device_bytes"] > found["peak_reserved_bytes"]
    order = [(phase["step"], phase["phase"]) for phase in rank["phases"]]
    steps = [(step, phase) for step in (1, 2, 3) for phase in ("forward", "backward", "optimizer")]
    assert order == [(0, "setup"), *steps]
    assert rank["phases"][3]["peak_allocated_bytes"] > rank["phases"][2]["allocated_bytes_at_end"], "AdamW's state"


@in_turn(0, of=4)
def test_the_script_is_ended_after_the_wanted_steps(run: Run) -> None:
    status, found, printed = run(TRAIN, "--steps", "1")
    assert status == 0 and found["ranks"][0]["steps"] == 1
    assert "[[" not in printed, "the script did not reach its end"


@with_all_cases
def test_a_model_that_cannot_be_read_trains_to_its_end(run: Run) -> None:
    model = """
class FSDPModule(torch.nn.Linear):
    def _get_fsdp_state(self):
        raise AttributeError("another version")
model = FSDPModule("""
    status, found, _ = run(TRAIN.replace("\nmodel = torch.nn.Linear(", model))
    assert (status, found["ranks"][0]["steps"]) == (0, 3)
    assert found["ranks"][0]["job"]["unreadable"] == "AttributeError: another version"


@in_turn(1, of=4)
def test_out_of_memory_says_what_was_requested_where(run: Run, tmp_path: Path) -> None:
    text = TRAIN.replace("optimizer.step()", "torch.empty(90 << 30, device='cuda', dtype=torch.uint8)")
    status, found, _ = run(text, "--snapshot", str(tmp_path / "kept"))
    assert (status, found["outcome"]) == (1, "out of memory")
    (failed,) = found["ranks"][0]["out_of_memory"]
    assert failed["requested_bytes"] == 90 << 30
    assert failed["phase"] == "optimizer" and failed["step"] == 1
    assert "train.py:9" in failed["frames"][0]
    assert Path(failed["snapshot"]).stat().st_size > 0


@in_turn(2, of=3)
@pytest.mark.parametrize(
    ("end", "status", "message"),
    taken(
        [
            pytest.param("torch.empty(1, device='cuda:1')", 1, "invalid device ordinal", id="missing GPU"),
            pytest.param("import os; os.kill(os.getpid(), 9)", 137, None, id="killed"),
        ],
        [
            pytest.param("raise ValueError('bad data')", 1, "ValueError: bad data", id="exception"),
            pytest.param("raise SystemExit(7)", 7, None, id="exit status"),
            pytest.param(EXHAUST, 1, "MemoryError", id="host memory"),
        ],
        days=2,
    ),
)
def test_a_script_that_fails_ends_with_its_own_status_and_keeps_what_was_measured(
    run: Run, end: str, status: int, message: str | None
) -> None:
    found_status, found, _ = run(TRAIN + end, "--steps", "0")
    assert (found_status, found["outcome"]) == (status, "failed")
    (rank,) = found["ranks"]
    assert rank["steps"] == 3 and rank["phases"]
    if message is not None:
        assert message in rank["error"]


@in_turn(2, of=4)
def test_a_hanging_script_is_ended_with_its_children(run: Run) -> None:
    text = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000) # child-of-rehearsal"], start_new_session=True)
print("started a child", flush=True)
import torch
torch.zeros(1, device="cuda")
time.sleep(1000)
"""
    status, found, printed = run(text, "--timeout", "10")
    assert (status, found["outcome"]) == (2, "timed out") and "started a child" in printed
    assert still_running("child-of-rehearsal") == []


@in_turn(3, of=4)
def test_an_ended_rehearsal_leaves_no_process_and_no_folder(rehearsal_python: Path, tmp_path: Path) -> None:
    text = (
        "import pathlib, time, torch; torch.zeros(1, device='cuda'); pathlib.Path('started').touch(); time.sleep(1000)"
    )
    (tmp_path / "train.py").write_text(text)
    words = [sys.executable, "-m", "fsdp_advisor", "rehearse", "--json", "--no-predict", "--", str(rehearsal_python)]
    variables = {**os.environ, "TMPDIR": str(tmp_path)}
    started = subprocess.Popen(
        [*words, str(tmp_path / "train.py")], env=variables, cwd=tmp_path, stdout=subprocess.PIPE
    )
    while started.poll() is None and not (tmp_path / "started").exists():
        time.sleep(0.2)
    started.terminate()
    printed, _ = started.communicate(timeout=600)
    assert (started.returncode, json.loads(printed)["outcome"]) == (130, "interrupted")
    assert still_running(str(tmp_path / "train.py")) == [] and list(tmp_path.glob("rehearsal-*")) == []


@in_turn(3, of=4)
def test_what_is_not_simulated_is_refused_with_what_to_disable(run: Run) -> None:
    text = """
import ctypes, torch
assert ctypes.CDLL(None).cudaGraphKernelNodeCopyAttributes(0, 0) == 801  # PyTorch does not call it, a kernel of the hub may
torch.zeros(1, device="cuda").untyped_storage()._share_cuda_()
"""
    status, found, printed = run(text)
    assert "calls cudaGraphKernelNodeCopyAttributes" in printed
    assert status == 1 and "not supported in a rehearsal" in found["ranks"][0]["error"]
    assert "calls cudaIpcGetMemHandle" in printed and "disable sharing of CUDA tensors between processes" in printed


@pytest.fixture(scope="module")
def unusual(rehearsal_python: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Rehearsal, str]:
    """The rehearsal of one script that does several unusual things, and what it prints. Each process takes seconds to import torch."""
    folder = tmp_path_factory.mktemp("unusual")
    (folder / "train.py").write_text(f"import sys\nsys.stdout = open({str(folder / 'out')!r}, 'w')\n{UNUSUAL}")
    settings = Settings(gpu="A100-80GB", steps=0, predict=False, quiet=True)
    return rehearse([str(rehearsal_python), str(folder / "train.py")], settings), (folder / "out").read_text()


@in_turn(3, of=4)
def test_functions_that_ask_for_a_workspace_run(unusual: tuple[Rehearsal, str]) -> None:
    found, printed = unusual
    assert found.outcome == "completed" and "functions ran" in printed
    assert found.ranks[0].phases[0].peak_allocated_bytes < 64 << 20, "no workspace of an undefined size"


def test_a_forked_process_that_uses_the_gpu_fails_as_on_a_gpu(unusual: tuple[Rehearsal, str]) -> None:
    found, printed = unusual
    assert "child: Cannot re-initialize CUDA in forked subprocess" in printed
    assert len(found.ranks) == 1


def test_an_optimizer_that_steps_in_backward_ends_the_step(unusual: tuple[Rehearsal, str]) -> None:
    found, _ = unusual
    assert found.ranks[0].steps == 2


def test_processes_that_outlive_the_command_are_ended(unusual: tuple[Rehearsal, str]) -> None:
    found, _ = unusual
    assert found.ended.status == 0 and found.ended.leftovers >= 1
    assert still_running("orphan-of-rehearsal") == []


@pytest.mark.parametrize(
    ("command", "settings", "message"),
    [
        ((), {}, "no command"),
        (("no-such-program",), {}, "no such program"),
        (("{python}", "x.py"), {"gpu": "MI300X"}, "not an NVIDIA GPU"),
        (("{python}", "x.py"), {"gpus": 3, "nnodes": 2}, "cannot be divided"),
        (("{python}", "x.py"), {"gpus": 64}, "1 to 16 GPUs"),
        (("{own}", "x.py"), {}, "without CUDA"),
    ],
    ids=["nothing", "unknown program", "AMD", "uneven nodes", "too many per node", "CPU build"],
)
def test_what_cannot_be_rehearsed_is_refused_with_a_hint(
    rehearsal_python: Path, command: tuple[str, ...], settings: dict[str, Any], message: str
) -> None:
    words = [word.format(python=rehearsal_python, own=sys.executable) for word in command]
    with pytest.raises(AdvisorError) as refused:
        rehearse(words, Settings(**{"gpu": "H100-80GB"} | settings))
    assert message in refused.value.message and refused.value.hint


def test_the_interpreter_of_a_launcher_is_the_one_in_its_first_line(rehearsal_python: Path, tmp_path: Path) -> None:
    launcher = tmp_path / "torchrun"
    launcher.write_text(f"#!{rehearsal_python}\n")
    launcher.chmod(0o755)
    assert interpreter_of([str(launcher), "train.py"]) == rehearsal_python
    assert find_installation(rehearsal_python).torch_version.startswith("2.")


def test_libraries_are_kept_in_the_chosen_cache_folder(
    rehearsal_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_ADVISOR_CACHE", str(tmp_path / "cache"))
    packages, headers = tmp_path / "packages", find_installation(rehearsal_python).torch.with_name("nvidia")
    (packages / "torch").mkdir(parents=True)
    (packages / "torch" / "version.py").write_text("__version__ = '2.13.0'")
    (packages / "nvidia").symlink_to(headers)
    libraries = libraries_for(Installation(rehearsal_python, packages / "torch"))
    assert libraries.parent == tmp_path / "cache" / "rehearsal" and (libraries / "libcuda.so.1").exists()
