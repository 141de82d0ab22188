"""Finds the model in the installed transformers that is most similar to a model that transformers does not know."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

_BY_OTHER_NAME = {
    "aquila": "llama", "bailing_moe": "glm4_moe", "baichuan": "llama", "chatglm": "glm", "decilm": "llama", "deepseek": "deepseek_v2",
    "deepseek_vl_v2": "deepseek_vl", "dream": "qwen2", "hunyuan": "hunyuan_v1_dense", "internlm": "llama", "internlm2": "llama",
    "internvl_chat": "internvl", "jais": "gpt2", "kimi_vl": "kimi_k25", "llada": "llama", "llava_llama": "llava",
    "llava_qwen": "llava_onevision", "mimo_v2": "mimo_v2_flash", "minicpm": "minicpm3", "mixformer-sequential": "phi",
    "nemotron-nas": "llama", "orion": "llama", "phi-msft": "phi", "phi3_v": "phi3", "phi3small": "phi3", "phi4mm": "phi4_multimodal",
    "qwen": "qwen2", "refinedweb": "falcon", "refinedwebmodel": "falcon", "stablelm_epoch": "stablelm", "telechat": "llama",
    "xverse": "llama", "yi": "llama", "hf_olmo": "olmo",
}  # fmt: skip
"""Model type of code in a hub repository -> type of a model in transformers with equal or similar layers."""


FIRST_VERSIONS = dict.fromkeys(
    (
        "apertus1p5", "apertus1p5_text", "dory", "exaone", "hy_v4_vl", "hy_v4_vl_text", "inkling2_loop", "inkling2_loop_text",
        "lara_mini", "omniasr", "omniasr_ctc", "sarvam_mla", "sarvam_moe",
    ),
    "5.24",
)  # fmt: skip
"""Model type that transformers 5.23 lacks -> the first version that has it."""


def nearest(model_type: str, architectures: Iterable[str]) -> tuple[str, str] | None:
    """The model type and class of the most similar model in transformers; None if no name is similar.

    >>> nearest("chatglm", ["ChatGLMModel"]), nearest("my_llama", ["LlamaForCausalLM"]), nearest("zzz", [])
    (('glm', 'GlmForCausalLM'), ('llama', 'LlamaForCausalLM'), None)
    >>> nearest("gla", []), nearest("rwkv7", [])
    (None, ('rwkv', 'RwkvForCausalLM'))
    """
    classes: dict[str, str] = {**MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, **MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    for name in architectures:
        if kinds := [kind for kind, own in classes.items() if own == name]:  # InternLM3 has LlamaForCausalLM, too
            return min(kinds, key=lambda kind: kind.replace("_", "") not in name.lower()), name
    lowered = model_type.lower()
    found = [_BY_OTHER_NAME.get(lowered, ""), *difflib.get_close_matches(lowered, classes, 1, 0.8)]
    return next(((kind, classes[kind]) for kind in found if kind in classes), None)


def advice(model_type: str, architectures: Iterable[str], written_by: object, *, own_code: bool) -> str:
    """The hint about a model type that transformers does not know.

    `written_by`: the version of transformers in the configuration, if it has one. `own_code`: whether the model comes with its own code
    (auto_map).
    """
    installed = transformers.__version__
    if (first := FIRST_VERSIONS.get(model_type)) is not None and model_type not in CONFIG_MAPPING_NAMES:
        return f"pip install 'transformers>={first}', the first version that has it; {installed} is installed"
    similar = nearest(model_type, architectures)
    instead = (
        f"the nearest model of transformers {installed} is {similar[1]}: set model_type to {similar[0]!r} if the layers are the same"
        if similar
        else f"no model of transformers {installed} has a similar name"
    )
    if own_code:
        return f"code in the repository (auto_map) is never run; {instead}"
    version = written_by if isinstance(written_by, str) and re.fullmatch(r"\d{1,4}(\.\d{1,4}){1,2}", written_by) else ""
    if version and _numbers(version) > _numbers(installed):
        return f"pip install 'transformers>={version}', which wrote the configuration; {installed} is installed"
    if model_type in CONFIG_MAPPING_NAMES:
        return instead
    return f"a newer transformers may have it: pip install -U transformers; {instead}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
