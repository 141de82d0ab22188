"""The models whose attention axolotl's kernels for adapters replace."""

from __future__ import annotations

PATCHED_TYPES = frozenset({
    "apertus", "arcee", "bamba", "beam", "bitnet", "cohere2", "cohere2_moe", "cohere_compass", "cwm", "diffllama", "doge",
    "dots1", "emu3", "ernie4_5", "ernie4_5_moe", "evolla", "exaone4", "exaone_moe", "flint", "gemma", "gemma2", "gemma3",
    "gemma3_text", "glm", "glm4", "gpt_oss", "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid",
    "granitemoeshared", "helium", "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "jamba",
    "kolibri1", "lfm3", "llama", "mellum", "minimax", "ministral", "ministral3", "mistral", "mistral3", "mixtral", "nanochat",
    "nemotron", "nemotron_h", "phimoe", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "recurrent_gemma",
    "seed_oss", "smollm3", "solar_open", "starcoder2", "step3p7", "vaultgemma", "zamba",
})  # fmt: skip
"""Types of models in whose attention axolotl 0.19 finds the projections. For other types it stops ("Original QKV code not found", "could
not import attention class"), except for Gemma 4 and Qwen3.5, which get code of axolotl's own.

Source: axolotl 0.19.0, monkeypatch/lora_kernels.py, `get_attention_cls_from_config` and `patch_self_attn_lora`, for the types of
transformers 5.23.
"""
