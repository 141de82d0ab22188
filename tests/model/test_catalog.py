"""What the shipped catalog holds."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from itertools import product

import pytest
from matrix import is_installed, of_today
from refusing import AUTOCAST, refusing_autocast

from fsdp_advisor.errors import NotRecordable, UnknownModel
from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.job.choices import Attention, default_seq_len
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.model import catalog
from fsdp_advisor.model.gpu_tape_key import gpu_tape_key
from fsdp_advisor.model.lacking import LACKING, hint
from fsdp_advisor.model.quantization import IGNORED_NOTE
from fsdp_advisor.model.resolve import catalogued, resolve
from fsdp_advisor.model.store import RECORDING, dump
from fsdp_advisor.model.tape import Tape
from fsdp_advisor.model.tape_key import TapeCheckpointing, TapeEngine, TapeKey, TapePrecision
from fsdp_advisor.rows import estimate_plan
from fsdp_advisor.tape_keys import gpu_tape_key_of
from fsdp_advisor.tapes import cpu_tape, row_tape, takes_long_on_cpu

CHECKPOINTING: list[TapeCheckpointing] = ["none", "full"]
"""The policies that the catalog has tapes of; others are recorded on demand."""

MUST = [
    "meta-llama/Llama-2-7b-hf",
    "meta-llama/Llama-2-13b-hf",
    "meta-llama/Llama-2-70b-hf",
    "meta-llama/Meta-Llama-3-8B",
    "meta-llama/Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B",
    "meta-llama/Llama-3.1-405B",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.2-3B",
    "meta-llama/Llama-3.3-70B-Instruct",
    "mistralai/Mistral-7B-v0.1",
    "mistralai/Mistral-7B-v0.3",
    "mistralai/Mistral-Nemo-Base-2407",
    "mistralai/Mixtral-8x7B-v0.1",
    "mistralai/Mixtral-8x22B-v0.1",
    "Qwen/Qwen2-7B",
    "Qwen/Qwen2.5-0.5B",
    "Qwen/Qwen2.5-72B",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-32B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3-235B-A22B",
    "google/gemma-2b",
    "google/gemma-2-9b",
    "google/gemma-3-27b-pt",
    "microsoft/phi-2",
    "microsoft/Phi-3-mini-4k-instruct",
    "microsoft/phi-4",
    "gpt2",
    "gpt2-medium",
    "gpt2-large",
    "gpt2-xl",
    "EleutherAI/pythia-12b",
    "EleutherAI/gpt-neox-20b",
    "EleutherAI/gpt-j-6b",
    "facebook/opt-125m",
    "facebook/opt-66b",
    "bigscience/bloom-560m",
    "bigscience/bloom",
    "tiiuae/falcon-7b",
    "tiiuae/falcon-40b",
    "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-ai/DeepSeek-V3",
    "openai/gpt-oss-20b",
    "openai/gpt-oss-120b",
    "HuggingFaceTB/SmolLM2-1.7B",
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "allenai/OLMo-2-1124-7B",
    "01-ai/Yi-34B",
    "ibm-granite/granite-3.3-8b-instruct",
    "bigcode/starcoder2-15b",
    "google-bert/bert-base-uncased",
    "FacebookAI/roberta-large",
    "google-t5/t5-11b",
    "google/flan-t5-xxl",
    "google/vit-large-patch16-224",
    "openai/whisper-large-v3",
]


@pytest.mark.parametrize("name", MUST)
def test_a_model_that_must_be_there(name: str) -> None:
    assert catalog.find(name) is not None
    assert catalog.find(name.upper()) is catalog.find(name)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("llama-3-8b", "meta-llama/Meta-Llama-3-8B"),
        ("llama2-7b", "meta-llama/Llama-2-7b-hf"),
        ("Qwen3_8B", "Qwen/Qwen3-8B"),
        ("gemma 3 27b", "google/gemma-3-27b-pt"),
        ("someone/Llama-3.1-8B", None),
        ("someone/Llama-3.1-8B-FP8", "meta-llama/Llama-3.1-8B"),
        ("Qwen3.6-27B-FP8", "Qwen/Qwen3.5-27B"),
        ("unsloth/gemma-4-26B-A4B-it-GGUF", "google/gemma-4-26B-A4B"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-unsloth-bnb-4bit", "meta-llama/Llama-3.1-8B"),
        ("unsloth/gpt-oss-20b", "openai/gpt-oss-20b"),
        ("RedHatAI/Qwen3-32B-quantized.w4a16", "Qwen/Qwen3-32B"),
        ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4", "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16"),
        ("mistralai/Ministral-3-8B-Instruct-2512-BF16", "mistralai/Ministral-3-8B-Base-2512"),
        ("Qwen3-8B-Q4_K_M", "Qwen/Qwen3-8B"),
        ("unsloth/Qwen3.6-35B-A3B-GGUF:UD-Q4_K_XL", "Qwen/Qwen3.5-35B-A3B"),
        ("bartowski/Qwen_Qwen3.6-27B-GGUF", "Qwen/Qwen3.5-27B"),
        ("google_gemma-4-31B-it-IQ4_XS", "google/gemma-4-31B"),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", None),
        ("Qwen/Qwen3-8B-Base-GPTQ-Int4", None),
        ("llama", None),
        ("7b", None),
    ],
)
def test_a_name_without_its_owner_finds_the_model(name: str, found: str | None) -> None:
    assert [entry.id for entry in catalog.by_short_name(name)] == ([] if found is None else [found])


AS_TYPED = {
    "qwen3 8b": "Qwen/Qwen3-8B",
    "Qwen3-4B-Instruct-2507": "Qwen/Qwen3-4B-Instruct-2507",
    "qwen3 30b a3b": "Qwen/Qwen3-30B-A3B",
    "Qwen3-Coder-480B-A35B": "Qwen/Qwen3-Coder-480B-A35B-Instruct",
    "qwen3-coder-next": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "qwen3 next 80b a3b": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "qwen3.5 9b": "Qwen/Qwen3.5-9B",
    "Qwen3.6-35B-A3B": "Qwen/Qwen3.5-35B-A3B",
    "qwen3 vl 8b": "Qwen/Qwen3-VL-8B-Instruct",
    "qwen2.5-vl-7b-instruct": "Qwen/Qwen2.5-VL-7B-Instruct",
    "qwen3 embedding 0.6b": "Qwen/Qwen3-Embedding-0.6B",
    "gemma-3-27b-it": "google/gemma-3-27b-pt",
    "gemma 4 31b": "google/gemma-4-31B",
    "gemma-3-270m-it": "google/gemma-3-270m",
    "embeddinggemma 300m": "google/embeddinggemma-300m",
    "llama 4 scout": "meta-llama/Llama-4-Scout-17B-16E",
    "Llama-4-Maverick-17B-128E-Instruct": "meta-llama/Llama-4-Maverick-17B-128E",
    "deepseek v3.2": "deepseek-ai/DeepSeek-V3.2",
    "DeepSeek V4 Flash": "deepseek-ai/DeepSeek-V4-Flash",
    "kimi k2 thinking": "moonshotai/Kimi-K2-Instruct",
    "kimi-k2.5": "moonshotai/Kimi-K2.5",
    "glm 4.6": "zai-org/GLM-4.5",
    "glm-5": "zai-org/GLM-5",
    "minimax m2": "MiniMaxAI/MiniMax-M2",
    "gpt oss 20b": "openai/gpt-oss-20b",
    "nemotron 3 nano": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nemotron nano 9b v2": "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
    "granite-4.0-h-small": "ibm-granite/granite-4.0-h-small",
    "smollm3": "HuggingFaceTB/SmolLM3-3B",
    "olmo 3 7b": "allenai/Olmo-3-1025-7B",
    "mistral small 3.2": "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "ministral 3 8b": "mistralai/Ministral-3-8B-Base-2512",
    "magistral small 2509": "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "devstral small 2507": "mistralai/Mistral-Small-24B-Base-2501",
    "seed oss 36b": "ByteDance-Seed/Seed-OSS-36B-Base",
    "modernbert base": "answerdotai/ModernBERT-base",
    "lfm2 1.2b": "LiquidAI/LFM2-1.2B",
    "apertus 8b": "swiss-ai/Apertus-8B-2509",
    "exaone 4 32b": "LGAI-EXAONE/EXAONE-4.0-32B",
    "nemotron 3 super": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
    "kimi k2.6": "moonshotai/Kimi-K2.5",
    "granite 4 micro": "ibm-granite/granite-4.0-micro",
    "command a": "CohereLabs/c4ai-command-a-03-2025",
    "command-r7b": "CohereLabs/c4ai-command-r7b-12-2024",
    "hunyuan 7b": "tencent/Hunyuan-7B-Instruct",
    "ernie 4.5 21b": "baidu/ERNIE-4.5-21B-A3B-PT",
    "falcon h1 7b": "tiiuae/Falcon-H1-7B-Base",
    "glm 4.7 flash": "zai-org/GLM-4.7-Flash",
    "lfm2 8b a1b": "LiquidAI/LFM2-8B-A1B",
    "devstral small 2": "mistralai/Devstral-Small-2-24B-Instruct-2512",
    "mistral small 4": "mistralai/Mistral-Small-4-119B-2603",
    "internvl3.5 8b": "OpenGVLab/InternVL3_5-8B-HF",
    "gemma 4 e4b": "google/gemma-4-E4B",
    "kimi linear": "moonshotai/Kimi-Linear-48B-A3B-Base",
    "longcat flash": "meituan-longcat/LongCat-Flash-Chat",
    "hunyuan a13b": "tencent/Hunyuan-A13B-Instruct",
    "internvl3.5-4b": "OpenGVLab/InternVL3_5-4B-HF",
    "nemotron-h 8b": "nvidia/Nemotron-H-8B-Base-8K",
    "ernie 4.5 vl 28b": "baidu/ERNIE-4.5-VL-28B-A3B-PT",
    "olmo hybrid 7b": "allenai/Olmo-Hybrid-7B",
    "jamba mini 1.7": "ai21labs/Jamba-v0.1",
    "qwen3 235b": "Qwen/Qwen3-235B-A22B",
    "step 3.7 flash": "stepfun-ai/Step-3.7-Flash",
    "trinity nano": "arcee-ai/Trinity-Nano-Preview",
    "trinity large": "arcee-ai/Trinity-Large-Preview",
    "dots.llm1": "rednote-hilab/dots.llm1.base",
    "bge m3": "BAAI/bge-m3",
    "glm-4.1v": "zai-org/GLM-4.1V-9B-Thinking",
    "kimi-vl": "moonshotai/Kimi-VL-A3B-Instruct",
    "kimi vl a3b thinking": "moonshotai/Kimi-VL-A3B-Instruct",
    "phi-4-multimodal": "microsoft/Phi-4-multimodal-instruct",
    "cwm": "facebook/cwm",
    "mellum2": "JetBrains/Mellum2-12B-A2.5B-Base",
    "qwen2.5 omni": "Qwen/Qwen2.5-Omni-7B",
    "qwen3 omni": "Qwen/Qwen3-Omni-30B-A3B-Instruct",
    "ling mini 2.0": "inclusionAI/Ling-mini-2.0",
    "ring-mini": "inclusionAI/Ling-mini-2.0",
    "kimi k2.7 code": "moonshotai/Kimi-K2.5",
    "kimi dev 72b": "Qwen/Qwen2.5-72B",
    "vibethinker 3b": "Qwen/Qwen2.5-3B",
    "medgemma 4b": "google/gemma-3-4b-pt",
    "qwen3.8 27b": "Qwen/Qwen3.5-27B",
    "muse glimmer": "meta-models/Muse-Glimmer-30B",
    "nemotron 3.5 lightning": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "deepseek v4 flash 0731": "deepseek-ai/DeepSeek-V4-Flash",
    "granite 4.0 1b": "ibm-granite/granite-4.0-1b",
    "llama 3.2 11b vision": "meta-llama/Llama-3.2-11B-Vision",
    "pixtral 12b": "mistral-community/pixtral-12b",
    "llava v1.6 mistral 7b": "llava-hf/llava-v1.6-mistral-7b-hf",
    "functiongemma": "google/gemma-3-270m",
    "glm 4.6v flash": "zai-org/GLM-4.1V-9B-Thinking",
    "qwq 32b preview": "Qwen/Qwen2.5-32B",
    "hermes 4.3 36b": "ByteDance-Seed/Seed-OSS-36B-Base",
    "solar 10.7b": "upstage/SOLAR-10.7B-v1.0",
    "command r+": "CohereLabs/c4ai-command-r-plus",
    "glm 5.3 flash": "zai-org/GLM-5.3-Flash",
    "laguna xs 2": "poolside/Laguna-XS.2",
    "tiny aya global": "CohereLabs/tiny-aya-base",
    "molmo2 8b": "allenai/Molmo2-8B",
    "xlstm 7b": "NX-AI/xLSTM-7b",
    "minimax m3": "MiniMaxAI/MiniMax-M3",
    "zaya1": "Zyphra/ZAYA1-8B",
    "a.x k1": "skt/A.X-K1",
    "iquest coder 40b": "IQuestLab/IQuest-Coder-V1-40B-Instruct",
    "jais 2 8b": "inceptionai/Jais-2-8B-Chat",
    "youtu llm 2b": "tencent/Youtu-LLM-2B",
    "hy4": "tencent/Hy4-preview",
    "command a+": "CohereLabs/command-a-plus-05-2026",
    "command a plus": "CohereLabs/command-a-plus-05-2026",
    "granite 4.1 8b": "ibm-granite/granite-4.1-8b",
    "nemotron 3 nano 4b": "nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16",
    "nanbeige 4.1 3b": "Nanbeige/Nanbeige4.1-3B",
    "google gemma 4 31b": "google/gemma-4-31B",
    "arcee trinity mini": "arcee-ai/Trinity-Mini",
    "meta llama 4 scout": "meta-llama/Llama-4-Scout-17B-16E",
    "deepseek v3 671b": "deepseek-ai/DeepSeek-V3",
    "deepseek v2 236b": "deepseek-ai/DeepSeek-V2",
    "granite 3.1 1b a400m base": "ibm-granite/granite-3.1-1b-a400m-base",
    "hermes 4 14b": "Qwen/Qwen3-14B",
    "aya 23 8b": "CohereLabs/aya-expanse-8b",
    "dbrx instruct": "databricks/dbrx-base",
    "hunyuan 4b": "tencent/Hunyuan-4B-Instruct",
    "paligemma 3b mix 448": "google/paligemma-3b-pt-448",
    "openhermes 2.5 mistral 7b": "teknium/OpenHermes-2.5-Mistral-7B",
    "exaone 3.5 7.8b": "LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct",
    "EXAONE-Deep-2.4B": "LGAI-EXAONE/EXAONE-3.5-2.4B-Instruct",
    "exaone 3.0": "LGAI-EXAONE/EXAONE-3.0-7.8B-Instruct",
    "sarvam 30b": "sarvamai/sarvam-30b",
    "sarvam-105b": "sarvamai/sarvam-105b",
    "apertus 1.5 8b": "swiss-ai/Apertus-v1.5-8B",
    "Apertus-v1.5-70B": "swiss-ai/Apertus-v1.5-70B",
    "qwen3.8 flash": "Qwen/Qwen3.8-Flash-Next",
    "unsloth/Qwen3.8-Flash-Next-GGUF": "Qwen/Qwen3.8-Flash-Next",
    "laguna s 2.1": "poolside/Laguna-S-2.1",
    "granite 4.1 30b": "ibm-granite/granite-4.1-30b",
    "granite-4.2-8b": "ibm-granite/granite-4.1-8b",
    "granite 4.2 3b": "ibm-granite/granite-4.1-3b",
    "Seed-Coder-8B-Instruct": "ByteDance-Seed/Seed-Coder-8B-Base",
    "orpheus 3b": "canopylabs/orpheus-3b-0.1-ft",
    "mmBERT-base": "jhu-clsp/mmBERT-base",
    "gte-modernbert-base": "answerdotai/ModernBERT-base",
    "openthinker3 7b": "Qwen/Qwen2.5-7B",
    "UI-TARS-1.5-7B": "Qwen/Qwen2.5-VL-7B-Instruct",
    "tongyi deepresearch": "Qwen/Qwen3-30B-A3B",
    "intellect 3.1": "zai-org/GLM-4.5-Air",
    "lfm2.5 350m": "LiquidAI/LFM2-350M",
    "https://huggingface.co/Qwen/Qwen3.6-27B/tree/main": "Qwen/Qwen3.5-27B",
    "hf.co/unsloth/Qwen3-8B-GGUF:Q4_K_M": "Qwen/Qwen3-8B",
}


@pytest.mark.parametrize("typed", AS_TYPED)
def test_names_of_2026_resolve_as_people_type_them(typed: str) -> None:
    assert resolve(typed, allow_hub=False, allow_recording=False).name == AS_TYPED[typed]


@pytest.mark.parametrize(("size", "text_model"), [("3b", "gemma-2-2b"), ("10b", "gemma-2-9b"), ("28b", "gemma-2-27b")])
def test_paligemma_2_has_the_language_model_of_gemma_2(size: str, text_model: str) -> None:
    """Its vocabulary has tokens for locations. Source: transformers, convert_paligemma2_weights_to_hf.py."""
    configs = catalog.configurations()["configs"]
    whole = configs[f"google/paligemma2-{size}-pt-224"]["text_config"]
    assert isinstance(whole, dict)
    alone = configs[f"google/{text_model}"]
    assert {key: alone.get(key) for key in whole} == {**whole, "vocab_size": 256000}


@pytest.mark.parametrize(
    ("typed", "meant", "used"),
    [
        ("glm 4.6", "zai-org/GLM-4.6", "zai-org/GLM-4.5"),
        ("zai-org/GLM-4.6", "zai-org/GLM-4.6", "zai-org/GLM-4.5"),
        ("kimi k2 thinking", "moonshotai/Kimi-K2-Thinking", "moonshotai/Kimi-K2-Instruct"),
        ("glm-4.5", None, "zai-org/GLM-4.5"),
    ],
)
def test_name_of_another_model_says_whose_profile_is_used(typed: str, meant: str | None, used: str) -> None:
    expected = () if meant is None else (f"{meant} has the shapes of {used}, whose profile is used",)
    assert resolve(typed, allow_hub=False, allow_recording=False).notes == expected


def test_name_of_a_quantized_copy_is_noted_as_ignored_format() -> None:
    shapes = "unsloth/Qwen3.6-27B-GGUF has the shapes of Qwen/Qwen3.5-27B, whose profile is used"
    assert resolve("unsloth/Qwen3.6-27B-GGUF", allow_recording=False).notes[:2] == (shapes, IGNORED_NOTE)
    assert resolve("qwen3 8b fp8", allow_recording=False).notes == (IGNORED_NOTE,)
    assert resolve("nemotron-3-nano-30b-a3b-fp8", allow_recording=False).notes == (IGNORED_NOTE,)
    assert IGNORED_NOTE in resolve("gemma 3 27b it qat q4_0", allow_recording=False).notes
    assert resolve("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", allow_recording=False).notes == ()


def test_a_reranker_of_the_shapes_of_an_embedding_model_is_a_language_model() -> None:
    assert not any("contrastive" in note for note in resolve("Qwen/Qwen3-Reranker-4B", allow_recording=False).notes)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-Embedding-0.6B", "google/embeddinggemma-300m", "BAAI/bge-m3"])
def test_model_of_embeddings_says_that_contrastive_training_is_not_modelled(name: str) -> None:
    (note,) = resolve(name, allow_hub=False, allow_recording=False).notes
    assert "contrastive training of embeddings" in note and "not modelled" in note


def test_models_without_tapes_are_those_that_the_table_says() -> None:
    assert {entry and entry.tapes for entry in map(catalogued, ("longcat flash", "databricks/dbrx-base"))} == {"none"}
    names = ("gpt2", "smollm3 3b", "nobody/nothing", "7B", "qwen3.5")
    assert {name: entry and entry.tapes for name, entry in zip(names, map(catalogued, names), strict=True)} == {
        "gpt2": "all", "smollm3 3b": "usual", "nobody/nothing": None, "7B": None, "qwen3.5": None,
    }  # fmt: skip


@pytest.mark.parametrize("typed", ["qwen3.5", "deepseek", "gemma 4", "llama 4", "kimi", "nemotron 3"])
def test_name_of_a_family_is_no_model(typed: str) -> None:
    with pytest.raises(UnknownModel, match="several models have this name"):
        resolve(typed, allow_hub=False, allow_recording=False)


@pytest.mark.parametrize(
    "typed", ["step 3", "bert cased", "roberta large v3", "model 7b", "3b", "gemma 1", "google 7b", "qwen coder 9"]
)
def test_some_words_of_a_name_are_not_its_model(typed: str) -> None:
    assert catalog.by_words(typed) == []


def test_every_model_is_found_without_its_owner() -> None:
    assert [e.id for e in catalog.entries() if e not in catalog.by_short_name(e.id.rpartition("/")[2])] == []


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("meta-lama/Llama-3.1-8B", "meta-llama/Llama-3.1-8B"),
        ("mistral-7b", "mistralai/Mistral-7B-v0.3"),
        ("Qwen/Qwen2-Audio-7B-Instruct", None),
        ("moonshotai/Kimi-K3", None),
        ("Llama-3.1-9B", None),
        ("lamma 4 scout", "meta-llama/Llama-4-Scout-17B-16E"),
        ("nemtron 3 nano", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"),
        ("devstrall small 2", "mistralai/Devstral-Small-2-24B-Instruct-2512"),
        ("gemini 2.5", None),
        ("GLM-9", None),
    ],
)
def test_only_near_names_are_suggested(name: str, near: str | None) -> None:
    assert next(iter(catalog.nearest(name)), None) == near


@pytest.mark.parametrize(
    ("typed", "named"),
    [
        ("step 3.5 flash", "stepfun-ai/Step-3.7-Flash"),
        ("ling flash 2.0", "inclusionAI/Ling-3.0-Flash"),
        ("ling 2.6 1t", "inclusionAI/Ling-3.0-Flash"),
        ("hunyuan 3b", "tencent/Hunyuan-7B-Instruct"),
        ("nemotron-h 47b", "nvidia/Nemotron-H-56B-Base-8K"),
        ("deepseek v5", "deepseek-ai/DeepSeek-V4-Pro"),
        ("phi-5", "microsoft/phi-4"),
        ("openthinker 32b", "open-thoughts/OpenThinker-7B"),
    ],
)
def test_models_of_the_family_are_named_if_none_is_near(typed: str, named: str) -> None:
    with pytest.raises(UnknownModel) as unknown:
        resolve(typed, allow_hub=False, allow_recording=False)
    assert unknown.value.hint is not None and named in unknown.value.hint
    assert catalog.family("nothing 7b") == []


@pytest.mark.parametrize(
    "typed",
    [
        "devstral 2",
        "Devstral-2-123B",
        "gemma 3n",
        "zamba2",
        "ring-1t",
        "intern-s1",
        "deepseek ocr",
        "deepseek ocr 2",
        "molmo 7b",
        "kimi k3",
        "qwen3.8 2.4t",
        "phi-3.5-vision-instruct",
        "qwen image",
        "llama nemotron super",
        "mimo v2.5",
        "exaone 4.5",
        "rnj-1",
        "vaultgemma 1b",
        "nemotron labs dory",
        "inkling 2 mini",
        "ling 2.6 flash",
        "laguna m",
        "mistral medium 3.5",
        "t5gemma 2",
        "chatglm3 6b",
        "deepseek-moe-16b-chat",
        "internlm2.5 7b chat",
        "mistral large 4",
        "hyperclovax seed think 14b",
        "jamba2 3b",
        "minicpm-v 4.6",
        "nemotron 3 nano omni",
        "AI21-Jamba-Reasoning-3B",
        "ling-2.6-1t",
        "lfm2-vl-1.6b",
        "internvl3.5 38b",
        "aya vision 8b",
        "nanbeige4.2 3b",
        "lara mini",
        "hy4 vl",
        "omniasr",
    ],
)
def test_known_model_that_the_catalog_lacks_is_named_with_a_reason(typed: str) -> None:
    with pytest.raises(UnknownModel) as unknown:
        resolve(typed, allow_recording=False)  # the hub is not asked: it has no such repository
    model = catalog.lacking(typed)
    assert model is not None and unknown.value.hint == hint(model)


@pytest.mark.parametrize("typed", ["google/gemma-3n-E4B-it", "google/gemma-3n-E2B", "Zyphra/Zamba2-7B-Instruct"])
def test_hub_id_that_cannot_be_read_is_named_with_the_reason_why_the_catalog_lacks_it(typed: str) -> None:
    with pytest.raises(UnknownModel) as unknown:
        resolve(typed, allow_hub=False)
    model = catalog.lacking(typed)
    assert model is not None and unknown.value.hint == hint(model)


@pytest.mark.parametrize(
    ("typed", "base"),
    [
        ("Qwen/Qwen3-8B-AWQ", "Qwen/Qwen3-8B"),
        ("Qwen3-8B-AWQ", "Qwen/Qwen3-8B"),
        ("TheBloke/Llama-2-7B-GPTQ", "meta-llama/Llama-2-7b-hf"),
        ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B"),
    ],
)
def test_packed_checkpoint_is_asked_for_the_file_that_says_how_it_is_packed(typed: str, base: str) -> None:
    with pytest.raises(UnknownModel) as unknown:
        resolve(typed, allow_hub=False)
    assert f"a GPTQ or AWQ checkpoint packs the weights of {base} is in its config.json" in str(unknown.value.hint)


def test_names_in_a_hint_about_a_model_that_the_catalog_lacks_are_in_the_catalog() -> None:
    named = {word for model in LACKING for word in re.findall(r"[\w-]+/[\w.-]+[\w]", hint(model))}
    assert named and all(map(catalog.find, named))
    assert not any(catalog.by_short_name(name) for model in LACKING for name in model.names)


@pytest.mark.parametrize(
    "typed", ["devstral small 2", "devstral 2 24b", "ling 3 flash", "gemma 3 27b", "step 3.7 flash"]
)
def test_other_models_of_the_family_are_not_lacking(typed: str) -> None:
    assert resolve(typed, allow_hub=False, allow_recording=False).source == "catalog"


def test_a_step_that_the_models_code_refuses_is_said_in_plain_words() -> None:
    with pytest.raises(NotRecordable) as refused:
        refusing_autocast().tape(AUTOCAST)
    assert "fails in this step, and would fail in training too" in refused.value.message
    assert "RuntimeError" not in refused.value.message and "could not be run" not in refused.value.message


def test_catalog_has_260_models_in_12_megabytes() -> None:
    assert len(catalog.entries()) >= 260
    assert catalog.PATH.stat().st_size < 12_000_000


@pytest.mark.parametrize("entry", [e for e in catalog.entries() if not e.has_tapes], ids=lambda e: e.id)
def test_profile_without_tapes_has_the_listed_parameters(entry: catalog.Entry) -> None:
    profile = catalog.profile(entry)
    assert profile.parameters == entry.parameters
    assert entry.source and profile.stacks
    assert not profile.tapes and not profile.refusals


@pytest.mark.parametrize("entry", [e for e in catalog.entries() if e.tapes == "usual"], ids=lambda e: e.id)
def test_usual_tapes_answer_the_default_question(entry: catalog.Entry) -> None:
    model = resolve(entry.id, allow_recording=False)
    profile = model.profile
    assert profile is not None and profile.parameters == entry.parameters and entry.source
    request = make_request({"model": entry.id, "gpus": "8"})
    for plan in plans(request, seq_len=default_seq_len(profile.max_seq_len)):
        if not takes_long_on_cpu(profile, plan):
            cpu_tape(model, plan)
        key, _ = row_tape(model, plan)
        assert gpu_tape_key_of(profile, key, plan, find_gpu("H100-80GB")).name in profile.tapes


@pytest.mark.parametrize("model", ["Qwen/Qwen3.5-9B", "Qwen/Qwen3-Next-80B-A3B-Instruct"])
def test_linear_attention_is_answered_at_any_length_without_torch(model: str) -> None:
    found = resolve(model, allow_recording=False)
    assert found.profile is not None
    options = {"model": model, "gpus": "16", "strategy": "zero3", "micro_batch_size": "3"}
    (plan,) = plans(make_request(options), seq_len=5000)
    key, _ = row_tape(found, plan)
    assert (key.device, key.at) == ("gpu", None)
    row = estimate_plan(found, plan, find_gpu("H200"))
    assert row.needed_bytes and row.step and row.simulated_peak_bytes is None


@pytest.mark.parametrize("entry", [e for e in catalog.entries() if e.tapes == "all"], ids=lambda e: e.id)
def test_every_profile_has_the_listed_total_and_the_usual_tapes(entry: catalog.Entry) -> None:
    """The total that is listed, and a step of FSDP2, which every model's code can take."""
    profile = catalog.profile(entry)
    assert profile.parameters == entry.parameters
    assert entry.source
    always: list[TapePrecision] = ["bf16-mixed", "bf16"]
    for precision, checkpointing, batch_is_one in product(always, CHECKPOINTING, (False, True)):
        assert TapeKey("fsdp2", precision, "eager", checkpointing, batch_is_one).name in profile.tapes
    engines: list[TapeEngine] = ["fsdp2", "plain", "fsdp1"]
    attentions: list[Attention] = ["sdpa", "eager"]
    precisions: list[TapePrecision] = [*always, "fp32"]
    for fields in product(engines, precisions, attentions, CHECKPOINTING, (False, True)):
        name = TapeKey(*fields).name
        assert (name in profile.tapes) != (name in profile.refusals), "a tape, or why there is none"
    for name in profile.tapes:
        key = TapeKey.from_name(name)
        if (key.attention, key.device) == ("sdpa", "cpu"):
            filled = profile.window is not None and profile.fills_window(profile.max_seq_len or profile.window)
            for window_filled in {False, filled}:
                on_gpu = gpu_tape_key(key, window_filled=window_filled, recorded=profile.tapes)
                assert on_gpu.name in profile.tapes
                assert on_gpu.window_filled or not window_filled


