"""Fixtures for rehearsals. They run in an environment with PyTorch's CUDA build; the variable REHEARSAL_PYTHON names its Python."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from warm_process import SCRIPTS, Warm

from fsdp_advisor.cli import main
from fsdp_advisor.hardware.lookup import find_gpu
from fsdp_advisor.rehearsal import rehearse
from fsdp_advisor.rehearsal.environment import environment
from fsdp_advisor.rehearsal.report import PEAKS, Prediction

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def rehearsal_python() -> Path:
    """The Python of an environment with PyTorch's CUDA build, transformers and accelerate. CONTRIBUTING.md says how to make one."""
    python = os.environ.get("REHEARSAL_PYTHON")
    if python is None:
        assert "CI" not in os.environ, "CI makes the environment and sets REHEARSAL_PYTHON"
        pytest.skip("REHEARSAL_PYTHON names no environment with PyTorch's CUDA build")
    return Path(python)


@pytest.fixture(scope="session")
def warm(rehearsal_python: Path) -> Iterator[Warm]:
    started = Warm(rehearsal_python)
    yield started
    started.process.communicate()  # closes its input, which ends it


@pytest.fixture(scope="session")
def run(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A function that runs a script on one simulated H100 and returns the script's JSON result. With variables the script gets a new
    process.
    """

    def started(script: str, *words: str, **variables: str) -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("run")
        printed = (
            _fresh(warm.python, script, words, folder, variables) if variables else warm.run(script, words, folder)
        )
        (found,) = (line for line in printed.splitlines() if line.startswith("FOUND "))
        return dict(json.loads(found.removeprefix("FOUND ")))

    return started


@pytest.fixture(scope="session")
def run_on_ranks(warm: Warm, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A function that runs a script on each of `gpus` simulated H100s and returns the JSON result of rank 0."""

    def started(script: str, *words: str, gpus: int) -> dict[str, Any]:
        printed = warm.run_ranks(script, words, tmp_path_factory.mktemp("ranks"), gpus)
        found = [json.loads(text) for text in re.findall(r'\{"rank.*?\}', printed)]
        assert len(found) == gpus, printed
        return dict(found[0])

    return started


@pytest.fixture(scope="session")
def torchtitan_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with torchtitan's package of this environment: that of rehearsals has another version, for its launcher."""
    folder = tmp_path_factory.mktemp("packages")
    for name in ("torchtitan", "spmd_types"):
        spec = find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            pytest.skip(f"{name} is not installed")
        (folder / name).symlink_to(spec.submodule_search_locations[0])
    return folder


@pytest.fixture
def predicts_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rehearsals run `estimate` in this process, which has already imported PyTorch, instead of in a new one."""

    def predict(options: Mapping[str, str], variables: Mapping[str, str]) -> Prediction:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            assert main(["estimate", *(f"--{name}={value}" for name, value in options.items()), "--json"]) == 0
        (row,) = json.loads(printed.getvalue())["estimates"]
        return Prediction(options=options, figures={name: row[name] for name in PEAKS})

    monkeypatch.setattr(rehearse, "predict", predict)


def _fresh(python: Path, script: str, words: Sequence[str], folder: Path, variables: dict[str, str]) -> str:
    outside = os.environ | variables | {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, SCRIPTS / script, *words], env=environment(python, find_gpu("H100-80GB"), 1, outside=outside),
        capture_output=True, text=True, timeout=600, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout
