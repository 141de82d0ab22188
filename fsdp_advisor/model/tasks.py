"""What models are trained on: the words that people call it by, and what one of a micro-batch is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task, by the name that profiles have it under."""

    words: tuple[str, ...]
    """What models of it are searched by, beside the task's own name."""
    counted: str = "tokens"
    """What people count a step's speed in."""
    one: str = "{} tokens"
    """One of a micro-batch, of so many tokens."""
    has_root_units: bool = False
    """Whether accelerate's FSDP2 makes units of its models' embedding and head. Of an image model the embedding is that of patches."""
    takes_any_length: bool = True
    """Whether a sequence may be of any length; else every one has the model's own, as an image has."""

    def of_length(self, seq_len: int) -> str:
        """One of a micro-batch, in words.

        >>> task_of("causal-lm").of_length(2048), task_of("causal-lm").of_length(1)
        ('2048 tokens', '1 token')
        >>> task_of("image-classification").of_length(197)
        'images of 197 tokens'
        """
        words = self.one.replace("{}", str(seq_len))
        return words.replace(" tokens", " token") if seq_len == 1 else words


TASKS: dict[str, Task] = {
    "causal-lm": Task(words=("decoder", "text"), has_root_units=True),
    "masked-lm": Task(words=("encoder", "text")),
    "seq2seq-lm": Task(words=("encoder-decoder", "text"), one="{} tokens in and out"),
    "speech-seq2seq": Task(words=("encoder-decoder", "speech", "audio"), one="{} tokens of text", has_root_units=True),
    "image-classification": Task(
        words=("encoder", "vision", "image"),
        counted="images",
        one="images of {} tokens",
        has_root_units=True,
        takes_any_length=False,
    ),
}
_OF_MODULES = Task(words=())
"""What a recorded module is trained on is not known; T is whatever its batches make of it."""


def task_of(name: str | None) -> Task:
    return TASKS.get(name or "", _OF_MODULES)
