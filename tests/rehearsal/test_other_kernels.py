"""flash-attn where it is not installed, and libraries of kernels that a rehearsal refuses."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn

from fsdp_advisor.hardware.lookup import find_gpu
from fsdp_advisor.rehearsal.environment import environment
from fsdp_advisor.rehearsal.inside.refusals import USE_INSTEAD, hint_of

pytestmark = pytest.mark.slow

FLASH_ATTENTION = {
    "dense": [[2, 700, 16, 64], 2957312, 2957312, 20815872, 14336000],
    "groups": [[2, 700, 16, 128], 5824512, 5824512, 44310528, 20070400],
    "padded heads": [[2, 700, 16, 60], 7258112, 7258112, 29974528, 9946112],
    "deterministic": [[2, 700, 16, 64], 2957312, 2957312, 47415296, 10035200],
    "dropout": [[2, 700, 16, 64], 2957312, 2957312, 22806528, 10035200],
    "one sequence": [[1, 1000, 2, 64], 2631680, 264704, 1821184, 1280000],
    "one query": [[1, 1, 16, 64], 69632, 2048],
    "packed keys": [[2, 700, 16, 64], 2957312, 2957312, 23707648, 10936320],
    "packed": [[2, 700, 16, 64], 2957312, 2957312, 20905472, 14336000],
    "lengths": [[1400, 16, 64], 2957312, 2957312, 23281152, 10035200],
    "packed lengths": [[1400, 16, 64], 2957312, 2957312, 21847552, 14336000],
    "packed keys and lengths": [[1400, 16, 64], 2957312, 2957312, 23281152, 10035200],
    "cache": [[2, 1, 16, 64], 138240, 4096],
    "tokens": [[1300, 16, 64], [2, 700, 16, 64], 2867200, 2867200, 11264000, 8601600],
    "compiled": [[2, 700, 16, 128], 5824512, 5824512, 53936128, 20070400],
}
"""What scripts/flash_attention.py prints with the Python code of flash-attn 2.8.3 over the simulated extension, on an H100."""


def test_flash_attention_allocates_what_the_package_does(run: Callable[..., dict[str, Any]]) -> None:
    assert run("flash_attention.py") == FLASH_ATTENTION


def test_a_dense_call_allocates_its_output_and_the_scratch_of_backward() -> None:
    rows, heads, head = 2 * 700, 16, 64
    out, sums, random_state = rows * heads * head * 2, rows * heads * 4, 512
    _, forward, _, peak, _ = FLASH_ATTENTION["dense"]
    assert forward == out + sums + random_state
    gradients, incoming, rounded_rows = 3 * out, out, 2 * 768
    scratch = rounded_rows * heads * head * 4 + rounded_rows * heads * 4
    assert peak == forward + incoming + gradients + scratch


def _run(python: Path, code: str, path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    outside = os.environ | {"PYTHONPATH": f"{path}:{os.environ.get('PYTHONPATH', '')}"} | variables
    return subprocess.run(
        [python, "-c", code], env=environment(python, find_gpu("H100-80GB"), 1, outside=outside), capture_output=True, text=True
    )  # fmt: skip


@in_turn(1, of=2)
def test_an_extension_that_cannot_be_loaded_is_simulated(rehearsal_python: Path, tmp_path: Path) -> None:
    suffix = "cpython-311-x86_64-linux-gnu.so"
    for name in (suffix, "abi3.so"):
        (tmp_path / f"flash_attn_2_cuda.{name}").write_bytes(b"no library")
    done = _run(rehearsal_python, "import flash_attn_2_cuda; print(flash_attn_2_cuda.__file__)", tmp_path)
    assert "stand_ins" in done.stdout and "cannot be loaded" in done.stderr


def test_flash_attention_can_be_left_out(rehearsal_python: Path, tmp_path: Path) -> None:
    code = "import importlib.util as u; print(u.find_spec('flash_attn'))"
    assert _run(rehearsal_python, code, tmp_path, REHEARSAL_FLASH_ATTENTION="0").stdout == "None\n"
    assert "stand_ins" in _run(rehearsal_python, code, tmp_path).stdout


@pytest.mark.parametrize("module", ["xformers.ops", "transformer_engine.pytorch", "apex.optimizers"])
def test_kernels_that_are_not_simulated_are_refused_by_name(
    module: str, rehearsal_python: Path, tmp_path: Path
) -> None:
    package, _, rest = module.partition(".")
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text("__version__ = '1'")
    (tmp_path / package / f"{rest}.py").write_text("")
    done = _run(rehearsal_python, f"import {package}; print({package}.__version__); import {module}", tmp_path)
    assert done.stdout == "1\n" and USE_INSTEAD[package] in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("package", USE_INSTEAD)
def test_a_missing_package_of_kernels_is_answered_with_what_to_use(package: str) -> None:
    hint = hint_of(ModuleNotFoundError(f"No module named '{package}'", name=package))
    assert hint is not None and USE_INSTEAD[package] in hint
    assert hint_of(ModuleNotFoundError("No module named 'numpy'", name="numpy")) is None
