"""The images of a training sample: how many, and their size in pixels."""

from __future__ import annotations

import math
from typing import NamedTuple

from fsdp_advisor.job.request import EstimateRequest


class Images(NamedTuple):
    """The images of every sample of a batch. They are equally large.

    `height`, `width`: in pixels before the processor; 0 for the size that the model fixes. `max_pixels`: the number of pixels to which the
    processor shrinks larger images; 0 for its default.
    """

    per_sample: int
    height: int
    width: int
    max_pixels: int

    def __str__(self) -> str:
        number = "1 image" if self.per_sample == 1 else f"{self.per_sample} images"
        return f"{number} of {self.width} x {self.height} pixels" if self.height else number


def images_of(request: EstimateRequest) -> Images | None:
    """The images of the request's samples; None if there is only text."""
    if not request.images_per_sample:
        return None
    width, height = map(int, request.image_size.split("x")) if request.image_size else (0, 0)
    return Images(request.images_per_sample, height, width, request.image_max_pixels or 0)


def square_of(pixels: int) -> str:
    """The size, as text, of the largest square image with at most `pixels` pixels.

    >>> square_of(589824)
    '768x768'
    """
    side = math.isqrt(pixels)
    return f"{side}x{side}"
