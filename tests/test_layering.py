"""The packages are layers: each imports only packages at or before its own place, and few import torch or touch files."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import fsdp_advisor

LAYERS = (
    "units",
    "errors",
    "json_fields",
    "parallelism",
    "job",
    "hardware",
    "model",
    "recording",
    "program",
    "policies",
    "memory",
    "engines",
    "tape_keys",
    "tapes",
    "timing",
    "configs",
    "strategy_estimate",
    "report",
    "verdict",
    "assumptions",
    "assumption_notes",
    "gpu_support",
    "step_figures",
    "rows",
    "estimator",
    "comparison",
    "advice",
    "diagnosis",
    "export",
    "render",
    "validation",
    "rehearsal",
    "api",
    "server",
    "cli",
)
"""Packages and modules from the lowest layer to the highest."""

HEAVY = {"torch", "transformers", "accelerate", "deepspeed"}
IMPORTS_HEAVY = {"recording", "validation", "rehearsal"}
IO_FREE = {"program", "memory", "policies", "engines", "timing", "advice", "render", "parallelism"}
IO_MODULES = {"os", "pathlib", "socket", "subprocess", "urllib", "zipfile", "shutil", "tempfile", "http"}
MUST_NOT_IMPORT = {
    "policies": {"engines", "memory", "timing"},
    "memory": {"engines"},
    "timing": {"engines"},
}
"""Rules in addition to the order: optimizers and precisions know no engine, and the readers of a program do not either."""

LATE = {"model": {"recording"}, "report": {"render"}, "export": {"api"}, "recording": {"assumptions", "tape_keys"}}
"""Higher layers that a layer imports when a function needs them: `model` records a model with torch, `print(report)` renders, the
package `export` can be called like the function of that name, and the script `recording.adapted_catalog` records the tapes that
usual jobs replay with the defaults of their frameworks."""

ROOT = Path(fsdp_advisor.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if path not in (ROOT / "__init__.py", ROOT / "__main__.py"))


@cache
def tree_of(path: Path) -> ast.AST:
    return ast.parse(path.read_text())


@cache
def imports_of(path: Path) -> set[str]:
    return {name for node in ast.walk(tree_of(path)) for name in modules(node)}


def packages_of(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports_of(path)}


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def modules(node: ast.AST) -> Iterator[str]:
    """The modules that an import statement names, `from a import b` as `a` and `a.b`; none for other statements."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0 and node.module is not None, "imports are absolute"
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def layers_imported(names: set[str]) -> set[str]:
    """The layers among imported modules. A name that is no layer is one of `fsdp_advisor/__init__.py`."""
    parts = [name.split(".") for name in names]
    return {part[1] for part in parts if part[0] == "fsdp_advisor" and len(part) > 1 and part[1] in LAYERS}


def immediate_imports(tree: ast.AST) -> set[str]:
    """Imports that run when the module is imported."""
    found: set[str] = set()
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            pending += node.orelse
            continue
        found |= set(modules(node))
        pending += ast.iter_child_nodes(node)
    return found


def test_every_package_is_a_layer() -> None:
    assert {layer_of(path) for path in FILES} <= set(LAYERS)


def test_a_package_imports_only_its_own_layer_and_lower_ones() -> None:
    """A few import a higher layer inside of a function, as LATE says."""
    higher = {}
    for path in FILES:
        layer, imported = layer_of(path), layers_imported(imports_of(path))
        late = imported - layers_imported(immediate_imports(tree_of(path)))
        allowed = set(LAYERS[: LAYERS.index(layer) + 1]) | (late & LATE.get(layer, set()))
        if imported - allowed:
            higher[path] = imported - allowed
    assert higher == {}


def test_only_recording_and_validation_import_torch() -> None:
    assert [path for path in FILES if layer_of(path) not in IMPORTS_HEAVY and packages_of(path) & HEAVY] == []


def test_packages_that_compute_touch_no_files_and_no_network() -> None:
    assert [path for path in FILES if layer_of(path) in IO_FREE and packages_of(path) & IO_MODULES] == []


@pytest.mark.parametrize("layer", MUST_NOT_IMPORT)
def test_policies_and_readers_of_programs_know_no_engine(layer: str) -> None:
    files = [path for path in FILES if layer_of(path) == layer]
    imported = {name for path in files for name in layers_imported(imports_of(path))}
    assert files and not imported & MUST_NOT_IMPORT[layer]


def test_an_estimate_of_a_catalogued_model_imports_nothing_heavy() -> None:
    code = (
        "import sys, fsdp_advisor; fsdp_advisor.estimate(model='meta-llama/Llama-2-7b-hf', gpus=4);"
        f"print(sorted({HEAVY | {'numpy', 'huggingface_hub', 'fastapi'}} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
