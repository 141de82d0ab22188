"""The layout of one image for each of transformers' image processors.

`model.images` says which model types use which processor, and explains where the values come from.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.images import Images

PixelFormat = Literal["grid", "fixed", "tiles", "nested-tiles", "any-resolution", "padded", "positions"]
"""The tensors of a batch. ``grid``: patches of all images in one row, and the grid of each; ``fixed``: images of one size; ``tiles``:
tiles of all images in one row; ``nested-tiles``: tiles by sample, with masks; ``any-resolution``: tiles by image, and its size;
``padded``: images and their sizes; ``positions``: patches by image, padded, and the position of each.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """One image after the processor.

    `tokens`: placeholders in the text, each replaced by an output of the vision tower. `pixels`: the shape of its pixel values.
    `grid`: rows and columns of patches, or of tiles. `assumed`: a note on values that the configuration lacks; empty if there are none.
    """

    format: PixelFormat
    tokens: int
    pixels: tuple[int, ...]
    grid: tuple[int, int] = (1, 1)
    assumed: str = ""

    @property
    def tiles(self) -> int:
        """The number of pictures into which one image is divided for the vision tower."""
        return self.pixels[0] if self.format in ("tiles", "nested-tiles", "any-resolution") else 1

    def least_seq_len(self, images: Images) -> int:
        """The tokens of the shortest sample: its images, and one token of text before each image and after the last one."""
        return images.per_sample * (self.tokens + 1) + 1


class Values(NamedTuple):
    """Values of a configuration, with defaults for keys that it lacks. Keys of nested configurations are joined by dots."""

    config: Mapping[str, Any]
    defaults: Mapping[str, Any]
    tower: str = ""

    def get(self, key: str) -> Any:
        value: Any = self.config
        for name in key.split("."):
            value = value.get(name) if isinstance(value, Mapping) else None
        return self._default(key) if value is None else value

    def _default(self, key: str) -> Any:
        """The default of a key. A key of `vision_config` has the default of the tower's class, not the model's."""
        part, _, name = key.partition(".")
        tower = self.config.get(part)
        if not isinstance(tower, Mapping):
            return self.defaults[key]
        return _TOWERS.get(tower.get("model_type", self.tower), {}).get(name, self.defaults[key])

    def size(self, key: str) -> int:
        """An integer, or the first of a pair."""
        value = self.get(key)
        return int(value if isinstance(value, (int, float)) else value[0])

    @property
    def side(self) -> int:
        """The pixels of a side of the tower's images, or of a tile."""
        return self.size("vision_config.image_size")

    @property
    def patch(self) -> int:
        """The pixels of a side of a patch."""
        return self.size("vision_config.patch_size")


_TOWERS = {
    "clip_vision_model": {"image_size": 224, "patch_size": 32},
    "siglip_vision_model": {"image_size": 224, "patch_size": 16},
    "pixtral": {"image_size": 1024, "patch_size": 16},
}
"""The defaults of vision towers that several models have. Source: their configuration classes, transformers 5.23."""


def without_tower(model_type: str) -> UsageError:
    """The error for a configuration that describes no vision tower."""
    return UsageError(
        f"the configuration of this {model_type} model has no vision encoder",
        hint="leave --images-per-sample out"
        + (", or give the config.json of the whole model" if model_type == "gemma3_text" else ""),
    )


# Patches


def _rounded_to_patches(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """The size to which an image is resized: multiples of `factor`, with a number of pixels within the limits.

    Source: transformers 5.23, models/qwen2_vl/image_processing_qwen2_vl.py, smart_resize.
    """
    rows, columns = (round(side / factor) * factor for side in (height, width))
    if rows * columns > most:
        ratio = math.sqrt(height * width / most)
        rows, columns = (max(factor, math.floor(side / ratio / factor) * factor) for side in (height, width))
    elif rows * columns < least:
        ratio = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(side * ratio / factor) * factor for side in (height, width))
    return rows, columns


