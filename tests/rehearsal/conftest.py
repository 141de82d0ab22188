"""Rehearsals run in an environment with PyTorch's CUDA build, whose Python the variable REHEARSAL_PYTHON names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


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
