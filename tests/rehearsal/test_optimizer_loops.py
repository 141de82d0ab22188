"""States and temporaries of optimizers that loop over the parameters in Python, compared with the real packages on a simulated GPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from matrix import in_turn

from fsdp_advisor.job.choices import OptimizerName
from fsdp_advisor.job.projection import DEFAULT
from fsdp_advisor.model.profile import Parameter
from fsdp_advisor.policies.optimizers import adam_mini, low_rank, optimizer_named
from fsdp_advisor.policies.optimizers.interface import Stepped

pytestmark = in_turn(4, of=5)

Run = Callable[..., dict[str, dict[str, int]]]

PARAMETERS = (
    Parameter("model.embed_tokens.weight", (1000, 192), role="embedding"),
    Parameter("self_attn.q_proj.weight", (320, 192)),
    Parameter("self_attn.q_proj.bias", (320,)),
    Parameter("self_attn.o_proj.weight", (192, 320)),
    Parameter("mlp.up_proj.weight", (768, 192)),
    Parameter("mlp.down_proj.weight", (192, 768)),
    Parameter("model.norm.weight", (192,), role="final_norm"),
    Parameter("narrow.weight", (96, 400)),
    Parameter("lm_head.weight", (1000, 192), role="head"),
)
"""Tall, wide, square and narrower than the rank."""
LOW_RANK = {"rank": DEFAULT.rank, "update_proj_gap": 3, "scale": 0.25, "proj_type": "std"}
LOOPS: dict[OptimizerName, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "galore_adamw": ("galore_torch", "GaLoreAdamW", {}, LOW_RANK),
    "galore_adafactor": (
        "galore_torch",
        "GaLoreAdafactor",
        {"scale_parameter": False, "relative_step": False},
        LOW_RANK,
    ),
    "galore_adamw_8bit": ("galore_torch", "GaLoreAdamW8bit", {}, LOW_RANK),
    "grokadamw": ("grokadamw", "GrokAdamW", {}, {}),
    "adam_mini": ("adam_mini", "Adam_mini", {"dim": 192, "n_heads": 12, "verbose": False}, {}),
    "apollo_adamw": (
        "apollo_torch",
        "APOLLOAdamW",
        {},
        {**LOW_RANK, "proj": "random", "scale_type": "channel", "scale": 1.0},
    ),
}
"""Module, class, options, and options of the group of linear layers."""
DTYPES = {"float32": 4, "bfloat16": 2}
CASES = [(name, dtype) for name in LOOPS for dtype in DTYPES]
HEADS = 20
"""Of `self_attn.q_proj`, by Adam-mini's division: 320 * 192 elements by 192 * 192 / 12."""


@pytest.fixture(scope="module")
def found(run: Run) -> dict[str, dict[str, int]]:
    words = {}
    for name, dtype in CASES:
        module, cls, options, group = LOOPS[name]
        linear = [low_rank.is_linear_weight(p) for p in PARAMETERS]
        tensors = [
            [p.name, p.shape, dtype, group if group and is_linear else {}]
            for p, is_linear in sorted(zip(PARAMETERS, linear, strict=True), key=lambda pair: bool(group) and pair[1])
        ]
        words[f"{name} {dtype}"] = (module, cls, options, tensors)
    return run("loops.py", json.dumps(words))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_loop_allocates_what_is_predicted(name: OptimizerName, dtype: str, found: dict[str, dict[str, int]]) -> None:
    assert found[f"{name} {dtype}"] == predicted(name, PARAMETERS, DTYPES[dtype])


def predicted(name: OptimizerName, parameters: Sequence[Parameter], element_bytes: int) -> dict[str, int]:
    optimizer = optimizer_named(name)
    if isinstance(optimizer, adam_mini.AdamMini):
        optimizer = replace(optimizer, heads=HEADS)
    state = sum((optimizer.state_storages(p, p.shape, element_bytes) for p in parameters), optimizer.shared_state)
    variables = optimizer.loop([Stepped(p, p.shape, element_bytes) for p in parameters])
    assert variables is not None
    return {"state": state.exact, "temporaries": variables.peak_bytes}
