"""Rehearsals run in an environment with PyTorch's CUDA build, whose Python the variable REHEARSAL_PYTHON names."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fsdp_advisor.hardware.lookup import find_gpu
from fsdp_advisor.rehearsal.environment import environment

SCRIPTS = Path(__file__).parent / "scripts"
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def rehearsal_python() -> Path:
    """The Python of an environment with PyTorch's CUDA build, transformers and accelerate. CONTRIBUTING.md says how to make one."""
    python = os.environ.get("REHEARSAL_PYTHON")
    if python is None:
        assert "CI" not in os.environ, "CI makes the environment and sets REHEARSAL_PYTHON"
        pytest.skip("REHEARSAL_PYTHON names no environment with PyTorch's CUDA build")
    return Path(python)


@pytest.fixture
def script(tmp_path: Path):
    """A function that writes a script and returns its path as text."""

    def write(text: str) -> str:
        path = tmp_path / "train.py"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture(scope="session")
def run(rehearsal_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A function that runs a script on one simulated H100 and returns what it found."""

    def started(script: str, *words: str, **variables: str) -> dict[str, Any]:
        done = _run_script([rehearsal_python], script, words, 1, tmp_path_factory.mktemp("run"), **variables)
        lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
        assert lines, done.stderr[-3000:]
        return dict(json.loads(lines[0].removeprefix("FOUND ")))

    return started


@pytest.fixture(scope="session")
def run_on_ranks(rehearsal_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A function that runs a script on each of `gpus` simulated H100s and returns what rank 0 found."""

    def started(script: str, *words: str, gpus: int) -> dict[str, Any]:
        launcher = [rehearsal_python.parent / "torchrun", f"--nproc-per-node={gpus}"]
        done = _run_script(launcher, script, words, gpus, tmp_path_factory.mktemp("ranks"))
        found = [json.loads(text) for text in re.findall(r'\{"rank.*?\}', done.stdout)]  # ranks may share a line
        assert len(found) == gpus, done.stderr[-3000:]
        return dict(found[0])

    return started


def _run_script(
    launcher: list[Any], script: str, words: tuple[str, ...], gpus: int, folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    variables |= {"REHEARSAL_FOLDER": str(folder), "HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    python = Path(launcher[0]).with_name("python")
    return subprocess.run(
        [*launcher, SCRIPTS / script, *words], env=environment(python, find_gpu("H100-80GB"), gpus, outside=os.environ | variables),
        capture_output=True, text=True, timeout=600, cwd=folder,
    )  # fmt: skip
