"""The dtypes of the published weights of models of the catalog, whose profiles do not have them.

Source: the published config.json, of which ai-dynamo/aiconfigurator has copies (commit 095f58a5, aic-core, model_configs). Weights of
other models are not known, so loading counts them as converted; a config.json says their dtype.
"""

from __future__ import annotations

from fsdp_advisor.job.choices import WeightDtype

_BFLOAT16 = frozenset({
    "MiniMaxAI/MiniMax-M3", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-235B-A22B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-32B",
    "Qwen/Qwen3-8B", "Qwen/Qwen3-Coder-480B-A35B-Instruct", "Qwen/Qwen3-VL-235B-A22B-Instruct", "Qwen/Qwen3-VL-2B-Instruct",
    "Qwen/Qwen3-VL-30B-A3B-Instruct", "Qwen/Qwen3-VL-32B-Instruct", "Qwen/Qwen3-VL-4B-Instruct", "Qwen/Qwen3-VL-8B-Instruct",
    "Qwen/Qwen3.5-122B-A10B", "Qwen/Qwen3.5-27B", "Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3.5-397B-A17B", "google/gemma-4-26B-A4B",
    "meta-llama/Llama-3.1-405B", "meta-llama/Llama-3.1-70B", "meta-llama/Llama-3.1-8B", "meta-llama/Llama-4-Maverick-17B-128E",
    "meta-llama/Llama-4-Scout-17B-16E", "mistralai/Mixtral-8x22B-v0.1", "mistralai/Mixtral-8x7B-v0.1",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", "nvidia/Nemotron-H-56B-Base-8K",
    "stepfun-ai/Step-3.7-Flash", "zai-org/GLM-5", "zai-org/GLM-5.2",
})  # fmt: skip


def dtype_of(model_id: str) -> WeightDtype | None:
    """The dtype of a catalog model's weights; None if it is not known."""
    return "bfloat16" if model_id in _BFLOAT16 else None
