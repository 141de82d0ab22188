"""How a model's processor lays out an image: the shape of its pixels, and the tokens that stand for it in the text.

The sizes of patches and tiles are in the configuration. Values that only a processor's own file contains, such as the largest number of
pixels, are assumed: the default of its class in transformers 5.23, or the value in the published checkpoints of the type. `Layout.assumed`
names them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

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


def layout_of(config: Mapping[str, Any], images: Images) -> Layout:
    """The layout of each of the images in a model of this configuration.

    Raises UsageError if the model reads no images, if the images' size is missing but needed, or if the layout is unknown for this model.
    """
    model_type = str(config.get("model_type"))
    family = _FAMILIES.get(model_type)
    if family is None:
        if not any("vision" in key or "image" in key for key in config):
            raise _without_tower(model_type)
        known = ", ".join(sorted(_FAMILIES))
        raise UsageError(
            f"it is not known how a model of type {model_type} reads images",
            hint=f"leave --images-per-sample out, or use fsdp-advisor rehearse on your script; known types: {known}",
        )
    if not images.height and not family.has_own_size:
        raise UsageError(
            f"the number of tokens of an image depends on its size in a model of type {model_type}",
            hint="add --image-size, such as 1024x768",
        )
    return family.lay_out(_Values(config, family.defaults, family.tower), images)


def _without_tower(model_type: str) -> UsageError:
    return UsageError(
        f"the configuration of this {model_type} model has no vision encoder",
        hint="leave --images-per-sample out"
        + (", or give the config.json of the whole model" if model_type == "gemma3_text" else ""),
    )


def has_images(config: Mapping[str, Any]) -> bool:
    """Whether the layout of images is known for models of this configuration."""
    return config.get("model_type") in _FAMILIES


@dataclass(frozen=True)
class _Values:
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


@dataclass(frozen=True)
class _Family:
    """Model types that share one image processor. `defaults`: the values of the configuration's class for keys that a configuration
    leaves out. `tower`: the model type of a vision tower that names none.
    """

    lay_out: Callable[[_Values, Images], Layout]
    defaults: Mapping[str, Any]
    has_own_size: bool = False
    tower: str = ""


_TOWERS = {
    "clip_vision_model": {"image_size": 224, "patch_size": 32},
    "siglip_vision_model": {"image_size": 224, "patch_size": 16},
    "pixtral": {"image_size": 1024, "patch_size": 16},
}
"""The defaults of vision towers that several models have. Source: their configuration classes, transformers 5.23."""


# Patches


def _rounded_to_patches(height: int, width: int, factor: int, least: int, most: int) -> tuple[int, int]:
    """The size to which an image is resized: multiples of `factor`, with a number of pixels within the limits.

    Source: transformers 5.23, models/qwen2_vl/image_processing_qwen2_vl.py, smart_resize.
    """
    rows, columns = (round(side / factor) * factor for side in (height, width))
    if rows * columns > most:
        ratio = math.sqrt(height * width / most)
        return tuple(max(factor, math.floor(side / ratio / factor) * factor) for side in (height, width))  # type: ignore[return-value]  # two
    if rows * columns < least:
        ratio = math.sqrt(least / (height * width))
        return tuple(math.ceil(side * ratio / factor) * factor for side in (height, width))  # type: ignore[return-value]  # two
    return rows, columns


def _qwen_grid(least: int, most: int, frames: int = 1) -> Callable[[_Values, Images], Layout]:
    """A function that returns the layout for Qwen-VL and GLM. `least`, `most`: limits of an image's pixels. `frames`: how often the
    limits count each pixel (GLM's smart_resize counts two frames).
    """

    def lay_out(values: _Values, images: Images) -> Layout:
        patch, merge = values.size("vision_config.patch_size"), values.size("vision_config.spatial_merge_size")
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


def _kimi_grid(values: _Values, images: Images) -> Layout:
    """The layout of Kimi-K2.5.

    Source: transformers 5.23, models/kimi_k25/image_processing_kimi_k25.py, navit_resize and the class's defaults.
    """
    patch, merge = values.size("vision_config.patch_size"), values.size("vision_config.merge_kernel_size")
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


def _gemma4_positions(values: _Values, images: Images) -> Layout:
    """The layout of Gemma 4, which has a vision tower only if its configuration describes one.

    Source: transformers 5.23, models/gemma4/image_processing_gemma4.py, get_aspect_ratio_preserving_size.
    """
    if not values.config.get("vision_config"):
        raise _without_tower("gemma4")
    patch, pool = values.size("vision_config.patch_size"), values.size("vision_config.pooling_kernel_size")
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


def _pixtral(values: _Values, images: Images) -> Layout:
    """The layout of Pixtral. An image's longest side is at most that of the vision tower's table of positions.

    Source: transformers 5.23, models/pixtral/image_processing_pixtral.py, get_resize_output_image_size.
    """
    patch, merge = values.size("vision_config.patch_size"), values.size("spatial_merge_size")
    longest, unit = values.size("vision_config.image_size"), patch * merge
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


def _square(tokens: Callable[[_Values], int]) -> Callable[[_Values, Images], Layout]:
    """A function that returns the layout if all images are resized to the vision tower's own size. `tokens` counts those of one image."""

    def lay_out(values: _Values, images: Images) -> Layout:
        side = values.size("vision_config.image_size")
        return Layout(format="fixed", tokens=tokens(values), pixels=(3, side, side))

    return lay_out


def _patches_of_side(values: _Values) -> int:
    return (values.size("vision_config.image_size") // values.size("vision_config.patch_size")) ** 2


def _llava_tokens(values: _Values) -> int:
    return _patches_of_side(values) + int(values.get("vision_feature_select_strategy") == "full")


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


def _grids(least: int, most: int) -> Iterator[tuple[int, int]]:
    """(columns, rows) of tiles, fewest first. Source: got_ocr2/image_processing_got_ocr2.py, get_all_supported_aspect_ratios."""
    grids = [(c, r) for c in range(1, most + 1) for r in range(1, most + 1) if least <= c * r <= most]
    yield from sorted(grids, key=lambda grid: grid[0] * grid[1])


def _internvl_tiles(values: _Values, images: Images) -> Layout:
    """The layout of InternVL.

    Source: transformers 5.23, models/internvl/processing_internvl.py (crops to tiles), and got_ocr2/image_processing_got_ocr2.py,
    get_optimal_tiled_canvas and the class's defaults.
    """
    side, tokens, most = values.size("vision_config.image_size"), values.size("image_seq_length"), 12
    grid = (1, 1)
    if images.height:
        aspect, area = images.width / images.height, images.width * images.height
        best = math.inf
        for columns, rows in _grids(1, most):
            off = abs(aspect - columns / rows)
            if off < best or (off == best and area > 0.5 * side**2 * columns * rows):
                best, grid = off, (rows, columns)
    return _tiled("tiles", images, grid, side, tokens, _CUTS.format(most=most, side=side))


def _llama4_tiles(values: _Values, images: Images) -> Layout:
    """The layout of Llama 4.

    Source: transformers 5.23, models/llama4/image_processing_llama4.py, find_supported_resolutions and get_best_fit; processing_llama4.py,
    replace_image_token.
    """
    side, patch, most = values.size("vision_config.image_size"), values.size("vision_config.patch_size"), 16
    tokens = (side // patch) ** 2 // round(1 / values.get("vision_config.pixel_shuffle_ratio") ** 2)
    grid = (1, 1)
    if images.height:
        shapes = [(r, n // r) for n in range(most, 0, -1) for r in range(1, n + 1) if n % r == 0]
        scale = {s: min(side * s[1] / images.width, side * s[0] / images.height) for s in shapes}
        larger = [value for value in scale.values() if value >= 1]
        chosen = min(larger) if larger else max(scale.values())
        grid = min((s for s in shapes if scale[s] == chosen), key=lambda s: s[0] * s[1])
    return _tiled("tiles", images, grid, side, tokens, _CUTS.format(most=most, side=side))


def _idefics_tiles(values: _Values, images: Images) -> Layout:
    """The layout of Idefics3. The longest edge is four times a tile's, as in the class's default.

    Source: transformers 5.23, models/idefics3/image_processing_idefics3.py, get_number_of_image_patches.
    """
    side, patch = values.size("vision_config.image_size"), values.size("vision_config.patch_size")
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


def _any_resolution(newlines_limited: bool) -> Callable[[_Values, Images], Layout]:
    """A function that returns the layout of LLaVA-NeXT and LLaVA-OneVision.

    `newlines_limited`: whether features of more tiles than `vision_aspect_ratio` allows are shrunk, as LLaVA-OneVision does. Source:
    transformers 5.23, their processing files, _get_unpadded_features.
    """

    def lay_out(values: _Values, images: Images) -> Layout:
        side, patch = values.size("vision_config.image_size"), values.size("vision_config.patch_size")
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


_QWEN = {
    "vision_config.spatial_merge_size": 2, "vision_config.temporal_patch_size": 2, "vision_config.in_channels": 3,
}  # fmt: skip
_QWEN_14 = _QWEN | {"vision_config.patch_size": 14}
_QWEN_16 = _QWEN | {"vision_config.patch_size": 16}
_PINPOINTS_NEXT = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_PINPOINTS_ONEVISION = [[384 * r, 384 * c] for r in range(1, 7) for c in range(1, 7)]
_CLIP = {"vision_config.image_size": 336, "vision_config.patch_size": 14, "vision_feature_select_strategy": "default"}
_IDEFICS = {"vision_config.image_size": 224, "vision_config.patch_size": 32, "scale_factor": 2}

_QWEN2 = _Family(_qwen_grid(3136, 12_845_056), _QWEN_14)
"""Limits of the checkpoints' preprocessor_config.json, such as Qwen/Qwen2.5-VL-7B-Instruct's."""
_QWEN3 = _Family(_qwen_grid(65_536, 16_777_216), _QWEN_16)
"""Limits of the checkpoints' preprocessor_config.json, such as Qwen/Qwen3-VL-8B-Instruct's and Qwen/Qwen3.5-2B's."""
_GLM = _Family(_qwen_grid(12_544, 9_633_792, frames=2), _QWEN_14)
"""Limits of the checkpoints' preprocessor_config.json, such as zai-org/GLM-4.6V's."""

_FAMILIES: dict[str, _Family] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _QWEN2),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN3),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glm_ocr"), _GLM),
    "kimi_k25": _Family(_kimi_grid, {"vision_config.patch_size": 14, "vision_config.merge_kernel_size": 2}),
    "gemma3": _Family(
        _square(lambda values: values.size("mm_tokens_per_image")),
        {"mm_tokens_per_image": 256, "vision_config.image_size": 224}, has_own_size=True,
    ),
    "gemma4": _Family(
        _gemma4_positions,
        {"vision_config.patch_size": 16, "vision_config.pooling_kernel_size": 3, "vision_soft_tokens_per_image": 280},
    ),
    "paligemma": _Family(
        _square(_patches_of_side), {"vision_config.image_size": 224, "vision_config.patch_size": 14}, has_own_size=True,
        tower="siglip_vision_model",
    ),
    "llava": _Family(_square(_llava_tokens), _CLIP, has_own_size=True, tower="clip_vision_model"),
    "llava_next": _Family(
        _any_resolution(newlines_limited=False), _CLIP | {"image_grid_pinpoints": _PINPOINTS_NEXT}, tower="clip_vision_model"
    ),
    "llava_onevision": _Family(
        _any_resolution(newlines_limited=True),
        {
            "vision_config.image_size": 384, "vision_config.patch_size": 14, "vision_aspect_ratio": "anyres_max_9",
            "image_grid_pinpoints": _PINPOINTS_ONEVISION,
        },
        tower="siglip_vision_model",
    ),
    "internvl": _Family(
        _internvl_tiles, {"vision_config.image_size": 448, "image_seq_length": 256}, has_own_size=True
    ),
    "idefics3": _Family(_idefics_tiles, _IDEFICS, has_own_size=True),
    "smolvlm": _Family(_idefics_tiles, _IDEFICS, has_own_size=True),
    "llama4": _Family(
        _llama4_tiles,
        {"vision_config.image_size": 448, "vision_config.patch_size": 14, "vision_config.pixel_shuffle_ratio": 0.5},
        has_own_size=True,
    ),
    "mistral3": _Family(
        _pixtral, {"vision_config.image_size": 1540, "vision_config.patch_size": 14, "spatial_merge_size": 2}, tower="pixtral"
    ),
}  # fmt: skip
"""The layout of images by model type."""
