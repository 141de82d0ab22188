"""The images of a training sample: how many, and their size in pixels."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from fsdp_advisor.job.request import EstimateRequest  # the module imports this one

LARGEST_SIDE = 16_384
"""The largest accepted side of an image, in pixels."""
_SIZE = re.compile(r"(\d{1,5})(?:\s*[x*,]\s*(\d{1,5}))?")


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
