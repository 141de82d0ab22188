"""How a model's processor lays out an image (`image_layouts`): the shape of its pixels, and the tokens that stand for it in the text.

The sizes of patches and tiles are in the configuration. Values that only a processor's own file contains, such as the largest number of
pixels, are assumed: the default of its class in transformers 5.23, or the value in the published checkpoints of the type. `Layout.assumed`
names them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.images import Images
from fsdp_advisor.model.image_layouts import (
    Layout,
    Values,
    any_resolution,
    gemma4_positions,
    idefics_tiles,
    internvl_tiles,
    kimi_grid,
    llama4_tiles,
    llava_tokens,
    patches_of_side,
    pixtral,
    qwen_grid,
    square,
    without_tower,
)


def layout_of(config: Mapping[str, Any], images: Images) -> Layout:
    """The layout of each of the images in a model of this configuration.

    Raises UsageError if the model reads no images, if the images' size is missing but needed, or if the layout is unknown for this model.
    """
    model_type = str(config.get("model_type"))
    family = _FAMILIES.get(model_type)
    if family is None:
        if not any("vision" in key or "image" in key for key in config):
            raise without_tower(model_type)
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
    return family.lay_out(Values(config, family.defaults, family.tower), images)


def has_images(config: Mapping[str, Any]) -> bool:
    """Whether the layout of images is known for models of this configuration."""
    return config.get("model_type") in _FAMILIES


class _Family(NamedTuple):
    """Model types that share one image processor. `defaults`: the values of the configuration's class for keys that a configuration
    leaves out. `tower`: the model type of a vision tower that names none.
    """

    lay_out: Callable[[Values, Images], Layout]
    defaults: Mapping[str, Any]
    has_own_size: bool = False
    tower: str = ""


_QWEN = {
    "vision_config.spatial_merge_size": 2, "vision_config.temporal_patch_size": 2, "vision_config.in_channels": 3,
}  # fmt: skip
_QWEN_14 = _QWEN | {"vision_config.patch_size": 14}
_QWEN_16 = _QWEN | {"vision_config.patch_size": 16}
_PINPOINTS_NEXT = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
_PINPOINTS_ONEVISION = [[384 * r, 384 * c] for r in range(1, 7) for c in range(1, 7)]
_CLIP = {"vision_config.image_size": 336, "vision_config.patch_size": 14, "vision_feature_select_strategy": "default"}
_IDEFICS = {"vision_config.image_size": 224, "vision_config.patch_size": 32, "scale_factor": 2}

_QWEN2 = _Family(qwen_grid(3136, 12_845_056), _QWEN_14)
"""Limits of the checkpoints' preprocessor_config.json, such as Qwen/Qwen2.5-VL-7B-Instruct's."""
_QWEN3 = _Family(qwen_grid(65_536, 16_777_216), _QWEN_16)
"""Limits of the checkpoints' preprocessor_config.json, such as Qwen/Qwen3-VL-8B-Instruct's and Qwen/Qwen3.5-2B's."""
_GLM = _Family(qwen_grid(12_544, 9_633_792, frames=2), _QWEN_14)
"""Limits of the checkpoints' preprocessor_config.json, such as zai-org/GLM-4.6V's."""

_FAMILIES: dict[str, _Family] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _QWEN2),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _QWEN3),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v", "glm_ocr"), _GLM),
    "kimi_k25": _Family(kimi_grid, {"vision_config.patch_size": 14, "vision_config.merge_kernel_size": 2}),
    "gemma3": _Family(
        square(lambda values: values.size("mm_tokens_per_image")),
        {"mm_tokens_per_image": 256, "vision_config.image_size": 224}, has_own_size=True,
    ),
    "gemma4": _Family(
        gemma4_positions,
        {"vision_config.patch_size": 16, "vision_config.pooling_kernel_size": 3, "vision_soft_tokens_per_image": 280},
    ),
    "paligemma": _Family(
        square(patches_of_side), {"vision_config.image_size": 224, "vision_config.patch_size": 14}, has_own_size=True,
        tower="siglip_vision_model",
    ),
    "llava": _Family(square(llava_tokens), _CLIP, has_own_size=True, tower="clip_vision_model"),
    "llava_next": _Family(
        any_resolution(newlines_limited=False), _CLIP | {"image_grid_pinpoints": _PINPOINTS_NEXT}, tower="clip_vision_model"
    ),
    "llava_onevision": _Family(
        any_resolution(newlines_limited=True),
        {
            "vision_config.image_size": 384, "vision_config.patch_size": 14, "vision_aspect_ratio": "anyres_max_9",
            "image_grid_pinpoints": _PINPOINTS_ONEVISION,
        },
        tower="siglip_vision_model",
    ),
    "internvl": _Family(
        internvl_tiles, {"vision_config.image_size": 448, "image_seq_length": 256}, has_own_size=True
    ),
    "idefics3": _Family(idefics_tiles, _IDEFICS, has_own_size=True),
    "smolvlm": _Family(idefics_tiles, _IDEFICS, has_own_size=True),
    "llama4": _Family(
        llama4_tiles,
        {"vision_config.image_size": 448, "vision_config.patch_size": 14, "vision_config.pixel_shuffle_ratio": 0.5},
        has_own_size=True,
    ),
    "mistral3": _Family(
        pixtral, {"vision_config.image_size": 1540, "vision_config.patch_size": 14, "spatial_merge_size": 2}, tower="pixtral"
    ),
}  # fmt: skip
"""The layout of images by model type."""
