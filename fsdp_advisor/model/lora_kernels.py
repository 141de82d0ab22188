"""The kernels for adapters that axolotl runs in a model, and the models whose attention they replace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.adaptation import CONFIG_KEY, Adaptation
from fsdp_advisor.job.lora_kernels import chosen_kernels, modelled_kernels
from fsdp_advisor.job.plan import Plan

PATCHED_TYPES = frozenset({
    "apertus", "arcee", "bamba", "beam", "bitnet", "cohere2", "cohere2_moe", "cohere_compass", "cwm", "diffllama", "doge",
    "dots1", "emu3", "ernie4_5", "ernie4_5_moe", "evolla", "exaone4", "exaone_moe", "flint", "gemma", "gemma2", "gemma3",
    "gemma3_text", "glm", "glm4", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid",
    "granitemoeshared", "helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "jamba",
    "kolibri1", "lara_mini", "lfm3", "llama", "mellum", "minimax", "ministral", "ministral3", "mistral", "mistral3", "mixtral", "nanochat",
    "nemotron", "nemotron_h", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "recurrent_gemma",
    "seed_oss", "smollm3", "solar_open", "starcoder2", "step3p7", "vaultgemma", "zamba",
})  # fmt: skip
"""Types of models in whose attention axolotl 0.19 finds the projections. For other types it stops ("Original QKV code not found", "could
not import attention class"), except for those of `OWN_CODE_TYPES`.

Source: axolotl 0.19.0, monkeypatch/lora_kernels.py, `get_attention_cls_from_config` and `patch_self_attn_lora`, for the types of
transformers 5.23 and 5.24.
"""
OWN_CODE_TYPES = frozenset({
    "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "qwen3_5", "qwen3_5_moe",
})  # fmt: skip
"""Types of models to whose attention axolotl gives code of its own."""

_PROJECTIONS = {
    "mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
}
"""Kernel -> the modules of a layer that it replaces if all have adapters. That of embeddings is not modelled."""


def stops_in_attention(config: Mapping[str, Any]) -> bool:
    """Whether axolotl stops if its kernels are to replace the attention's projections in a model with this configuration."""
    return config.get("model_type") not in PATCHED_TYPES | OWN_CODE_TYPES


def kernels_of_model(plan: Plan, config: Mapping[str, Any], parameters: Iterable[str]) -> tuple[str, ...]:
    """`modelled_kernels` for the model with this configuration and these names of parameters; none without adapters.

    Where axolotl's own choice stops, this is what works: the kernel for feed-forward networks alone, or none if it has no effect.
    """
    if CONFIG_KEY not in config:
        return ()
    kernels = modelled_kernels(plan, Adaptation.from_dict(config[CONFIG_KEY]))
    if not kernels or plan.lora_kernels != "auto" or not stops_in_attention(config):
        return kernels
    return () if _missing("mlp", tuple(parameters)) else ("mlp",)


def _missing(kernel: str, parameters: Sequence[str]) -> str:
    """Why a kernel has no effect in a model with these parameters; empty if it has one."""
    names = [f".{name}" for name in parameters]

    def lacking(suffix: str) -> str:
        return ", ".join(
            each for each in _PROJECTIONS[kernel] if not any(f".{each}.{suffix}" in name for name in names)
        )

    if absent := lacking(""):
        return f"the model has no {absent}"
    return f"no adapter on {bare}" if (bare := lacking("lora_A")) else ""


def lora_kernels_failure(config: Mapping[str, Any], plan: Plan) -> UsageError | None:
    """Why axolotl cannot train a model with this configuration with the kernels that were asked for; None if it can."""
    if plan.lora_kernels == "auto" or not _stops(config, plan):
        return None
    return UsageError(
        f"axolotl 0.19 stops for models of type {config['model_type']} with its kernels of adapters qkv and o: it does not find the "
        "projections in the code of the attention",
        hint="--lora-kernels mlp or none, with which exported files set lora_qkv_kernel and lora_o_kernel: false",
    )


def lora_kernel_notes(config: Mapping[str, Any], parameters: Iterable[str], plans: Sequence[Plan]) -> list[str]:
    """Notes if axolotl's own choice, with which it stops, is replaced, and on kernels without effect."""
    notes, names = [], tuple(parameters)
    if any(plan.lora_kernels == "auto" and _stops(config, plan) for plan in plans):
        notes.append(
            f"axolotl 0.19 stops for models of type {config['model_type']} unless its file has lora_qkv_kernel: false and lora_o_kernel: "
            "false; the estimate assumes both, and exported files have them"
        )
    kernels = {kernel for plan in plans for kernel in kernels_of_model(plan, config, names)}
    lacks = {kernel: _missing(kernel, names) for kernel in _PROJECTIONS if kernel in kernels}
    if idle := [f"{kernel} ({missing})" for kernel, missing in lacks.items() if missing]:
        notes.append(f"axolotl's kernels for adapters without effect: {'; '.join(idle)}")
    return notes


def _stops(config: Mapping[str, Any], plan: Plan) -> bool:
    """Whether axolotl stops with the kernels that it runs in the plan."""
    if CONFIG_KEY not in config or not stops_in_attention(config):
        return False
    return not {"qkv", "o"}.isdisjoint(chosen_kernels(plan, Adaptation.from_dict(config[CONFIG_KEY])))
