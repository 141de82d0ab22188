"""What models are trained on: the words that people call it by, and what one of a micro-batch is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task, by the name that profiles have it under."""

    words: tuple[str, ...]
    """What models of it are searched by, beside the task's own name."""
    counted: str = "tokens"
    """What a step's speed counts, in the plural."""
    one: str = "{} tokens"
    """One of a micro-batch, of so many tokens."""

    @property
    def has_length(self) -> bool:
        """Whether a step depends on the sequence length."""
        return "{}" in self.one


TASKS: dict[str, Task] = {
    "causal-lm": Task(words=("decoder", "text")),
    "masked-lm": Task(words=("encoder", "text")),
    "seq2seq-lm": Task(words=("encoder-decoder", "text"), one="{} tokens in, {} out"),
    "speech-seq2seq": Task(words=("encoder-decoder", "speech", "audio"), one="{} tokens of text"),
    "image-classification": Task(words=("encoder", "vision", "image"), counted="images", one="an image each"),
}
_OF_MODULES = Task(words=())
"""What a recorded module is trained on is not known; T is whatever its batches make of it."""


def task_of(name: str | None) -> Task:
    return TASKS.get(name or "", _OF_MODULES)


def length_of(task: str | None, seq_len: int) -> str:
    """How long one of a micro-batch is.

    >>> length_of("causal-lm", 2048), length_of("causal-lm", 1), length_of("image-classification", 1)
    ('2048 tokens', '1 token', 'an image each')
    """
    words = task_of(task).one.replace("{}", str(seq_len))
    return words.replace(" tokens", " token") if seq_len == 1 else words
