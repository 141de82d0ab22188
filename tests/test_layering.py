"""The rules of the house: a room imports only what stands above it, and only two rooms import torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import fsdp_advisor

ROOMS = (
    "units",
    "errors",
    "job",
    "hardware",
    "model",
    "recording",
    "memory",
    "policies",
    "engines",
    "tapes",
    "timing",
    "report",
    "verdict",
    "estimator",
    "advice",
    "export",
    "render",
    "validation",
    "server",
    "cli",
)
"""From the top of the house to the bottom."""

HEAVY = {"torch", "transformers", "accelerate", "deepspeed"}
MAY_BE_HEAVY = {"recording", "validation"}
PURE = {"memory", "policies", "engines", "timing", "advice", "render"}
IO_MODULES = {"os", "pathlib", "socket", "subprocess", "urllib", "zipfile", "shutil", "tempfile", "http"}
ROOT = Path(fsdp_advisor.__file__).parent


def _files() -> list[Path]:
    return sorted(p for p in ROOT.rglob("*.py") if p.name not in ("__main__.py",) and p != ROOT / "__init__.py")


def _room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def _imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", _files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_a_room_imports_only_what_stands_above_it(path: Path) -> None:
    room = _room(path)
    assert room in ROOMS, f"{room} has no place in the house"
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] == "fsdp_advisor" and len(parts) > 1 and parts[1] in ROOMS:
            assert ROOMS.index(parts[1]) <= ROOMS.index(room), f"{room} imports {name}"
        if parts[0] in HEAVY:
            assert room in MAY_BE_HEAVY, f"{room} imports {name}"
        if parts[0] in IO_MODULES:
            assert room not in PURE, f"{room} imports {name}"


def test_an_estimate_of_a_catalogued_model_imports_nothing_heavy() -> None:
    code = (
        "import sys, fsdp_advisor; fsdp_advisor.estimate(model='meta-llama/Llama-2-7b-hf', gpus=4);"
        f"print(sorted({HEAVY | {'numpy', 'huggingface_hub', 'fastapi'}} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("path", sorted((ROOT / "policies").rglob("*.py")), ids=lambda p: p.stem)
def test_policies_know_no_engine(path: Path) -> None:
    allowed = {"units", "errors", "job", "model", "memory", "policies"}
    rooms = {name.split(".")[1] for name in _imports(path) if name.startswith("fsdp_advisor.")}
    assert rooms <= allowed
    assert not any(name.startswith("fsdp_advisor.memory") and "storages" not in name for name in _imports(path))
