"""The command line as a process: pipes, signals, encodings, colour, and what it imports."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from matrix import in_turn

pytestmark = pytest.mark.slow

CLI = [sys.executable, "-m", "fsdp_advisor"]
ALL_ROWS = ["estimate", "--model", "meta-llama/Llama-2-7b-hf", "--gpus", "4", "--gpu", "H100"]
JOB = [*ALL_ROWS, "--strategy", "zero3"]


def environment(**extra: str) -> dict[str, str]:
    dropped = ("COLUMNS", "NO_COLOR", "FORCE_COLOR", "PYTHONIOENCODING", "PYTHONUTF8", "LC_ALL")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    return kept | {"HF_HUB_OFFLINE": "1", "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | extra


def on_a_terminal(command: list[str], **extra: str) -> str:
    """What the command writes when its standard output is a terminal."""
    parent, child = pty.openpty()
    with subprocess.Popen(command, stdout=child, stderr=subprocess.PIPE, env=environment(**extra)) as process:
        os.close(child)
        chunks = []
        try:
            while chunk := os.read(parent, 65536):
                chunks.append(chunk)
        except OSError:  # the other end has closed
            pass
        assert process.wait() == 0
    os.close(parent)
    return b"".join(chunks).decode().replace("\r\n", "\n")


def test_a_pipe_gets_everything_uncoloured() -> None:
    ran = subprocess.run([*CLI, *ALL_ROWS], capture_output=True, env=environment(), check=True)
    text = ran.stdout.decode()
    assert "\x1b" not in text
    assert "…" not in text
    assert sum(line.startswith("ZeRO-") for line in text.splitlines()) == 6
    assert "free" in text
    assert "tokens/s" in text


@in_turn(0, of=2)
def test_colour_only_on_a_terminal_and_not_with_no_color() -> None:
    coloured = on_a_terminal([*CLI, *JOB], COLUMNS="120")
    plain = on_a_terminal([*CLI, *JOB], COLUMNS="120", NO_COLOR="1")
    dumb = on_a_terminal([*CLI, *JOB], COLUMNS="120", TERM="dumb")
    assert "\x1b[32m" in coloured
    assert "\x1b" not in plain
    assert plain == dumb
    piped = subprocess.run([*CLI, *JOB], capture_output=True, env=environment(COLUMNS="120"), check=True)
    assert piped.stdout.decode() == plain


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_bars_are_ascii_where_blocks_cannot_be_written(encoding: str) -> None:
    ran = subprocess.run([*CLI, *JOB], capture_output=True, env=environment(PYTHONIOENCODING=encoding), check=True)
    assert ran.stdout.isascii()
    assert b"SSG" in ran.stdout or b"SSA" in ran.stdout


@in_turn(1, of=2)
@pytest.mark.parametrize("form", ["--format=text", "--json", "--format=markdown", "--help"])
def test_a_reader_that_leaves_early_is_no_error(form: str) -> None:
    producer = subprocess.Popen([*CLI, *JOB, form], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
    assert producer.stdout is not None and producer.stderr is not None
    producer.stdout.close()  # before it has written anything
    assert producer.stderr.read() == b""
    assert producer.wait() == 141
    producer.stderr.close()


def test_a_closed_pipe_ends_the_output_without_an_error() -> None:
    command = f"{' '.join(CLI)} {' '.join(JOB)} --json | head -1"
    ran = subprocess.run(["sh", "-c", command], capture_output=True, env=environment(), check=True)
    assert (ran.stdout, ran.stderr) == (b"{\n", b"")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_error() -> None:
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run([*CLI, *JOB], stdout=full, stderr=subprocess.PIPE, env=environment())
    assert ran.returncode == 2
    assert ran.stderr.decode().splitlines() == [
        "fsdp-advisor: cannot write standard output: No space left on device",
        "hint: -o FILE writes to a file",
    ]


def test_closed_standard_streams_are_an_error_with_status_2() -> None:
    quoted = f"{' '.join(CLI)} {' '.join(JOB)}"
    ran = subprocess.run(["sh", "-c", f"{quoted} >&-"], capture_output=True, env=environment())
    assert ran.returncode == 2
    assert ran.stderr.decode().startswith("fsdp-advisor: standard output is closed\n")
    assert subprocess.run(["sh", "-c", f"{quoted} --gpus 0 2>&-"], env=environment()).returncode == 2


def test_ctrl_c_ends_the_command_without_a_traceback() -> None:
    """A real SIGINT, while the command waits in the middle of its work."""
    code = (
        "import sys, time, fsdp_advisor.cli.estimate as command\n"
        "def wait(*_):\n    print('waiting', file=sys.stderr, flush=True); time.sleep(60)\n"
        "command.render = wait\n"
        "from fsdp_advisor.cli import main\n"
        f"sys.exit(main({JOB!r}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a parent may ignore it
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    assert process.stderr.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out, err) == (130, "", "fsdp-advisor: interrupted\n")


def imported(*commands: list[str]) -> set[str]:
    """The top-level modules that a process has imported when it has run these command lines."""
    code = (
        "import contextlib, io, json, sys\n"
        "from fsdp_advisor.cli import main\n"
        f"with contextlib.redirect_stdout(io.StringIO()):\n    for words in {commands!r}: main(words)\n"
        "print(json.dumps(sorted({name.partition('.')[0] for name in sys.modules})))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment(), check=True)
    return set(json.loads(ran.stdout))


HEAVY = {
    "torch", "transformers", "accelerate", "deepspeed", "fastapi", "uvicorn", "numpy", "huggingface_hub", "yaml",
    "pydantic", "typer",
}  # fmt: skip


def test_nothing_heavy_is_imported() -> None:
    quick = [[*JOB, "--json"], [*JOB, "--format", "markdown"], [*JOB, "--gpus", "-1"], ["gpus", "--json"]]
    helps = [[command, "--help"] for command in ("estimate", "gpus", "models")]
    assert not imported(*quick, *helps) & (HEAVY | {"rich"})
    assert not imported([*JOB, "--explain", "zero3"], ["models"]) & HEAVY
