"""Losses in tiles are recorded for any micro-batch and length: their work does not depend on how large a tile is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from matrix import in_turn, of_today
from tiny_llama import LLAMA

from fsdp_advisor.errors import NotRecordable
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.program.spans import storage_bytes
from fsdp_advisor.recording.adapted import source_of
from fsdp_advisor.recording.recorder import Recorder

pytestmark = pytest.mark.slow


GRPO: dict[str, Any] = {"loss": "trl", "task": "grpo", "completion_length": 512, "generated": 2, "generates": True}


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    config = {**LLAMA, "max_position_embeddings": 8192}  # so that more tokens than a tile has are recorded too
    return Recorder(source_of(config, name="tiny"))


@in_turn(0, of=3)
@pytest.mark.parametrize(
    "options", of_today([{"loss": "trl"}, {"loss": "trl", "task": "dpo"}, {"loss": "liger"}, GRPO], days=2), ids=str
)
def test_sizes_and_work_are_polynomials(recorder: Recorder, options: dict[str, Any]) -> None:
    assert recorder.tape(TapeKey("plain", "bf16", "sdpa", "none", **options)).segments


@in_turn(2, of=3)
@pytest.mark.parametrize("shape", [(2, 600), (9, 2048)], ids=["within one tile", "more than one tile"])
def test_completions_of_grpo_are_scored_in_tiles_of_any_batch(recorder: Recorder, shape: tuple[int, int]) -> None:
    key = TapeKey("plain", "bf16", "sdpa", "none", **GRPO)
    tapes = recorder.tape(key), recorder.tape(replace(key, at=shape))
    of_any, own = (storages(tape, *shape) for tape in tapes)
    assert of_any == own


def storages(tape: Tape, b: int, t: int) -> list[tuple[int, int]]:
    """The bytes and the category of each storage, in the order of allocation."""
    sizes = storage_bytes(tape, b, t)
    return [(sizes[size], category) for births in tape.births for size, category in births]


def test_a_model_that_generates_without_a_cache_is_refused() -> None:
    config = {"model_type": "mpt", "d_model": 64, "n_layers": 2, "n_heads": 4, "vocab_size": 128, "max_seq_len": 2048}
    recorder = Recorder(source_of({**config, "architectures": ["MptForCausalLM"]}, name="mpt"))
    with pytest.raises(NotRecordable, match="without a cache") as refusal:
        recorder.tape(TapeKey("plain", "bf16", "eager", "none", **GRPO, at=(2, 1024)))
    assert "--use-vllm" in (refusal.value.hint or "")
