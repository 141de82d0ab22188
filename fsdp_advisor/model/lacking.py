"""Models that people ask for and the catalog lacks: what each is, why it is not there, and what to do instead."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lacking:
    """A model that the catalog lacks."""

    names: tuple[str, ...]
    """Its name as published, without owner, and shorter ones that people type."""
    why: str
    """What it is, and why the catalog lacks it."""
    instead: str
    """What to do."""


_GIVE = "give its hub id or config.json, which is then recorded once"
_REMOTE = "its code is in its hub repository (auto_map), which is never run"
_NO_SIZES = "no published configuration of it was found when the catalog was built"

LACKING = (
    Lacking(
        ("Devstral-2-123B-Instruct-2512",),
        f"Devstral 2 is a dense model of 123B parameters; {_NO_SIZES}",
        f"{_GIVE}; mistralai/Devstral-Small-2-24B-Instruct-2512 is another model, of 24B",
    ),
    Lacking(
        ("Step-3.5-Flash", "Step3.5-Flash"),
        "Step-3.5-Flash is the language model of stepfun-ai/Step-3.7-Flash; transformers 5.23 has no class for it without the vision tower",
        "use stepfun-ai/Step-3.7-Flash, whose tower has 1 % of the parameters and gets no gradients when it trains on text",
    ),
    Lacking(
        ("Gemma-3n-E4B-it", "Gemma-3n-E2B-it", "Gemma3n-E4B-it", "Gemma3n-E2B-it"),
        "the vision tower of Gemma 3n is a MobileNetV5 of the timm package, which the catalog does not cover",
        f"install timm and pillow and {_GIVE}; google/gemma-4-E4B and google/gemma-4-E2B are their successors",
    ),
    Lacking(
        ("Zamba2-7B-Instruct", "Zamba2-2.7B-Instruct", "Zamba2-1.2B-Instruct"),
        f"Zamba2 is a hybrid of Mamba-2 layers and shared attention; {_NO_SIZES}",
        _GIVE,
    ),
    Lacking(
        (
            "Ling-mini-2.0", "Ling-flash-2.0", "Ling-1T", "Ling-2.0", "Ling-lite-1.5", "Ling-plus",
            "Ring-mini-2.0", "Ring-flash-2.0", "Ring-1T", "Ring-2.0", "Ring-lite",
        ),
        f"Ling and Ring up to 2.0 have the model type bailing_moe_v2, which transformers 5.23 lacks: {_REMOTE}",
        "inclusionAI/Ling-3.0-Flash, which transformers has, is a later model of another architecture",
    ),
    Lacking(
        ("Intern-S1", "Intern-S1-mini", "InternS1"),
        f"Intern-S1 is InternViT before a Qwen3 language model, and transformers 5.23 lacks its model type: {_REMOTE}",
        "OpenGVLab/InternVL3_5-8B-HF has the layers of Intern-S1-mini; a config.json with model_type internvl is recorded",
    ),
    Lacking(
        ("DeepSeek-OCR",),
        f"DeepSeek-OCR is a model of 3B for images of text, and transformers 5.23 lacks its model type: {_REMOTE}",
        "for DeepSeek-OCR-2, which transformers has, give its hub id or config.json",
    ),
    Lacking(
        ("Baichuan2-13B-Base", "Baichuan2-7B-Base", "Baichuan-13B-Base", "Baichuan-7B"),
        f"transformers 5.23 lacks Baichuan: {_REMOTE}",
        "the 7B models have the layers of Llama: give their config.json with model_type llama",
    ),
)  # fmt: skip


def hint(lacking: Lacking) -> str:
    """What the hint of an unknown model says about it."""
    return f"{lacking.why}; {lacking.instead}"
