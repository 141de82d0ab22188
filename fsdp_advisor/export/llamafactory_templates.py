"""The name that LLaMA-Factory has for the chat template of a model.

Source: LLaMA-Factory 0.9.5, extras/constants.py (`register_model_group`: the templates of chat models and of all multimodal models),
data/template.py.
"""

from __future__ import annotations

import re

_SIZE = r"[\d.]+b(-a[\d.]+b)?"
_MODELS = {
    "qwen": rf"qwen/qwen2(\.5)?-((coder|math)-)?{_SIZE}-instruct(-1m)?",
    "qwen2_vl": rf"qwen/(qwen2-vl-{_SIZE}|qwen2(\.5)?-vl-{_SIZE}-instruct)",
    "qwen3": rf"qwen/qwen3-({_SIZE}|{_SIZE}-thinking-2507|next-{_SIZE}-thinking)",
    "qwen3_nothink": rf"qwen/qwen3-({_SIZE}-instruct-2507|next-{_SIZE}-instruct)",
    "qwen3_vl": rf"qwen/qwen3-vl-{_SIZE}-thinking",
    "qwen3_vl_nothink": rf"qwen/qwen3-vl-{_SIZE}-instruct",
    "qwen3_5": rf"qwen/qwen3\.5-{_SIZE}(-base)?",
    "llama2": rf"meta-llama/llama-2-{_SIZE}-chat-hf",
    "llama3": rf"meta-llama/(meta-)?llama-3(\.[123])?-{_SIZE}-instruct",
    "llama4": r"meta-llama/llama-4-(scout|maverick)-17b-\d+e(-instruct)?",
    "gemma": r"google/gemma-(1\.1-)?[27]b-it",
    "gemma2": rf"google/gemma-(2-{_SIZE}|3-1b|3-270m)-it",
    "gemma3": r"google/gemma-3-(4|12|27)b-(pt|it)",
    "gemma3n": r"google/gemma-3n-e[24]b(-it)?",
    "gemma4": r"google/gemma-4-(26b-a4b|31b)-it",
    "gemma4n": r"google/gemma-4-e[24]b-it",
    "mistral": r"mistralai/(mistral-7b-instruct-v0\.[123]|mixtral-8x(7|22)b-instruct-v0\.1)",
    "ministral": r"mistralai/(ministral-8b-instruct-2410|mistral-nemo-instruct-2407)",
    "mistral_small": r"mistralai/mistral-small-(24b-instruct-2501|3\.1-24b-(base|instruct)-2503|3\.2-24b-instruct-2506)",
    "phi": r"microsoft/phi-3-(mini|medium)-(4|128)k-instruct",
    "phi4": r"microsoft/phi-4",
    "gpt_oss": r"openai/gpt-oss-(20|120)b",
    "deepseekr1": rf"deepseek-ai/deepseek-r1-distill-(qwen|llama)-{_SIZE}",
}
"""Template -> the names of its models, in lower case. Later names of Meta's Llama 3 lack "Meta-"."""


def chat_template(model_name: str) -> str | None:
    """LLaMA-Factory's template for a model; None for base models and for models that are not listed here.

    >>> chat_template("Qwen/Qwen3-8B"), chat_template("Qwen/Qwen3-8B-Base")
    ('qwen3', None)
    """
    name = model_name.lower()
    return next((template for template, models in _MODELS.items() if re.fullmatch(models, name)), None)
