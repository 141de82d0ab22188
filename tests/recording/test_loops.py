"""Steps with a loop over the sequence, made from short sequences: equal to recordings of long ones, to the byte."""

from __future__ import annotations

from typing import Any

import pytest
from matrix import of_today

pytest.importorskip("torch")

from fsdp_advisor.job.losses import LossCode
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.model.tape_key import TapeCheckpointing, TapeEngine, TapeKey
from fsdp_advisor.recording import recorder, short_sequences
from fsdp_advisor.recording.loops import NotRepeated
from fsdp_advisor.recording.recorder import Recorder
from fsdp_advisor.recording.transformers_models import TransformersSource

MAMBA = {
    "model_type": "mamba", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "state_size": 4, "time_step_rank": 2,
    "vocab_size": 320,
}  # fmt: skip
LENGTH = 270
"""A little more than the shortest sequence that is made from shorter ones."""


def tape(engine: TapeEngine, checkpointing: TapeCheckpointing, length: int, loss: LossCode = "full") -> Tape:
    key = TapeKey(
        engine, "bf16-mixed", "eager", checkpointing, True, device="gpu", loss=loss, without_packages="mamba-ssm,causal-conv1d",
        at=(1, length),
    )  # fmt: skip
    return Recorder(TransformersSource(MAMBA, name="mamba", task="causal-lm")).tape(key)


def refuse(*_: Any) -> None:
    raise NotRepeated


@pytest.mark.parametrize(("engine", "checkpointing"), of_today([("plain", "none"), ("fsdp2", "full")], days=2))
def test_step_made_from_short_sequences_is_that_of_the_long_one(
    engine: TapeEngine, checkpointing: TapeCheckpointing, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    of_short_sequences = short_sequences.with_iterations

    def counted(steps: Any, more: int) -> Any:
        made.append(more)
        return of_short_sequences(steps, more)

    monkeypatch.setattr(short_sequences, "with_iterations", counted)
    from_short = tape(engine, checkpointing, LENGTH)
    assert made[-1] == LENGTH - short_sequences.LOOPS[0]
    monkeypatch.setattr(short_sequences, "with_iterations", refuse)
    recorded = tape(engine, checkpointing, LENGTH)
    assert (recorded.sizes, recorded.segments) == (from_short.sizes, from_short.segments)


def test_short_sequence_is_recorded_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_sequences, "with_iterations", refuse)
    assert tape("plain", "none", 8).segments


def test_blocks_of_a_loss_that_are_longer_than_the_short_sequences_are_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cut cross entropy allocates a lock for 128 tokens, so that all short sequences have one, and this has three."""
    monkeypatch.setattr(recorder, "step_of_short_sequences", lambda *_: pytest.fail("made from short sequences"))
    assert 4 * 3 in {size[0] for size in tape("plain", "none", LENGTH, "cce").sizes if not hasattr(size, "_fields")}
