"""The workspace of an embedding's gradient in a step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from jobs import job, operations_of

from fsdp_advisor.engines.registry import step_program
from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.program.embedding_workspace import embedding_workspace_bytes
from fsdp_advisor.program.storages import round_up

LLAMA, TIED, PER_LAYER = "meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.2-1B", "google/gemma-4-E2B"


def workspaces(*arguments: Any, resident_threads: int = find_gpu("H100-80GB").resident_threads, **options: Any) -> int:
    """How many workspaces of 8,192 indices' gradient the step allocates: (rows, columns) are those of the first embedding."""
    profile, tape, plan = job(*arguments, micro_batch_size=4, seq_len=2048, **options)
    rows, columns = next(p.shape for p in profile.root.parameters if p.role == "embedding")
    requests = Counter(operations_of(profile, tape, plan, resident_threads=resident_threads).requests)
    return requests[round_up(embedding_workspace_bytes(4 * 2048, rows, columns)[-1])]


@pytest.mark.parametrize("model", [LLAMA, TIED])
@pytest.mark.parametrize(
    ("strategy", "backend"), [("ddp", "ddp"), ("zero3", "fsdp2"), ("zero3", "fsdp1"), ("zero3", "deepspeed")]
)
def test_every_engine_allocates_it(model: str, strategy: str, backend: str) -> None:
    assert workspaces(model, strategy, backend) == 1


def test_every_micro_batch_allocates_it() -> None:
    assert workspaces(TIED, "ddp", "ddp", gradient_accumulation_steps=2) == 2


def test_a_cpu_does_not_allocate_it() -> None:
    assert workspaces(LLAMA, "zero3", "fsdp2", resident_threads=0) == 0


def test_compiled_code_does_not_allocate_it() -> None:
    """Compiled layers leave the embedding as it is, but for accelerate's, which compiles the modules around them too."""
    profile, tape, plan = job(LLAMA, "ddp", "ddp")
    compiled = {code: replace(plan, compile=code) for code in ("layer", "model")}
    compiled["regions"] = replace(plan, compile="layer", framework="accelerate")
    found = {code: len(step_program(profile, tape, p).layout.embedding_gradients) for code, p in compiled.items()}
    assert found == {"layer": 1, "model": 0, "regions": 0}


def test_each_embedding_of_tokens_has_its_own() -> None:
    profile, tape, plan = job(PER_LAYER, "ddp", "ddp")
    found = step_program(profile, tape, plan).layout.embedding_gradients.values()
    assert [(each.rows, each.columns) for each in found] == [(262144, 8960), (262144, 1536)]


def test_two_stacks_share_an_embedding() -> None:
    profile, tape, plan = job("google-t5/t5-small", "ddp", "ddp")
    assert len(step_program(profile, tape, plan).layout.embedding_gradients) == 2


def test_the_embedding_of_patches_has_none() -> None:
    profile, tape, plan = job("google/vit-base-patch16-224", "ddp", "ddp", seq_len=197)
    assert not step_program(profile, tape, plan).layout.embedding_gradients
