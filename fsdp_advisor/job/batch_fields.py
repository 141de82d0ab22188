"""The options about the samples of a step: batch and sequence length, packing, padding, and images."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated

from fsdp_advisor.job.choices import DEFAULT_SEQ_LEN, MAX_BATCH, MAX_GPUS, MAX_SEQ_LEN, Packing
from fsdp_advisor.job.fields import Rule

rule = partial(Rule, group="Training")
LARGEST_SIDE = 16_384
"""The largest accepted side of an image, in pixels."""
_SIZE = re.compile(r"(\d{1,5})(?:\s*[x*,]\s*(\d{1,5}))?")


def read_image_size(text: str) -> str | None:
    """The canonical spelling of an image's size; None for an impossible size or other text.

    >>> read_image_size("1024 x 768"), read_image_size("448"), read_image_size("0")
    ('1024x768', '448x448', None)
    """
    found = _SIZE.fullmatch(text.strip().lower())
    if found is None:
        return None
    width, height = int(found[1]), int(found[2] or found[1])
    return f"{width}x{height}" if min(width, height) > 0 and max(width, height) <= LARGEST_SIDE else None


MICRO_BATCH_SIZE = rule(
    "the number of sequences per rank and forward pass", ge=1, le=MAX_BATCH, aliases=("per_device_train_batch_size",)
)
ACCUMULATION = rule("the number of micro-batches per optimizer step", ge=1, le=MAX_BATCH)
MicroBatchSize = Annotated[int, MICRO_BATCH_SIZE]
SeqLen = Annotated[
    int | None,
    rule(
        "the number of tokens per sequence",
        ge=1,
        le=MAX_SEQ_LEN,
        aliases=("max_length",),
        default=f"{DEFAULT_SEQ_LEN}, or the model's maximum if smaller",
    ),
]
GradientAccumulationSteps = Annotated[int, ACCUMULATION]
IgnoredLabels = Annotated[
    float,
    rule(
        "the fraction of the labels that is -100, such as those of prompts: 0.3; a chunked loss leaves them out",
        ge=0,
        le=0.999,
    ),
]
PackingOption = Annotated[
    Packing,
    rule(
        "rows without padding: bfd packs whole sequences, wrapped cuts sequences at the end of a row",
        synonyms={"bfd_split": "bfd", "bfd_requeue": "bfd", "true": "bfd", "false": "none", "no": "none"},
    ),
]
PaddingFree = Annotated[bool, rule("make each micro-batch one row of tokens, without padding and mask")]
PaddingFraction = Annotated[
    float, rule("the fraction of the tokens that is padding; speeds do not count padding", ge=0, le=0.99)
]
ImagesPerSample = Annotated[
    int, rule("the number of images in each sample; their tokens are part of the sequence length", ge=0, le=1024)
]
ImageSize = Annotated[
    str | None,
    rule(
        "the size of the images in pixels, as WIDTHxHEIGHT, before the processor resizes or tiles them",
        metavar="SIZE",
        max_length=16,
        default="the model's own, if it has one",
        word=read_image_size,
        example="1024x768, or 448 for a square",
    ),
]
ImageMaxPixels = Annotated[
    int | None,
    rule(
        "the number of pixels to which the processor resizes larger images (Qwen-VL, GLM-V)",
        ge=1,
        le=2**28,
        default="as in the checkpoints of the type",
    ),
]
GlobalBatchSize = Annotated[
    int | None,
    rule(
        "the number of sequences per optimizer step over all ranks; accumulation follows from it, and in a search the "
        "micro-batch too",
        ge=1,
        le=MAX_BATCH * MAX_GPUS,
    ),
]
