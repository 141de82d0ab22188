"""Multimodal models that train on text only: their language model runs, and images or sound are optional."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from fsdp_advisor.model.freezing import parameter_names
from fsdp_advisor.model.images import has_images
from fsdp_advisor.model.profile import Profile

TRAINED_WHOLE = frozenset({
    "aria", "aya_vision", "cohere2_vision", "cosmos3_edge", "cosmos3_omni", "deepseek_ocr2", "deepseek_vl", "deepseek_vl_hybrid",
    "diffusion_gemma", "emu3", "ernie4_5_vl_moe", "exaone4_5", "gemma3", "gemma4", "gemma4_unified", "glm46v", "glm4v",
    "glm4v_moe", "glm5_next", "glm_ocr", "glmga", "granite4_vision", "granite_docling", "hunyuan_vl", "hyperclovax_vision_v2",
    "idefics2", "idefics3", "internvl", "janus", "kimi_k25", "lighton_ocr", "llama4", "llava", "llava_next", "llava_next_video",
    "llava_onevision", "minimax_m3_vl", "mistral3", "mistral_large4", "mllama", "molmo2", "muse_glimmer", "muse_spark", "ovis2",
    "paddleocr_vl", "paligemma", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe",
    "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "qwen4_exp", "shieldgemma2", "smolvlm", "step3p7", "unlimited_ocr",
    "video_llama_3", "video_llava", "vipllava",
})  # fmt: skip
"""Model types that AutoModelForImageTextToText builds from a configuration with a `text_config`, and whose forward needs no images.

For other types, such as BLIP-2, only the text part is recorded. Source: the classes of transformers 5.23, run without images.
"""

TRAINED_WITH_IMAGES = frozenset({"blip", "kosmos-2", "kosmos-2.5", "pix2struct", "pp_formulanet"})
"""Model types with a `text_config` that are recorded whole with an image in each sample: no token of their text stands for an image."""


WITHOUT_TOWER = {"google/gemma-3-4b-pt": 0.42e9, "google/gemma-3-12b-pt": 0.42e9, "google/gemma-3-27b-pt": 0.42e9}
"""Models that the catalog has without their vision tower -> parameters of the checkpoint's tower and projector. Source: safetensors
metadata of the hub repositories.
"""
TEXT_CHECKPOINTS = frozenset({"google/medgemma-27b-text-it"})
"""Aliases of these models whose checkpoints have no vision tower."""


_PARTS = (
    "visual", "vision_tower", "vision_model", "vision_encoder", "multi_modal_projector", "connector", "mm_projector", "embed_vision",
)  # fmt: skip
"""Names of the vision tower and its projector in transformers' models."""


def vision_parts(profile: Profile) -> list[str]:
    """The names of a model's vision tower and projector, as `--freeze` takes them."""
    first = [stack.path for stack in profile.stacks] + [p.name for p in profile.root.parameters]
    names = [name for path in first for name in path.split(".") if name in _PARTS]
    return list(dict.fromkeys(names))


class ImageModel(NamedTuple):
    """The type of a model that is trained on images, and the names of its parameters, those of adapters left out."""

    model_type: str
    parameters: tuple[str, ...]

    @classmethod
    def of(cls, profile: Profile) -> ImageModel:
        """The model of a profile, whose names have no prefix of PEFT."""
        names = (
            n.removeprefix("base_model.model.").replace(".base_layer.", ".") for n in parameter_names(profile.base)
        )
        return cls(str(profile.config.get("model_type")), tuple(names))

    @property
    def modules(self) -> tuple[str, ...]:
        """The names of the modules that have a weight."""
        return tuple(name.removesuffix(".weight") for name in self.parameters if name.endswith(".weight"))

    def named(self, targets: Iterable[str]) -> set[str]:
        """The modules that PEFT adapts for a list of names."""
        names = tuple(targets)
        return {m for m in self.modules if any(m == name or m.endswith(f".{name}") for name in names)}


def is_tower(path: str) -> bool:
    """Whether the layers at this path belong to a vision or audio tower.

    >>> is_tower("model.visual.blocks"), is_tower("model.language_model.layers")
    (True, False)
    """
    return any("vis" in name or "audio" in name for name in path.split("."))


def without_tower(entry_id: str, name: str) -> str | None:
    """The note that a model of the catalog is only the language model of the checkpoint `name`; None if it is the whole model.

    transformers 5.23 builds Gemma3ForConditionalGeneration for the checkpoint (models/auto/modeling_auto.py, model type gemma3).
    """
    if entry_id not in WITHOUT_TOWER or name.lower() in TEXT_CHECKPOINTS:
        return None
    return (
        f"{name} is estimated as its language model alone. Its checkpoint has {WITHOUT_TOWER[entry_id] / 1e9:.2f}B more parameters, of a"
        " vision tower and a projector, which AutoModelForCausalLM, exported scripts included, builds and loads too; for the whole model"
        " give the path of its config.json"
    )


def trained_on_images(model_type: str) -> str:
    """The note that a multimodal model of this type is estimated with an image in each sample."""
    return f"{model_type} is recorded with one image in each sample, of the size that its configuration or its processor names"


def trained_on_text(model_type: str) -> str:
    """The note that a multimodal model of this type is estimated for text batches: no activations of images or sound."""
    return (
        f"{model_type} is estimated for training on text only: all its parameters are counted, but no activations of images or sound, and"
        " its towers get no gradients"
        + ("; --images-per-sample adds images" if has_images({"model_type": model_type}) else "")
    )
