"""Which parameters GaLore and APOLLO project, compared with the classes of the modules of the catalog's models."""

from __future__ import annotations

from typing import Any

import pytest
from matrix import is_installed, of_today

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from fsdp_advisor.model import catalog  # after the check for torch
from fsdp_advisor.policies.optimizers.low_rank import is_linear_weight

pytestmark = pytest.mark.slow

CONV1D = {"gpt2"}
"""Refused: the layers' modules are no nn.Linear."""
ROUTERS = ("router.weight",)
"""Routers of experts are nn.Linear in one class and not in the other, which their names do not show. They are small."""
TYPES = {
    entry.model_type: entry
    for entry in reversed(catalog.entries())
    if entry.task == "causal-lm" and is_installed(entry.model_type)
}


def linear_weights(config: dict[str, Any]) -> dict[str, bool]:
    """Whether each parameter of a model with this configuration is the weight of an nn.Linear."""
    made = transformers.AutoConfig.for_model(**config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(made)
    modules = dict(model.named_modules())
    return {
        name: isinstance(modules[name.rpartition(".")[0]], torch.nn.Linear) and name.endswith(".weight")
        for name, _ in model.named_parameters()
    }


@pytest.mark.parametrize("model_type", of_today(sorted(TYPES.keys() - CONV1D), 6))
def test_the_weights_of_linear_modules_are_recognized(model_type: str) -> None:
    entry = TYPES[model_type]
    real = linear_weights(catalog.configurations()["configs"][entry.id])
    checked = 0
    for unit, _ in catalog.profile(entry).counted_units():
        for parameter in unit.parameters:
            if parameter.name.endswith(ROUTERS):
                continue
            names = [name for name in real if name == parameter.name or name.endswith("." + parameter.name)]
            if len({real[name] for name in names}) == 1:
                assert is_linear_weight(parameter) == real[names[0]], parameter.name
                checked += 1
    assert checked > 5
