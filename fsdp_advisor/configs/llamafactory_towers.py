"""The modules of multimodal models that LLaMA-Factory gives no adapters.

Source: LLaMA-Factory 0.9.5, model/model_utils/visual.py (`_register_composite_model`, `get_forbidden_modules`, `patch_target_modules`),
model/model_utils/misc.py (`find_all_linear_modules`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

Frozen = tuple[bool, bool, bool]
"""The values of `freeze_vision_tower`, `freeze_multi_modal_projector` and `freeze_language_model`."""
USUAL: Frozen = (True, True, False)
KEYS = ("freeze_vision_tower", "freeze_multi_modal_projector", "freeze_language_model")
ALL_FROZEN: tuple[Frozen, ...] = (
    USUAL,
    *(f for f in product((True, False), (True, False), (False, True)) if f != USUAL and not all(f)),
)
"""All values with which something is trained; the usual ones first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Texts in the names of a model's modules: those of its towers, of its projector, of its language model, and of modules that never get
    adapters. `projector_as_tower`: the layers of the projector have the names of the tower's.
    """

    towers: tuple[str, ...] = ("vision_tower",)
    projector: tuple[str, ...] = ("multi_modal_projector",)
    language: tuple[str, ...] = ("language_model", "lm_head")
    never: tuple[str, ...] = ()
    projector_as_tower: bool = False

    def frozen(self, frozen: Frozen) -> tuple[str, ...]:
        """Texts in the names of the parameters that full fine-tuning does not train."""
        return tuple(
            name
            for is_frozen, names in zip(frozen, (self.towers, self.projector, self.language), strict=True)
            for name in names
            if is_frozen
        )


_QWEN2_VL = _Parts(towers=("visual.patch_embed", "visual.blocks"), projector=("visual.merger",), never=("patch_embed",))
_QWEN3_VL = _Parts(
    towers=("visual.pos_embed", "visual.patch_embed", "visual.blocks", "visual.deepstack_merger_list"),
    projector=("visual.merger",),
    never=("patch_embed",),
    projector_as_tower=True,
)
_QWEN3_5 = _Parts(
    towers=("visual.pos_embed", "visual.patch_embed", "visual.blocks"),
    projector=("model.visual.merger",),
    never=("patch_embed",),
    projector_as_tower=True,
)
_GEMMA4 = _Parts(
    towers=("vision_tower", "audio_tower"),
    projector=("model.embed_vision", "model.embed_audio"),
    never=("per_layer_projection_norm",),
)
_QWEN2_5_OMNI = _Parts(
    towers=("visual.patch_embed", "visual.blocks", "audio_tower"),
    projector=("visual.merger", "audio_tower.proj"),
    language=("model", "lm_head"),
    never=("patch_embed",),
)
_QWEN3_OMNI = _Parts(
    towers=("visual.pos_embed", "visual.patch_embed", "visual.blocks", "visual.deepstack_merger_list", "audio_tower"),
    projector=("visual.merger", "audio_tower.proj"),
    never=("patch_embed",),
)
_VISION_MODEL = _Parts(towers=("vision_model",))
_PARTS = {
    "gemma3": _Parts(), "gemma4": _GEMMA4, "glm4v": _QWEN2_VL, "glm4v_moe": _QWEN2_VL, "internvl": _Parts(), "llama4": _VISION_MODEL,
    "llava": _Parts(), "llava_next": _Parts(), "mistral3": _Parts(projector=("model.multi_modal_projector",)), "mllama": _VISION_MODEL,
    "paligemma": _Parts(), "qwen2_vl": _QWEN2_VL, "qwen2_5_vl": _QWEN2_VL, "qwen2_5_omni_thinker": _QWEN2_5_OMNI, "qwen3_vl": _QWEN3_VL,
    "qwen3_vl_moe": _QWEN3_VL, "qwen3_omni_moe_thinker": _QWEN3_OMNI, "qwen3_5": _QWEN3_5, "qwen3_5_moe": _QWEN3_5,
}  # fmt: skip
"""Type of a model -> its parts. LLaMA-Factory makes adapters in all modules of other types that `lora_target` names."""


def excluded(model_type: str, frozen: Frozen, *, everywhere: bool) -> str | None:
    """PEFT's `exclude_modules`, a pattern of the modules that get no adapters; None if any module can get one.

    `everywhere`: `lora_target` is `all`. LLaMA-Factory then collects the names of the layers outside of the projector,
    so the projector gets adapters only if its layers have the same names as the tower's.

    >>> excluded("qwen2_5_vl", USUAL, everywhere=True)
    '.*(visual\\\\.patch_embed|visual\\\\.blocks|visual\\\\.merger|patch_embed).*'
    """
    parts = _PARTS.get(model_type)
    if parts is None:
        return None
    tower, projector, language = frozen
    names = (
        *(parts.towers if tower else ()),
        *(parts.projector if projector or (everywhere and (tower or not parts.projector_as_tower)) else ()),
        *(parts.language if language else ()),
        *parts.never,
    )
    return f".*({'|'.join(map(re.escape, names))}).*" if names else None


def frozen_parts(model_type: str, parameters: Iterable[str], frozen: Frozen) -> tuple[str, ...]:
    """The modules that full fine-tuning does not train, as `--freeze` takes them."""
    parts, names = _PARTS.get(model_type), list(parameters)
    return tuple(text for text in (parts.frozen(frozen) if parts else ()) if any(text in name for name in names))


def frozen_parameters(model_type: str, parameters: Iterable[str], frozen: Frozen) -> set[str]:
    """Those of a model's parameters that full fine-tuning does not train. Source: model/adapter.py, `_setup_full_tuning`.

    >>> names = ("model.visual.blocks.0.norm1.weight", "model.visual.merger.mlp.0.weight", "lm_head.weight")
    >>> sorted(frozen_parameters("qwen2_5_vl", names, (True, False, False)))
    ['model.visual.blocks.0.norm1.weight']
    """
    names = list(parameters)
    texts = frozen_parts(model_type, names, frozen)
    return {name for name in names if any(text in name for text in texts)}


def adapted_modules(model_type: str, modules: Iterable[str], targets: Iterable[str], frozen: Frozen) -> set[str]:
    """Those of a model's modules that get adapters, for an `lora_target` of names. Source: `patch_target_modules`.

    >>> names = ("model.visual.blocks.0.mlp.up_proj", "model.language_model.layers.0.mlp.up_proj")
    >>> sorted(adapted_modules("qwen2_5_vl", names, ["up_proj"], USUAL))
    ['model.language_model.layers.0.mlp.up_proj']
    """
    never = excluded(model_type, frozen, everywhere=False)
    named = {name for name in modules if any(target in name for target in targets)}
    return {name for name in named if never is None or not re.fullmatch(never, name)}
