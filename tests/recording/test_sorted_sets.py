"""Recordings do not depend on the order of a process's sets."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import pytest
from matrix import in_turn, of_today
from vision_models import config_of

pytest.importorskip("torch")

from fsdp_advisor.model.store import dump
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.recording import Recorder, TransformersSource
from fsdp_advisor.recording.sorted_sets import sorted_sets

LETTERS = "zyxwvutsrqponmlkjihgfedcba"


def test_sets_of_model_code_iterate_in_sorted_order() -> None:
    import transformers.masking_utils as masks
    import transformers.models.gemma3.modeling_gemma3 as code

    with sorted_sets():
        assert list(code.set(LETTERS)) == list(masks.set(LETTERS)) == sorted(LETTERS)
    assert not hasattr(code, "set") and not hasattr(masks, "set")


def recorded(kind: str) -> str:
    """A hash of a recording of a small Gemma 3, whose code makes rotations in the order of a set of the kinds of its layers, or of a small
    Gemma 4 with a vision encoder, for which transformers makes masks in such an order.
    """
    if kind == "gemma3":
        config = {**config_of("gemma3")["text_config"], "model_type": "gemma3_text"}
        recorder = Recorder(TransformersSource(config, name="window", task="causal-lm"))
        key = TapeKey("fsdp2", "bf16-mixed", "sdpa", "none", device="gpu", at=(2, 64))
    else:
        recorder = Recorder(TransformersSource(config_of(kind), name=kind, task="image-text-to-text"))
        key = TapeKey("fsdp2", "bf16-mixed", "sdpa", "none", at=(1, 300))
    recorder.profile.tapes[key.name] = recorder.tape(key)
    return hashlib.sha256(dump(recorder.profile)).hexdigest()


@pytest.mark.parametrize("kind", of_today(["gemma3", "gemma4"], days=2))
@in_turn(2, of=7)
def test_recordings_are_equal_in_processes_with_other_hash_seeds(kind: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    made = {
        subprocess.run(
            [sys.executable, "-c", f"from test_sorted_sets import recorded; print(recorded({kind!r}))"],
            env={**environment, "PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in "01"
    }
    assert len(made) == 1
