"""States and temporaries of optimizers that need a GPU, on a simulated one, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod

import pytest

from fsdp_advisor.job.request import OptimizerName
from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.optimizers import bitsandbytes, optimizer_named
from fsdp_advisor.policies.optimizers.interface import Constructor
from fsdp_advisor.program.storages import NO_STORAGES

pytestmark = pytest.mark.slow

NAMES: tuple[OptimizerName, ...] = tuple(optimizer.name for optimizer in bitsandbytes.ALL)
SHAPES = [(96, 128), (2000,), (64, 300), (4096,), (400, 300), (100_001,), (3, 5)]
"""Above and below the sizes from which states have 8 bits, and from which they are paged."""


@pytest.fixture(scope="module")
def found(run: Callable[..., dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    made = {name: optimizer_named(name).script for name in NAMES}
    words = {name: (c.module, c.name, c.options) for name, c in made.items() if isinstance(c, Constructor)}
    return run("optimizers.py", json.dumps(words), json.dumps(SHAPES))


@pytest.mark.parametrize("name", NAMES)
def test_state_and_temporaries_on_a_gpu_are_the_predicted_ones(name: OptimizerName, found) -> None:
    optimizer = optimizer_named(name)
    each = [(Parameter(name="p", shape=shape), shape) for shape in SHAPES]
    state = sum((optimizer.state_storages(p, shape, 4) for p, shape in each), optimizer.shared_state)
    temporaries = sum((optimizer.step_temporaries(p, shape, 4, "torch") for p, shape in each), NO_STORAGES)
    paged = sum((optimizer.paged_state_storages(prod(shape)) for shape in SHAPES), NO_STORAGES)
    assert found[name] == {"state": state.exact, "paged": paged.exact, "temporaries": temporaries.exact}
