"""The options about the samples of a step: batch and sequence length, packing, padding, and images."""

from __future__ import annotations

from typing import Annotated

from fsdp_advisor.job.choices import (
    DEFAULT_SEQ_LEN,
    MAX_BATCH,
    MAX_GPUS,
    MAX_SEQ_LEN,
    Packing,
)
from fsdp_advisor.job.fields import Rule
from fsdp_advisor.job.images import read_image_size

GROUP = "Training"

MICRO_BATCH_SIZE = Rule(
    about="the number of sequences per rank and forward pass",
    group=GROUP,
    ge=1,
    le=MAX_BATCH,
    aliases=("per_device_train_batch_size",),
)
ACCUMULATION = Rule(
    about="the number of micro-batches per optimizer step",
    group=GROUP,
    ge=1,
    le=MAX_BATCH,
)
MicroBatchSize = Annotated[int, MICRO_BATCH_SIZE]
SeqLen = Annotated[
    int | None,
    Rule(
        about="the number of tokens per sequence",
        group=GROUP,
        ge=1,
        le=MAX_SEQ_LEN,
        aliases=("max_length",),
        default=f"{DEFAULT_SEQ_LEN}, or the model's maximum if smaller",
    ),
]
GradientAccumulationSteps = Annotated[int, ACCUMULATION]
IgnoredLabels = Annotated[
    float,
    Rule(
        about="the fraction of the labels that is -100, such as those of prompts: 0.3; a chunked loss leaves them out",
        group=GROUP,
        ge=0,
        le=0.999,
    ),
]
PackingOption = Annotated[
    Packing,
    Rule(
        about="rows without padding: bfd packs whole sequences, wrapped cuts sequences at the end of a row",
        group=GROUP,
        synonyms={"bfd_split": "bfd", "bfd_requeue": "bfd", "true": "bfd", "false": "none", "no": "none"},
    ),
]
PaddingFree = Annotated[
    bool,
    Rule(
        about="make each micro-batch one row of tokens, without padding and mask",
        group=GROUP,
    ),
]
PaddingFraction = Annotated[
    float,
    Rule(
        about="the fraction of the tokens that is padding; speeds do not count padding",
        group=GROUP,
        ge=0,
        le=0.99,
    ),
]
ImagesPerSample = Annotated[
    int,
    Rule(
        about="the number of images in each sample; their tokens are part of the sequence length",
        group=GROUP,
        ge=0,
        le=1024,
    ),
]
ImageSize = Annotated[
    str | None,
    Rule(
        about="the size of the images in pixels, as WIDTHxHEIGHT, before the processor resizes or tiles them",
        group=GROUP,
        metavar="SIZE",
        max_length=16,
        default="the model's own, if it has one",
        word=read_image_size,
        example="1024x768, or 448 for a square",
    ),
]
ImageMaxPixels = Annotated[
    int | None,
    Rule(
        about="the number of pixels to which the processor resizes larger images (Qwen-VL, GLM-V)",
        group=GROUP,
        ge=1,
        le=2**28,
        default="as in the checkpoints of the type",
    ),
]
GlobalBatchSize = Annotated[
    int | None,
    Rule(
        about="the number of sequences per optimizer step over all ranks; accumulation follows from it, and in a search the "
        "micro-batch too",
        group=GROUP,
        ge=1,
        le=MAX_BATCH * MAX_GPUS,
    ),
]