def test_all_models_are_recorded_by_the_present_recorder() -> None:
    assert {entry.recording for entry in catalog.entries()} == {RECORDING}


BUILDABLE = [entry for entry in catalog.entries() if is_installed(entry.model_type)]


@pytest.mark.slow
@pytest.mark.parametrize("entry", of_today(BUILDABLE, days=len(BUILDABLE) // 2), ids=lambda e: e.id)
def test_shipped_profile_is_the_one_that_the_recorder_makes_now(entry: catalog.Entry) -> None:
    """With other parameters or buffers, a step that the catalog lacks could not be recorded."""
    from fsdp_advisor.model.recorders import build_recorder

    shipped = catalog.profile(entry)
    recorder = build_recorder(json.dumps(shipped.config), entry.id, entry.task)
    assert (recorder.profile.root, recorder.profile.stacks) == (shipped.root, shipped.stacks)
    if not shipped.tapes:
        return
    keys = [TapeKey.from_name(tape) for tape in shipped.tapes]
    of_ddp = ("plain", "bf16-mixed", "gpu", "full", False)
    key = next(
        (k for k in keys if (k.engine, k.precision, k.device, k.checkpointing, k.batch_is_one) == of_ddp), keys[0]
    )

    def stored(tape: Tape) -> bytes:
        return dump(replace(shipped, tapes={key.name: tape}))

    assert stored(shipped.tapes[key.name]) == stored(recorder.tape(key))


NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
DEFAULTS = catalog.configurations()["defaults"]


def test_experts_are_counted() -> None:
    """As the profile has them, and as many as the configuration says, or else its class. LongCat's that do nothing have weights too."""
    counted = {e.id: (e.experts, catalog.profile(e).experts) for e in catalog.entries()}
    assert counted == {e.id: (_experts_of_config(e),) * 2 for e in catalog.entries()}


def _experts_of_config(entry: catalog.Entry) -> int | None:
    profile = catalog.profile(entry)
    config = profile.config.get("text_config", profile.config)
    config = {**config, **config.get("ffn_config", {})}  # DBRX
    if entry.experts and not any(name in config for name in NUMBERS_OF_EXPERTS):
        config = {**DEFAULTS[config["model_type"]], **config}
    said = next((n for name in NUMBERS_OF_EXPERTS if (n := config.get(name))), None)
    return said and said + config.get("zero_expert_num", 0)


@pytest.mark.parametrize(
    ("pattern", "found", "not_found"),
    [
        ("moe", "openai/gpt-oss-20b", "openai-community/gpt2"),
        ("Mixture-of-Experts", "deepseek-ai/DeepSeek-V3", "Qwen/Qwen3-8B"),
        ("qwen3_moe", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-8B"),
        ("vision", "google/vit-base-patch16-224", "google-bert/bert-base-cased"),
        ("speech", "openai/whisper-small", "google-t5/t5-small"),
        ("encoder", "google-bert/bert-base-cased", "openai-community/gpt2"),
        ("7b", "mistralai/Mixtral-8x7B-v0.1", "google/gemma-2-27b"),
        ("7b", "tiiuae/falcon-7b", "EleutherAI/pythia-2.8b"),
        ("llama3", "meta-llama/Llama-3.1-8B", "codellama/CodeLlama-34b-hf"),
        ("llama-3 70B", "meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("gpt-2", "openai-community/gpt2", "EleutherAI/gpt-j-6b"),
        ("META-LLAMA/", "meta-llama/Llama-2-7b-hf", "tiiuae/falcon-7b"),
    ],
)
def test_search_by_what_people_say(pattern: str, found: str, not_found: str) -> None:
    ids = {entry.id for entry in catalog.search(pattern)}
    assert found in ids
    assert not_found not in ids


@pytest.mark.parametrize("pattern", ["", "  ", None, "-"])
def test_search_for_nothing_finds_everything(pattern: str | None) -> None:
    assert catalog.search(pattern) == list(catalog.entries())


def test_every_model_is_found_by_each_of_its_names() -> None:
    found = functools.cache(catalog.search)  # many models share a task
    for entry in catalog.entries():
        missed = [name for name in (entry.id, *entry.aliases, entry.model_type, entry.task) if entry not in found(name)]
        assert missed == [], entry.id


def test_a_catalogued_language_model_says_that_its_checkpoint_has_a_tower() -> None:
    (note,) = resolve("google/gemma-3-4b-pt").notes
    assert "0.42B more parameters" in note and "config.json" in note
    assert (
        resolve("google/medgemma-4b-it")
        .notes[-1]
        .startswith("google/medgemma-4b-it is estimated as its language model alone")
    )
    assert not any(
        "tower" in note
        for name in ("google/medgemma-27b-text-it", "google/gemma-3-1b-pt")
        for note in resolve(name).notes
    )


@pytest.mark.parametrize("size", ["4B", "30B-A3B", "235B-A22B"])
def test_a_release_with_longer_sequences_has_its_own_maximum(size: str) -> None:
    first, later = catalog.find(f"Qwen/Qwen3-{size}"), catalog.find(f"Qwen/Qwen3-{size}-Thinking-2507")
    assert first is not None
    assert later is not None
    assert (first.max_seq_len, later.max_seq_len) == (40960, 262144)
    assert first.parameters == later.parameters
