"""Training tasks: search words, the unit of throughput, and the form of one sample."""

from __future__ import annotations

from dataclasses import dataclass

SOUND_SECONDS = 30
"""Seconds of sound in a sample of a model with a sound encoder and a text decoder."""
FRAMES_PER_LABEL = 4
"""The assumed number of frames of 20 ms per character of a transcript. English speech has some 13 characters per second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One training task."""

    words: tuple[str, ...]
    """Words that find models of this task, in addition to its name."""
    counted: str = "tokens"
    """The unit of throughput."""
    sample: str = "{} tokens"
    """The description of one sample in messages; {} is its length in tokens."""
    has_root_units: bool = False
    """Whether accelerate's FSDP2 makes separate units of the embedding and the head. An image model's embedding is the convolution over
    its patches.
    """
    takes_any_length: bool = True
    """Whether the user chooses the sequence length. If not, the model fixes it, as for images."""

    def samples_or_tokens(self, tokens: float, seq_len: int) -> float:
        """A number of tokens in the unit that the task counts: tokens, or images of `seq_len` tokens.

        >>> task_of("causal-lm").samples_or_tokens(1970, 197), task_of("image-classification").samples_or_tokens(1970, 197)
        (1970, 10.0)
        """
        return tokens if self.takes_any_length else tokens / seq_len

    def of_length(self, seq_len: int, *, images: int = 0) -> str:
        """The description of one sample of `seq_len` tokens, which include those of its `images`.

        >>> task_of("causal-lm").of_length(2048), task_of("causal-lm").of_length(1)
        ('2048 tokens', '1 token')
        >>> task_of("image-classification").of_length(197)
        'images of 197 tokens'
        >>> task_of("image-text-to-text").of_length(2048, images=1)
        '2048 tokens, 1 image included'
        """
        words = self.sample.replace("{}", str(seq_len))
        if images:
            words = words.replace(" of text", f", {images} image{'s' if images > 1 else ''} included")
        return words.replace(" tokens", " token") if seq_len == 1 else words


TASKS: dict[str, Task] = {
    "causal-lm": Task(words=("decoder", "text"), has_root_units=True),
    "masked-lm": Task(words=("encoder", "text")),
    "sequence-classification": Task(words=("decoder", "text", "reward"), has_root_units=True),
    "seq2seq-lm": Task(words=("encoder-decoder", "text"), sample="{} tokens in and out"),
    "speech-seq2seq": Task(
        words=("encoder-decoder", "speech", "audio"), sample="{} tokens of text", has_root_units=True
    ),
    "ctc": Task(words=("encoder", "speech", "audio"), counted="frames", sample="sound of {} frames"),
    "audio-classification": Task(words=("encoder", "speech", "audio"), counted="frames", sample="sound of {} frames"),
    "token-classification": Task(words=("encoder", "text"), has_root_units=True),
    "image-classification": Task(
        words=("encoder", "vision", "image"),
        counted="images",
        sample="images of {} tokens",
        has_root_units=True,
        takes_any_length=False,
    ),
    "image-text-to-text": Task(
        words=("decoder", "vision", "image", "text"), sample="{} tokens of text", has_root_units=True
    ),
}
"""Every task, by the name that profiles use."""

AUTO_CLASSES = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq2seq-lm": "AutoModelForSeq2SeqLM",
    "speech-seq2seq": "AutoModelForSpeechSeq2Seq",
    "image-classification": "AutoModelForImageClassification",
    "image-text-to-text": "AutoModelForImageTextToText",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "ctc": "AutoModelForCTC",
    "audio-classification": "AutoModelForAudioClassification",
}
"""The transformers class that loads a model for training, by task, in the order in which a recording looks for one."""

SAMPLES = "samples"
"""The name of the task of a recorded module whose batches have no sequence length."""
MODULE_TASKS = {
    "module": Task(words=()),
    SAMPLES: Task(words=(), counted="samples", sample="samples", takes_any_length=False),
}
"""The tasks of recorded modules. The meaning of a sequence length depends on the module's batches."""


def task_of(name: str | None) -> Task:
    """The task of that name; a task without search words if the name is unknown or None."""
    return TASKS.get(name or "") or MODULE_TASKS.get(name or "", MODULE_TASKS["module"])
