"""Kernels of other libraries and values read from the GPU, in scripts that run on a simulated GPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken

from fsdp_advisor.hardware.lookup import find_gpu

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "scripts"
Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def kernels(run: Run) -> dict[str, Any]:
    return run("gpu_kernels.py")


@pytest.fixture(scope="module")
def models(run: Run) -> dict[str, Any]:
    return run("small_models.py", "all")


@in_turn(1, of=5)
def test_kernels_that_libraries_compile_run(kernels: dict[str, Any]):
    checks = kernels["checks"]
    assert checks["compiled_layer"]["value"] == [32, 64]
    assert checks["triton_autotuning"]["value"] == 128  # all take the same time: the first one
    assert checks["triton_autotuning"]["peak"] >= 256 << 20  # do_bench's buffer that clears the L2 cache
    assert checks["liger_loss"]["value"][1] == [1000, 32]
    assert checks["bitsandbytes_4bit"]["value"] == 1024 * 1024 // 2
    assert checks["cuda_graph"]["value"]
    assert checks["event_timing"]["value"] == [True, find_gpu("H100-80GB").memory_bytes]
    assert checks["equal_blocks"]["value"] == [True, [0, 1, 2]], "PyTorch takes that of the oldest segment"


@in_turn(0, of=2)
@pytest.mark.parametrize(("major", "minor"), taken([(8, 9)], [(8, 6), (10, 3), (12, 1)]))
def test_gpus_run_the_code_of_their_generation(run: Run, major: int, minor: int):
    """Ada runs the code for sm_86: PyTorch has none for sm_89."""
    assert run("prefix_sum.py", REHEARSAL_MAJOR=str(major), REHEARSAL_MINOR=str(minor)) == {"shape": [1, 10]}


def test_values_that_scripts_decide_by_let_training_continue(kernels: dict[str, Any]):
    checks = kernels["checks"]
    assert checks["gradient_scaler"]["value"] == [1.5, pytest.approx(1.5 * 2**0.5), 65536.0, 2]
    assert checks["masks_and_counts"]["value"] == [False, [0, 100, 200, 300, 400], 400, [400]]
    assert checks["unknown_floats"]["value"] == [False, True, 1.5, 0.5]
    assert checks["router_choices"]["value"] == [128] * 16


def test_decisions_name_line_operation_and_value(kernels: dict[str, Any]):
    source = (SCRIPTS / "gpu_kernels.py").read_text().splitlines()
    line = next(i for i, text in enumerate(source, 1) if "return experts.flatten()" in text)
    (choice,) = [each for each in kernels["decisions"] if each["operation"] == "topk"]
    assert choice["place"] == choice["caller"] == f"{SCRIPTS / 'gpu_kernels.py'}:{line - 1}"
    assert choice["expression"] == source[line - 2].strip()
    read = {each["operation"]: each for each in kernels["decisions"] if "mask" in each["expression"]}
    assert {"item()", "nonzero"} <= read.keys()
    assert read["item()"]["value"] is False and read["item()"]["count"] == 1


@in_turn(1, of=2)
def test_peaks_of_plain_training_do_not_depend_on_the_values(run: Run, models: dict[str, Any]):
    untouched = run("small_models.py", REHEARSAL_VALUES="0")
    assert untouched["plain"][:2] == models["plain"][:2]
    assert models["plain"][2] == 1.5 and models["plain"][3] > 0


@in_turn(0, of=2)
def test_exit_waits_for_the_backward_threads(run: Run):
    assert run("late_backward_thread.py", PYTHONUNBUFFERED="1") == {"dropped": True}


@in_turn(1, of=2)
def test_experts_get_equal_numbers_of_tokens(models: dict[str, Any]):
    """The loop over experts reads which experts have tokens, of 8 and one that is absent, and then the tokens of each."""
    layers_and_steps, tokens, chosen = 2 * 2, 3 * 128, 2
    assert models["experts"] == [
        ["8 of 9", layers_and_steps], [f"{tokens * chosen // 8} of {tokens * chosen}", layers_and_steps * 8],
    ]  # fmt: skip
    assert models["eager"][0] == pytest.approx(models["grouped_mm"][0], rel=0.01)


@in_turn(1, of=2)
def test_generation_ends_at_the_longest_length(models: dict[str, Any]):
    assert models["generated"] == [[3, 136], [3, 136]]


@pytest.fixture(scope="module")
def replaced(run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = str(tmp_path_factory.mktemp("output"))
    return run("replaced.py", folder, REHEARSAL_EMPTY_WEIGHTS="1", REHEARSAL_RANDOM_DATA="1")


@in_turn(1, of=8)
def test_trl_trains_with_empty_weights_and_random_data(replaced: dict[str, Any]):
    assert replaced["steps"] == 2
    assert replaced["rows"] == [4, 512]
    assert 60 << 20 < replaced["loaded"] < 200 << 20  # 28 million embeddings in bf16, 106 million parameters in 4 bits
    assert replaced["peak"] > replaced["loaded"]


@in_turn(0, of=4)
def test_models_and_data_sets_that_are_elsewhere_are_replaced(replaced: dict[str, Any]):
    found = replaced["elsewhere"]
    assert found["splits"] == ["test", "train", "validation"]
    assert found["mapped"] == ["joined", "reply", "text"]
    assert found["batched"] == ["input_ids", "n", "text"]
    assert found["vocabulary"] == [151936, 151936] and found["words"] == 3
    assert found["name"] == "Qwen/Qwen2.5-0.5B"
    parameters, allocated = found["bytes"]
    assert parameters == 2 * 494_032_768
    assert parameters <= allocated < 1.01 * parameters


def test_looking_for_a_module_keeps_what_follows_its_import():
    """Libraries ask importlib.util.find_spec("torch") whether PyTorch is there, long before they import it."""
    code = """
import importlib.util, sys
from fsdp_advisor.rehearsal.inside.import_hooks import after_import
after_import("colorsys", lambda module: print(module.__name__))
importlib.util.find_spec("colorsys")
import colorsys
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "colorsys\n"
