"""Which long sequences are recorded by short ones, because the model's code runs an iteration for each token or chunk (`loops`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from fsdp_advisor.model.kernels import iteration_tokens
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.recording.loops import NotRepeated, with_iterations
from fsdp_advisor.recording.losses.cce import BLOCK_TOKENS
from fsdp_advisor.recording.raw_steps import RawStep, is_equal
from fsdp_advisor.recording.source import Source
from fsdp_advisor.recording.step import Step

LOOPS = (10, 11, 12, 13)
"""Iterations of the sequences from which the step of a longer one is made (`with_iterations`)."""
CHECKED_LOOPS = (16, 66)
"""Iterations of the sequences that confirm it."""


def tokens_of_loop(source: Source, key: TapeKey) -> int:
    """The tokens of one iteration of the model's loop over the key's sequence. 0 if the step is recorded at its own length: the model has
    no such loop, the sequence is short, or a chunk or window of its configuration changes the step only beyond the checked lengths.
    """
    tokens = iteration_tokens(source.config())
    if key.at is None or not tokens:
        return 0
    known, length = tokens * CHECKED_LOOPS[-1], key.at[1]
    chunks = [*spans(source.config(), "chunk"), *([BLOCK_TOKENS] if key.loss == "cce" else [])]
    same_code = all(size <= known for size in chunks) and all(
        limit is None or length <= limit or limit <= known
        for limit in (source.alike_up_to, *spans(source.config(), "window"))
    )
    return tokens if length >= 4 * known and same_code else 0


def step_of_short_sequences(step: Step, at: tuple[int, int], tokens: int) -> RawStep | None:
    """The step at (B, T), whose loop runs an iteration for each `tokens` tokens, made from steps with few iterations. None if these do not
    follow a common rule.
    """
    b, t = at

    def run(iterations: int) -> RawStep:
        return step.run(b, iterations * tokens + t % tokens)

    shortest = LOOPS[0]
    try:
        steps = [run(iterations) for iterations in LOOPS]
        if all(is_equal(with_iterations(steps, n - shortest), run(n)) for n in CHECKED_LOOPS):
            return with_iterations(steps, t // tokens - shortest)
    except NotRepeated:
        pass
    return None


def spans(config: Mapping[str, object], kind: Literal["chunk", "window"]) -> Iterator[int]:
    """The sizes of chunks or windows, in tokens, that a configuration or a nested one names."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from spans(value, kind)
        elif kind in key and isinstance(value, int) and value > 1:
            yield value
