"""Step programs as text, compared with files: what each engine allocates, sends and waits for, in order.

A difference in a golden file is a change of an engine. Check it against the engine's source before you accept it with
`--update-golden`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from jobs import Job, job, program_of

CASES: dict[str, tuple[str, str, str, dict[str, Any]]] = {
    # file: (strategy, backend, offload, options)
    "ddp.txt": ("ddp", "ddp", "none", {}),
    "deepspeed_zero1.txt": ("zero1", "deepspeed", "none", {}),
    "deepspeed_zero2.txt": ("zero2", "deepspeed", "none", {}),
    "deepspeed_zero3.txt": ("zero3", "deepspeed", "none", {}),
    "fsdp1_zero3.txt": ("zero3", "fsdp1", "none", {}),
    "fsdp2_zero2.txt": ("zero2", "fsdp2", "none", {}),
    "fsdp2_zero2_accelerate_accumulation.txt": (
        "zero2",
        "fsdp2",
        "none",
        {"framework": "accelerate", "gradient_accumulation_steps": 2},
    ),
    "fsdp2_zero3.txt": ("zero3", "fsdp2", "none", {}),
    "fsdp2_zero3_offload.txt": ("zero3", "fsdp2", "parameters", {}),
    "fsdp2_zero3_wrap_none.txt": ("zero3", "fsdp2", "none", {"wrap": "none"}),
    "fsdp2_hsdp.txt": ("hsdp", "fsdp2", "none", {}),
}


def few_layers(strategy: str, backend: str, offload: str, **options: Any) -> Job:
    """GPT-2 with five layers: the first two, the last two, and one of those between, which are all equal."""
    profile, tape, plan = job("openai-community/gpt2", strategy, backend, offload, **options)
    (layers,) = profile.stacks
    runs = tuple(run._replace(repeats=1) for run in layers.runs)
    return replace(profile, stacks=(replace(layers, runs=runs),)), tape, plan


@pytest.mark.parametrize("name", CASES)
def test_a_printed_program_equals_its_golden_file(name: str, golden: Callable[[str, str], None]) -> None:
    strategy, backend, offload, options = CASES[name]
    golden(name, str(program_of(*few_layers(strategy, backend, offload, **options))))
