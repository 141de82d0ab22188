"""States and temporaries of optimizers that need a GPU, on a simulated one, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import prod

import pytest

from fsdp_advisor.engines.fsdp2.units import shard_shape
from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.optimizers import bitsandbytes, torchao
from fsdp_advisor.policies.optimizers.interface import Constructor, Optimizer
from fsdp_advisor.program.storages import NO_STORAGES

pytestmark = pytest.mark.slow

SHAPES = [(96, 128), (2000,), (64, 300), (4096,), (400, 300), (100_001,), (3, 5)]
"""Above and below the sizes from which states of bitsandbytes have 8 bits, and from which they are paged."""
COMPILED_SHAPES = [(512, 96), (8192,), (2000,)]
"""Of optimizers that torch.compile compiles for each shape."""

Found = dict[str, dict[str, int]]
Run = Callable[..., Found]


def stepped(run: Run, optimizers: Sequence[Optimizer], shapes: Sequence[tuple[int, ...]], ranks: int = 1) -> Found:
    made = {optimizer.name: optimizer.script for optimizer in optimizers}
    words = {name: (c.module, c.name, c.options) for name, c in made.items() if isinstance(c, Constructor)}
    return run("optimizers.py", json.dumps(words), json.dumps(shapes), str(ranks))


def predicted(optimizer: Optimizer, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    each = [(Parameter(name="p", shape=shape), shape) for shape in shapes]
    state = sum((optimizer.state_storages(p, shape, 4) for p, shape in each), optimizer.shared_state)
    temporaries = [optimizer.step_temporaries(p, shape, 4, "torch").exact for p, shape in each]
    paged = sum((optimizer.paged_state_storages(prod(shape)) for shape in shapes), NO_STORAGES)
    return {
        "state": state.exact,
        "paged": paged.exact,
        "temporaries": max(temporaries) if optimizer.steps_one_by_one("torch") else sum(temporaries),
    }


@pytest.fixture(scope="module")
def of_bitsandbytes(run: Run) -> Found:
    return stepped(run, bitsandbytes.ALL, SHAPES)


@pytest.mark.parametrize("optimizer", bitsandbytes.ALL, ids=lambda optimizer: optimizer.name)
def test_bitsandbytes_allocates_what_is_predicted(optimizer: Optimizer, of_bitsandbytes: Found) -> None:
    assert of_bitsandbytes[optimizer.name] == predicted(optimizer, SHAPES)


def test_torchao_allocates_what_is_predicted_on_the_shards_of_fsdp2(run: Run) -> None:
    optimizers = (torchao.ADAMW_8BIT, torchao.ADAMW_4BIT)
    found = stepped(run, optimizers, COMPILED_SHAPES, ranks=2)
    local = [shard_shape(shape, 2) for shape in COMPILED_SHAPES]
    assert found == {optimizer.name: predicted(optimizer, local) for optimizer in optimizers}
