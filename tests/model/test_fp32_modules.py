"""Which models keep modules in fp32 is what transformers' classes say."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from fsdp_advisor import estimate
from fsdp_advisor.model.fp32_modules import FP32_MODULES


@pytest.mark.slow
def test_the_types_are_those_of_transformers_classes() -> None:
    transformers = pytest.importorskip("transformers")
    files = sorted(Path(transformers.__file__).parent.glob("models/*/modeling_*.py"))
    assert {path.parent.name for path in files if _names_modules(path.read_text("utf-8"))} == FP32_MODULES


def _names_modules(source: str) -> bool:
    """Whether a class of this source sets `_keep_in_fp32_modules` or `_keep_in_fp32_modules_strict` to names."""
    if "_keep_in_fp32_modules" not in source:
        return False
    return any(
        isinstance(target, ast.Name) and target.id.startswith("_keep_in_fp32_modules") and getattr(value, "elts", None)
        for target, value in _assignments(source)
    )


def _assignments(source: str) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assign):
            yield node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign):
            yield node.target, node.value


@pytest.mark.parametrize(("model", "noted"), [("meta-llama/Llama-2-7b-hf", False), ("openai/gpt-oss-20b", True)])
def test_deepspeed_rows_of_such_models_alone_have_a_note(model: str, noted: bool) -> None:
    (row,) = estimate(model=model, gpus=8, gpu="H100", strategy="zero3", backend="deepspeed").estimates
    assert any("keeps in fp32" in note for note in row.not_modelled) == noted
