"""Losses in tiles are recorded for any micro-batch and length: their work does not depend on how large a tile is."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_llama import LLAMA

from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.recording.adapted import source_of
from fsdp_advisor.recording.recorder import Recorder

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("options", [{"loss": "trl"}, {"loss": "trl", "task": "dpo"}, {"loss": "liger"}], ids=str)
def test_sizes_and_work_are_polynomials(options: dict[str, Any]) -> None:
    config = {**LLAMA, "max_position_embeddings": 8192}  # so that more tokens than a tile has are recorded too
    recorder = Recorder(source_of(config, name="tiny"))
    assert recorder.tape(TapeKey("plain", "bf16", "sdpa", "none", **options)).segments
