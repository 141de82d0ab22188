"""How the sequences of a micro-batch lie in its tensors: in rows of equal length, padded, or all in one row.

Source: trl 1.16, trainer/sft_config.py and sft_trainer.py, `DataCollatorForLanguageModeling`; transformers 5.23,
data/data_collator.py, `DataCollatorWithFlattening`.
"""

from __future__ import annotations

from typing import Literal

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.choices import Packing
from fsdp_advisor.job.frameworks import FRAMEWORKS
from fsdp_advisor.job.request import EstimateRequest

BatchLayout = Literal["full", "padded", "flattened", "flattened-trl"]
"""``full``: rows of T tokens without padding; ``padded``: rows of T tokens, some of which an attention mask marks as padding;
``flattened``: one row of all tokens, with position ids and no attention mask; ``flattened-trl``: the same, with the boundaries of the
sequences, which TRL adds.
"""


def flattens(packing: Packing, padding_free: bool) -> bool:
    """Whether a batch is one row of all its tokens. Source: trl 1.16, sft_trainer.py, `__init__`: `self.padding_free`."""
    return padding_free or packing == "bfd"


def check_batch(request: EstimateRequest) -> None:
    """Raises UsageError if the job cannot have the batch layout that its options ask for."""
    flattened = flattens(request.packing, request.padding_free)
    packed = flattened or request.packing != "none"
    _check_images(request, packed=packed)
    if request.padding_fraction and packed:
        raise UsageError("packed and padding-free batches have no padding", hint="leave --padding-fraction out")
    if not packed and not request.padding_fraction:
        return
    if request.task != "sft":
        raise UsageError(
            f"packing and padding are modelled for --task sft, not for {request.task}",
            hint="leave --packing, --padding-free and --padding-fraction out",
        )
    if FRAMEWORKS[request.framework].own_models:
        raise UsageError(
            f"{request.framework} packs its batches itself, as the estimate assumes",
            hint="leave --packing, --padding-free and --padding-fraction out",
        )


def _check_images(request: EstimateRequest, *, packed: bool) -> None:
    """Raises UsageError if the job cannot have images."""
    if not request.images_per_sample:
        return
    if request.task != "sft":
        raise UsageError(
            f"images are modelled for --task sft, not for {request.task}", hint="leave --images-per-sample out"
        )
    if getattr(request, "find", None) == "sequence":
        raise UsageError(
            "--find sequence is not supported with --images-per-sample", hint="leave --find or --images-per-sample out"
        )
    if packed or request.padding_fraction:
        raise UsageError(
            "images in packed or padded batches are not modelled",
            hint="leave --packing, --padding-free and --padding-fraction out, or --images-per-sample",
        )
    if FRAMEWORKS[request.framework].own_models:
        raise UsageError(
            f"{request.framework} has no models that read images", hint="use --framework torch, accelerate or trainer"
        )
