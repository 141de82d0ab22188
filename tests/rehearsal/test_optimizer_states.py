"""States and temporaries of optimizers that need a GPU, on a simulated one, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import prod
from typing import get_args

import pytest
from matrix import in_turn, taken, with_all_cases

from fsdp_advisor.engines.fsdp_shards import shard_shape
from fsdp_advisor.job.choices import OptimizerName
from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.optimizers import cpu_offload, muon, optimizer_named, stable_adamw, torchao
from fsdp_advisor.policies.optimizers.bitsandbytes import Bitsandbytes
from fsdp_advisor.policies.optimizers.deepspeed_muon import update_temporaries
from fsdp_advisor.policies.optimizers.interface import Constructor, Optimizer, Shards
from fsdp_advisor.program.storages import NO_STORAGES

pytestmark = in_turn(3, of=5)

OF_BITSANDBYTES = [one for one in map(optimizer_named, get_args(OptimizerName)) if isinstance(one, Bitsandbytes)]

SHAPES = [(96, 128), (2000,), (64, 300), (4096,), (400, 300), (100_001,), (3, 5)]
"""Above and below the sizes from which states of bitsandbytes have 8 bits, and from which they are paged."""
COMPILED_SHAPES = [(512, 96), (8192,), (2000,)]
"""Of optimizers that torch.compile compiles for each shape."""
MUON_RANKS = 8
LAYOUTS = {
    "columns": (512, 256),
    "rows": (250, 600),
    "scattered": (2048, 2048),
    "exchanged": (1024, 8192),
    "whole": (640, 256),
}
"""A matrix for each way in which DTensor multiplies over 8 hosts of one GPU each, and one on a single rank."""

Found = dict[str, dict[str, int]]
Run = Callable[..., Found]


def stepped(run: Run, optimizers: Sequence[Optimizer], shapes: Sequence[tuple[int, ...]], ranks: int = 1) -> Found:
    made = {optimizer.name: optimizer.script for optimizer in optimizers}
    words = {name: (c.module, c.name, c.options, shapes) for name, c in made.items() if isinstance(c, Constructor)}
    return run("optimizers.py", json.dumps(words), str(ranks))


@pytest.fixture(scope="module")
def of_muon(run: Run) -> Found:
    words = {layout: ("torch.optim", "Muon", {}, [shape]) for layout, shape in LAYOUTS.items()}
    whole = {"whole": words.pop("whole")}
    return run("optimizers.py", json.dumps(words), str(MUON_RANKS)) | run("optimizers.py", json.dumps(whole), "1")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_muon_allocates_what_is_predicted_for_each_layout(layout: str, of_muon: Found) -> None:
    shape = LAYOUTS[layout]
    parameter, ranks = Parameter(name="p", shape=shape), 1 if layout == "whole" else MUON_RANKS
    shards, local = Shards(ranks=ranks, ranks_per_node=1), shard_shape(shape, ranks)
    assert muon.layout_of(parameter, shards) == layout
    assert of_muon[layout]["state"] == muon.MUON.state_storages(parameter, local, 4).exact
    assert of_muon[layout]["temporaries"] == muon.MUON.shard_temporaries(parameter, local, 4, shards).exact


@with_all_cases
@pytest.mark.parametrize(("dtype", "halves"), [("bfloat16", True), ("float32", False)])
def test_deepspeeds_muon_allocates_what_is_predicted(dtype: str, halves: bool, run: Run) -> None:
    shapes = [
        (1536, 512),
        (512, 1536),
        (512, 2048),
        (512, 512),
        *([(4, 512, 1024), (4, 512, 512), (3, 640, 512)] * halves),
    ]
    found = run("deepspeed_muon.py", json.dumps(shapes), dtype)
    element_bytes = 2 if halves else 4
    assert found == {str(list(shape)): update_temporaries(shape, element_bytes).exact for shape in shapes}


def predicted(optimizer: Optimizer, shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    each = [(Parameter(name="p", shape=shape), shape) for shape in shapes]
    state = sum((optimizer.state_storages(p, shape, 4) for p, shape in each), optimizer.shared_state)
    temporaries = [optimizer.step_temporaries(p, shape, 4).exact for p, shape in each]
    paged = sum((optimizer.flat_paged_state_storages(prod(shape)) for shape in shapes), NO_STORAGES)
    return {
        "state": state.exact,
        "paged": paged.exact,
        "temporaries": max(temporaries) if optimizer.steps_one_by_one else sum(temporaries),
    }


@pytest.fixture(scope="module")
def of_bitsandbytes(run: Run) -> Found:
    return stepped(run, OF_BITSANDBYTES, SHAPES)


@pytest.mark.parametrize("optimizer", OF_BITSANDBYTES, ids=lambda optimizer: optimizer.name)
def test_bitsandbytes_allocates_what_is_predicted(optimizer: Optimizer, of_bitsandbytes: Found) -> None:
    assert of_bitsandbytes[optimizer.name] == predicted(optimizer, SHAPES)


def test_stable_adamw_allocates_what_is_predicted(run: Run) -> None:
    found = stepped(run, [stable_adamw.STABLE_ADAMW], SHAPES)
    assert found == {"stable_adamw": predicted(stable_adamw.STABLE_ADAMW, SHAPES)}


def test_cpu_offload_allocates_what_is_predicted_on_both_sides(run: Run) -> None:
    optimizer = cpu_offload.ADAMW_CPU_OFFLOAD
    found = stepped(run, [optimizer], SHAPES)
    moved = [shape for shape in SHAPES if optimizer.on_host(prod(shape))]
    states = sum(optimizer.all_state_storages(Parameter("p", shape), shape, 4).exact for shape in moved)
    pinned = 2 * 4 * sum(map(prod, moved))
    assert 0 < len(moved) < len(SHAPES)
    assert found == {optimizer.name: predicted(optimizer, SHAPES) | {"pinned": pinned, "states on the host": states}}


@with_all_cases
def test_torchao_allocates_what_is_predicted(run: Run) -> None:
    optimizers = taken([torchao.ADAMW_8BIT], [torchao.ADAMW_4BIT, torchao.ADAMW_FP8])
    found = stepped(run, optimizers, COMPILED_SHAPES, ranks=1)
    assert found == {optimizer.name: predicted(optimizer, COMPILED_SHAPES) for optimizer in optimizers}