def qwen_grid(least: int, most: int, frames: int = 1) -> Callable[[Values, Images], Layout]:
    """A function that returns the layout for Qwen-VL and GLM. `least`, `most`: limits of an image's pixels. `frames`: how often the
    limits count each pixel (GLM's smart_resize counts two frames).
    """

    def lay_out(values: Values, images: Images) -> Layout:
        patch, merge = values.patch, values.size("vision_config.spatial_merge_size")
        depth = values.size("vision_config.temporal_patch_size")
        channels = values.size("vision_config.in_channels")
        limit = images.max_pixels or most
        height, width = images.height, images.width
        if frames > 1 and min(height, width) < patch * merge:
            scale = max(patch * merge / height, patch * merge / width)
            height, width = int(height * scale), int(width * scale)
        height, width = _rounded_to_patches(height, width, patch * merge, least // frames, limit // frames)
        rows, columns = height // patch, width // patch
        return Layout(
            format="grid",
            tokens=rows * columns // merge**2,
            pixels=(rows * columns, channels * depth * patch**2),
            grid=(rows, columns),
            assumed=""
            if images.max_pixels
            else f"the processor resizes images of more than {limit // frames:,} pixels",
        )

    return lay_out


def kimi_grid(values: Values, images: Images) -> Layout:
    """The layout of Kimi-K2.5.

    Source: transformers 5.23, models/kimi_k25/image_processing_kimi_k25.py, navit_resize and the class's defaults.
    """
    patch, merge = values.patch, values.size("vision_config.merge_kernel_size")
    most_patches, side = 16384, 512
    height, width = images.height, images.width
    patches = max(1, height // patch) * max(1, width // patch)
    scale = min(1.0, math.sqrt(most_patches / patches), side * patch / height, side * patch / width)
    factor = merge * patch
    rows, columns = (
        math.ceil(min(max(1, int(length * scale)), side * patch) / factor) * merge for length in (height, width)
    )
    return Layout(
        format="grid",
        tokens=rows * columns // merge**2,
        pixels=(rows * columns, 3, patch, patch),
        grid=(rows, columns),
        assumed=f"the processor resizes images of more than {most_patches:,} patches",
    )


def gemma4_positions(values: Values, images: Images) -> Layout:
    """The layout of Gemma 4, which has a vision tower only if its configuration describes one.

    Source: transformers 5.23, models/gemma4/image_processing_gemma4.py, get_aspect_ratio_preserving_size.
    """
    if not values.config.get("vision_config"):
        raise without_tower("gemma4")
    patch, pool = values.patch, values.size("vision_config.pooling_kernel_size")
    tokens = values.size("vision_soft_tokens_per_image")
    most = tokens * pool**2
    side = patch * pool
    scale = math.sqrt(most * patch**2 / (images.height * images.width))
    rows, columns = (math.floor(scale * length / side) for length in (images.height, images.width))
    rows, columns = (
        (1, min(images.width // images.height, tokens)) if rows == 0
        else (min(images.height // images.width, tokens), 1) if columns == 0
        else (rows, columns)
    )  # fmt: skip
    return Layout(
        format="positions",
        tokens=rows * columns,
        pixels=(most, 3 * patch**2),
        grid=(rows * pool, columns * pool),
    )


def pixtral(values: Values, images: Images) -> Layout:
    """The layout of Pixtral. An image's longest side is at most that of the vision tower's table of positions.

    Source: transformers 5.23, models/pixtral/image_processing_pixtral.py, get_resize_output_image_size.
    """
    patch, merge = values.patch, values.size("spatial_merge_size")
    longest, unit = values.side, patch * merge
    height, width = images.height, images.width
    if (ratio := max(height / longest, width / longest)) > 1:
        height, width = math.floor(height / ratio), math.floor(width / ratio)
    rows, columns = math.ceil(height / unit), math.ceil(width / unit)
    return Layout(
        format="padded",
        tokens=rows * columns,
        pixels=(3, rows * unit, columns * unit),
        grid=(rows, columns),
        assumed=f"the processor resizes images with a side of more than {longest} pixels",
    )


# One size


def square(tokens: Callable[[Values], int]) -> Callable[[Values, Images], Layout]:
    """A function that returns the layout if all images are resized to the vision tower's own size. `tokens` counts those of one image."""

    def lay_out(values: Values, images: Images) -> Layout:
        side = values.side
        return Layout(format="fixed", tokens=tokens(values), pixels=(3, side, side))

    return lay_out


def patches_of_side(values: Values) -> int:
    """The patches of a square image."""
    return (values.side // values.patch) ** 2


def llava_tokens(values: Values) -> int:
    """The patches, and with the strategy `full` the class token."""
    return patches_of_side(values) + int(values.get("vision_feature_select_strategy") == "full")


# Tiles


_CUTS = "the processor cuts an image into at most {most} tiles of {side} pixels, and adds it whole"


def _tiled(
    form: Literal["tiles", "nested-tiles"],
    images: Images,
    grid: tuple[int, int],
    side: int,
    tokens: int,
    assumed: str,
) -> Layout:
    """The layout of an image that is cut into a grid of (rows, columns) square tiles; if there are several, the whole image is one more
    tile. `tokens`: of each tile. `assumed`: the note about the processor.
    """
    tiles = grid[0] * grid[1] + (grid != (1, 1))
    return Layout(
        format=form,
        tokens=tiles * tokens,
        pixels=(tiles, 3, side, side),
        grid=grid,
        assumed=assumed if images.height else "",
    )


def _grids(most: int) -> list[tuple[int, int]]:
    """(columns, rows) of at most `most` tiles, fewest first.

    Source: got_ocr2/image_processing_got_ocr2.py, get_all_supported_aspect_ratios.
    """
    grids = [(c, r) for c in range(1, most + 1) for r in range(1, most + 1) if c * r <= most]
    return sorted(grids, key=lambda grid: grid[0] * grid[1])


def internvl_tiles(values: Values, images: Images) -> Layout:
    """The layout of InternVL.

    Source: transformers 5.23, models/internvl/processing_internvl.py (crops to tiles), and got_ocr2/image_processing_got_ocr2.py,
    get_optimal_tiled_canvas and the class's defaults.
    """
    side, tokens, most = values.side, values.size("image_seq_length"), 12
    grid = (1, 1)
    if images.height:
        aspect, area = images.width / images.height, images.width * images.height
        best = math.inf
        for columns, rows in _grids(most):
            off = abs(aspect - columns / rows)
            if off < best or (off == best and area > 0.5 * side**2 * columns * rows):
                best, grid = off, (rows, columns)
    return _tiled("tiles", images, grid, side, tokens, _CUTS.format(most=most, side=side))


def llama4_tiles(values: Values, images: Images) -> Layout:
    """The layout of Llama 4.

    Source: transformers 5.23, models/llama4/image_processing_llama4.py, find_supported_resolutions and get_best_fit; processing_llama4.py,
    replace_image_token.
    """
    side, patch, most = values.side, values.patch, 16
    tokens = (side // patch) ** 2 // round(1 / values.get("vision_config.pixel_shuffle_ratio") ** 2)
    grid = (1, 1)
    if images.height:
        shapes = [(r, n // r) for n in range(most, 0, -1) for r in range(1, n + 1) if n % r == 0]
        scale = {s: min(side * s[1] / images.width, side * s[0] / images.height) for s in shapes}
        larger = [value for value in scale.values() if value >= 1]
        chosen = min(larger) if larger else max(scale.values())
        grid = min((s for s in shapes if scale[s] == chosen), key=lambda s: s[0] * s[1])
    return _tiled("tiles", images, grid, side, tokens, _CUTS.format(most=most, side=side))


def idefics_tiles(values: Values, images: Images) -> Layout:
    """The layout of Idefics3. The longest edge is four times a tile's, as in the class's default.

    Source: transformers 5.23, models/idefics3/image_processing_idefics3.py, get_number_of_image_patches.
    """
    side, patch = values.side, values.patch
    tokens = (side // patch) ** 2 // values.size("scale_factor") ** 2
    grid = (1, 1)
    if images.height:
        longest = min(4 * side, 4096)
        ratio = images.width / images.height
        width, height = (longest, int(longest / ratio)) if ratio >= 1 else (int(longest * ratio), longest)
        width, height = (max(1, length + length % 2 if length < longest else length) for length in (width, height))
        grid = math.ceil(height / side), math.ceil(width / side)
    assumed = f"the processor resizes an image to {4 * side} pixels, cuts it into tiles of {side} and adds it whole"
    return _tiled("nested-tiles", images, grid, side, tokens, assumed)


def _best_resolution(height: int, width: int, resolutions: list[list[int]]) -> tuple[int, int]:
    """The resolution that keeps most of an image's pixels and, among these, wastes least.

    Source: transformers 5.23, image_processing_utils.py, select_best_resolution.
    """

    def fit(resolution: list[int]) -> tuple[int, int]:
        rows, columns = resolution
        scale = min(columns / width, rows / height)
        used = min(int(width * scale) * int(height * scale), width * height)
        return used, used - rows * columns

    best = max(resolutions, key=fit)
    return best[0], best[1]


def any_resolution(newlines_limited: bool) -> Callable[[Values, Images], Layout]:
    """A function that returns the layout of LLaVA-NeXT and LLaVA-OneVision.

    `newlines_limited`: whether features of more tiles than `vision_aspect_ratio` allows are shrunk, as LLaVA-OneVision does. Source:
    transformers 5.23, their processing files, _get_unpadded_features.
    """

    def lay_out(values: Values, images: Images) -> Layout:
        side, patch = values.side, values.patch
        base, row = (side // patch) ** 2, side // patch
        best_height, best_width = _best_resolution(images.height, images.width, values.get("image_grid_pinpoints"))
        rows, columns = row * (best_height // side), row * (best_width // side)
        if images.width / images.height > columns / rows:
            used = int(round(images.height * (columns / images.width), 7))
            rows -= (rows - used) // 2 * 2
        else:
            used = int(round(images.width * (rows / images.height), 7))
            columns -= (columns - used) // 2 * 2
        features, newlines = rows * columns, rows
        if newlines_limited:
            most = int(str(values.get("vision_aspect_ratio")).removeprefix("anyres_max_"))
            ratio = math.sqrt(rows * columns / (most * row**2))
            if ratio > 1.1:
                features, newlines = int(rows // ratio) * int(columns // ratio), int(rows // ratio)
            if images.per_sample > 1:  # if there are several images, they are not cut into tiles
                return Layout(format="any-resolution", tokens=base + 1, pixels=(1, 3, side, side))
        tiles = (best_height // side) * (best_width // side) + 1
        return Layout(
            format="any-resolution",
            tokens=features + newlines + base,
            pixels=(tiles, 3, side, side),
            grid=(best_height // side, best_width // side),
        )

    return lay_out
