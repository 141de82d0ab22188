"""Which models keep modules in fp32 is what transformers' classes say."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from matrix import is_installed, of_today

from fsdp_advisor import estimate
from fsdp_advisor.model import catalog
from fsdp_advisor.model.fp32_modules import FP32_MODULES, weights_in_fp32
from fsdp_advisor.model.tasks import AUTO_CLASSES


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


GLM, ERNIE, LLAMA = "zai-org/GLM-4.5-Air", "baidu/ERNIE-4.5-21B-A3B-PT", "meta-llama/Llama-2-7b-hf"


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (GLM, {"precision": "bf16"}, "transformers 5.24 loads mlp.gate.weight in fp32"),
        (GLM, {"precision": "bf16", "backend": "fsdp1"}, "transformers 5.24 loads mlp.gate.weight in fp32"),
        (GLM, {"precision": "bf16-mixed", "dtype": "bfloat16"}, "transformers 5.24 loads"),
        (GLM, {"precision": "bf16-mixed", "dtype": "bfloat16", "framework": "trainer"}, ""),
        (GLM, {"precision": "bf16", "backend": "deepspeed"}, ""),
        (GLM, {}, ""),
        (ERNIE, {"precision": "bf16"}, "transformers loads mlp.gate.weight in fp32"),
        (LLAMA, {"precision": "bf16"}, ""),
    ],
)
def test_fsdp_rows_in_16_bits_warn_of_weights_that_stay_in_fp32(model: str, options: dict[str, str], said: str) -> None:
    (row,) = estimate(model=model, gpus=8, gpu="B300", strategy="zero3", **options).estimates  # type: ignore[arg-type]
    found = [warning for warning in row.warnings if "FSDP stops, because it needs one dtype" in warning]
    assert len(found) == bool(said) and all(said in warning for warning in found)


SMALLEST = {
    entry.model_type: entry
    for entry in sorted(catalog.entries(), key=lambda entry: -entry.parameters)
    if is_installed(entry.model_type)
}
"""Model type -> its smallest model in the catalog."""


@pytest.mark.slow
@pytest.mark.parametrize("entry", of_today(list(SMALLEST.values()), 25), ids=lambda entry: entry.model_type)
def test_weights_in_fp32_are_those_that_transformers_loads_so(entry: catalog.Entry) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = catalog.configurations()["configs"][entry.id]
    classes = getattr(transformers, AUTO_CLASSES[entry.task])
    with torch.device("meta"):
        model = classes.from_config(transformers.AutoConfig.for_model(**copy.deepcopy(config)))
    kept = {name for module in model.modules() for name in getattr(module, "_keep_in_fp32_modules_strict", None) or ()}
    loaded_so = re.compile(rf"(^|\.)({'|'.join(kept) or '$^'})(\.|$)")
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    weight = weights_in_fp32(catalog.profile(entry))
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    expected = weight is not None and (not weight[1] or version >= (5, 24))
    assert any(map(loaded_so.search, trained)) == expected
