"""Models that users ask for and the catalog lacks: what each is, why it is missing, and what to do instead."""

from __future__ import annotations

from typing import NamedTuple


class Lacking(NamedTuple):
    """A model that the catalog lacks."""

    names: tuple[str, ...]
    """The published name without owner, and shorter names that users type."""
    why: str
    """What it is, and why the catalog lacks it."""
    instead: str
    """What to use instead."""


_GIVE = "give its hub id or config.json, which is then recorded once"
_REMOTE = "its code is in its hub repository (auto_map), which is never run"
_LOOPS = "runs its middle layers several times in one forward, which is not modelled"
_REHEARSE = "fsdp-advisor rehearse counts the memory of its training script, with transformers 5.24"
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
        ("Ling-flash-2.0", "Ling-1T", "Ling-lite-1.5", "Ling-plus", "Ring-flash-2.0", "Ring-1T", "Ring-lite"),
        f"Ling and Ring up to 2.0 have the model type bailing_moe, which transformers 5.23 lacks: {_REMOTE}",
        "the catalog has inclusionAI/Ling-mini-2.0 of this family; inclusionAI/Ling-3.0-Flash is a later model of another architecture",
    ),
    Lacking(
        ("Intern-S1", "Intern-S1-mini", "InternS1", "Intern-S1-Pro"),
        f"Intern-S1 is InternViT before a Qwen3 language model, and transformers 5.23 lacks its model type: {_REMOTE}",
        "OpenGVLab/InternVL3_5-8B-HF has the layers of Intern-S1-mini; a config.json with model_type internvl is recorded",
    ),
    Lacking(
        ("DeepSeek-OCR",),
        f"DeepSeek-OCR is a model of 3B for images of text, and transformers 5.23 lacks its model type: {_REMOTE}",
        "for DeepSeek-OCR-2, which transformers has, give its hub id or config.json",
    ),
    Lacking(
        ("DeepSeek-OCR-2",),
        f"DeepSeek-OCR-2 is a model of 3B for images of text; {_NO_SIZES}",
        _GIVE,
    ),
    Lacking(
        ("Molmo-7B-D-0924", "Molmo-7B-O-0924", "Molmo-72B-0924"),
        f"Molmo is a vision-language model whose model type transformers 5.23 lacks: {_REMOTE}",
        "allenai/Molmo2-8B is its successor",
    ),
    Lacking(
        ("Molmo2-4B", "Molmo2-O-7B"),
        f"of Molmo2 the catalog has the 8B model; {_NO_SIZES}",
        f"{_GIVE}; allenai/Molmo2-8B is in the catalog",
    ),
    Lacking(
        ("Qwen3.8-2.4T-A95B",),
        f"Qwen3.8-2.4T-A95B is a mixture of experts; {_NO_SIZES}",
        f"{_GIVE}; Qwen/Qwen3.8-27B is the dense model",
    ),
    Lacking(
        (
            "Llama-3_3-Nemotron-Super-49B-v1", "Llama-3_3-Nemotron-Super-49B-v1_5", "Llama-3_1-Nemotron-Ultra-253B-v1",
            "Llama-Nemotron-Super-49B", "Llama-Nemotron-Ultra-253B", "Nemotron-Super-49B", "Nemotron-Ultra-253B",
        ),
        f"its layers differ in width (model type nemotron-nas), and transformers 5.23 lacks it: {_REMOTE}",
        "nvidia/Llama-3.1-Nemotron-70B-Instruct-HF and nvidia/Llama-3.1-Nemotron-Nano-8B-v1 have Llama's layers;"
        " nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16 and nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16 are later models",
    ),
    Lacking(
        ("Phi-3.5-vision-instruct", "Phi-3-vision-128k-instruct"),
        f"transformers 5.23 lacks Phi-3's vision model: {_REMOTE}",
        "microsoft/Phi-4-multimodal-instruct is its successor",
    ),
    Lacking(
        ("MiniCPM-V-4_5", "MiniCPM-V-2_6", "MiniCPM-o-4_5", "MiniCPM-o-2_6", "MiniCPM4.1-8B", "MiniCPM4-8B"),
        f"transformers 5.23 lacks this MiniCPM: {_REMOTE}",
        "transformers has MiniCPM3 and MiniCPM-V 4.6 and 4.7 (minicpm3, minicpmv4_6, minicpmv4_7), whose config.json is recorded",
    ),
    Lacking(
        ("Kimi-K3",),
        f"Kimi-K3 has the model type kimi_k3, which transformers 5.23 lacks: {_REMOTE}",
        "moonshotai/Kimi-K2.5 and moonshotai/Kimi-Linear-48B-A3B-Base are other models",
    ),
    Lacking(
        ("MiMo-V2.5", "MiMo-V2.5-Pro"),
        f"MiMo-V2.5 has the model type mimo_v2, with towers for images and sound, which transformers 5.23 lacks: {_REMOTE}",
        "XiaomiMiMo/MiMo-V2-Flash, which transformers has, is the language model before it, of 309B",
    ),
    Lacking(
        ("EXAONE-4.5-33B",),
        f"EXAONE 4.5 is the language model of EXAONE 4.0 with a vision tower; {_NO_SIZES}",
        f"{_GIVE}; LGAI-EXAONE/EXAONE-4.0-32B is the language model before it",
    ),
    Lacking(
        (
            "FLUX.1-dev", "FLUX.2-dev", "Qwen-Image", "stable-diffusion-3.5-large", "SD3.5", "stable-diffusion-xl-base-1.0", "SDXL",
            "stable-diffusion-v1-5", "Wan2.1-T2V-14B", "Wan2.2-T2V-A14B",
        ),
        "it is a diffusion model of the diffusers package, not of transformers, and has no config.json of its whole",
        "record its transformer in Python with fsdp_advisor.record_module",
    ),
    Lacking(
        ("Baichuan2-13B-Base", "Baichuan2-7B-Base", "Baichuan-13B-Base", "Baichuan-7B"),
        f"transformers 5.23 lacks Baichuan: {_REMOTE}",
        "the 7B models have the layers of Llama: give their config.json with model_type llama",
    ),
    Lacking(
        ("Rnj-1", "Rnj-1-Instruct"),
        f"Rnj-1 is a dense model of 8B with the layers of Gemma 3 (model type gemma3_text); {_NO_SIZES}",
        f"{_GIVE}; google/gemma-3-12b-pt has such layers",
    ),
    Lacking(
        ("VaultGemma-1B",),
        f"VaultGemma is a dense model of 1B with the layers of Gemma 2, without norms after attention and MLP; {_NO_SIZES}",
        f"{_GIVE}; google/gemma-3-1b-pt is of the same size",
    ),
    Lacking(
        ("Nemotron-Labs-Dory1.0-4B-BF16", "Nemotron-Labs-Dory"),
        f"Dory is a model of 4B that {_LOOPS}",
        _REHEARSE,
    ),
    Lacking(
        ("Inkling-2-Mini",),
        f"Inkling 2 Mini is a mixture of experts of 26B that {_LOOPS}",
        _REHEARSE,
    ),
    Lacking(
        ("Ling-2.6-Flash", "Ling-2.5-Flash", "Ling-2.6-1T", "Ling-2.5-1T", "Ring-2.5-1T", "Ring-2.6-1T"),
        f"Ling and Ring 2.5 and 2.6 mix Lightning attention and latent attention: {_REMOTE}; transformers' bailing_hybrid has the layers of"
        " Ling 3.0, which are others",
        "inclusionAI/Ling-3.0-Flash is the model after it",
    ),
    Lacking(
        ("Laguna-M-2.1", "Laguna-M.1"),
        f"of Laguna the catalog has the XS and S models; {_NO_SIZES}",
        f"{_GIVE}; poolside/Laguna-S-2.1 is in the catalog",
    ),
    Lacking(
        ("Inkling", "Inkling-Small"),
        "Inkling is a mixture of experts for text, images and sound (model type inkling_mm_model); what transformers 5.23 builds from its"
        " configuration has another total than the published 975B",
        _GIVE,
    ),
    Lacking(
        ("Mistral-Medium-3.5-128B",),
        f"Mistral Medium 3.5 is a dense model of 128B; {_NO_SIZES}",
        f"{_GIVE}; mistralai/Mistral-Small-4-119B-2603 is a mixture of experts",
    ),
    Lacking(
        ("Mistral-Large-4-1T-A52B", "Mistral-Large-4"),
        f"Mistral Large 4 is a mixture of experts of 1T for text and images; {_NO_SIZES}",
        f"{_GIVE}; mistralai/Mistral-Large-3-675B-Instruct-2512 is the model before it",
    ),
    Lacking(
        ("HyperCLOVAX-SEED-Think-14B",),
        f"HyperCLOVA X SEED Think is a dense model of 14B; {_NO_SIZES}",
        _GIVE,
    ),
    Lacking(
        ("AI21-Jamba2-3B", "Jamba2-3B", "AI21-Jamba-Reasoning-3B"),
        f"this Jamba of 3B mixes Mamba-1 layers and attention; {_NO_SIZES}",
        f"{_GIVE}; ai21labs/AI21-Jamba2-Mini is another model, of 52B",
    ),
    Lacking(
        ("MiniCPM-V-4.6", "MiniCPM-V-4_6"),
        f"MiniCPM-V 4.6 is a vision-language model; {_NO_SIZES}",
        _GIVE,
    ),
    Lacking(
        ("Nemotron-3-Nano-Omni-30B-A3B", "Nemotron-3-Nano-Omni"),
        f"Nemotron 3 Nano Omni has towers for images and sound before Nemotron 3 Nano; {_NO_SIZES}",
        f"{_GIVE}; nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 is its language model",
    ),
    Lacking(
        ("MiniCPM5-1B", "MiniCPM5-2B"),
        f"MiniCPM5 is a small dense model; {_NO_SIZES}",
        f"{_GIVE}; Qwen/Qwen3-1.7B is of a similar size",
    ),
    Lacking(
        ("Granite-4.0-h-350m", "Granite-4.0-h-350m-base"),
        f"it mixes Mamba-2 layers and attention; {_NO_SIZES}",
        f"{_GIVE}; ibm-granite/granite-4.0-h-1b has such layers, ibm-granite/granite-4.0-1b and ibm-granite/granite-4.0-350m are dense",
    ),
    Lacking(
        ("Solar-Open-2", "Solar-Open2"),
        f"Solar Open 2 has the model type solar_open2, which transformers 5.23 lacks: {_REMOTE}",
        "upstage/Solar-Open-100B is the model before it",
    ),
    Lacking(
        ("LongCat-Flash-Lite",),
        f"LongCat-Flash-Lite has embeddings of n-grams, which transformers' longcat_flash lacks: {_REMOTE}",
        "meituan-longcat/LongCat-Flash-Chat is another model of this family",
    ),
    Lacking(
        ("MiMo-7B-Base", "MiMo-7B-RL", "MiMo-7B-SFT", "MiMo-7B-RL-ZERO"),
        f"MiMo-7B has the model type mimo, which transformers 5.23 lacks: {_REMOTE}",
        "XiaomiMiMo/MiMo-V2-Flash is a later model, of 309B; Qwen/Qwen2.5-7B is of the same size",
    ),
    Lacking(
        ("Phi-4-mini-flash-reasoning",),
        f"Phi-4-mini-flash has the model type phi4flash, which transformers 5.23 lacks: {_REMOTE}",
        "microsoft/Phi-4-mini-instruct is the dense model",
    ),
    Lacking(
        ("LLaVA-OneVision-1.5-4B-Instruct", "LLaVA-OneVision-1.5-8B-Instruct"),
        f"transformers 5.23 lacks LLaVA-OneVision 1.5: {_REMOTE}",
        "llava-hf/llava-onevision-qwen2-7b-ov-hf is the model before it",
    ),
    Lacking(
        ("T5Gemma-2-270m-270m", "T5Gemma-2-1b-1b", "T5Gemma-2-4b-4b", "GLM-OCR", "PaddleOCR-VL"),
        _NO_SIZES,
        _GIVE,
    ),
    Lacking(
        ("LFM2-VL-450M", "LFM2-VL-1.6B", "LFM2-VL-3B", "LFM2.5-VL-450M", "LFM2.5-VL-1.6B", "LFM2-24B-A2B"),
        f"of LFM2 the catalog has language models up to 8B; {_NO_SIZES}",
        f"{_GIVE}; LiquidAI/LFM2-1.2B and LiquidAI/LFM2-8B-A1B are in the catalog",
    ),
    Lacking(
        ("Nemotron-Nano-12B-v2-VL-BF16", "Llama-3.1-Nemotron-Nano-VL-8B-V1"),
        f"it is a vision-language model whose model type transformers 5.23 lacks: {_REMOTE}",
        "nvidia/NVIDIA-Nemotron-Nano-12B-v2 and nvidia/Llama-3.1-Nemotron-Nano-8B-v1 are the language models",
    ),
    Lacking(
        ("Step3-VL-10B", "Step3", "Step-3"),
        f"transformers 5.23 lacks Step 3: {_REMOTE}",
        "stepfun-ai/Step-3.7-Flash is a later model",
    ),
    Lacking(
        ("InternVL3-38B-hf", "InternVL3-78B-hf", "InternVL3_5-38B-HF", "InternVL3_5-241B-A28B-HF", "InternVL3_5-241B-A28B"),
        f"this InternVL has InternViT-6B as its vision tower; {_NO_SIZES}",
        f"{_GIVE}; OpenGVLab/InternVL3_5-30B-A3B-HF is the largest InternVL in the catalog",
    ),
    Lacking(
        ("aya-vision-8b", "aya-vision-32b", "command-a-vision-07-2025", "granite-docling-258M", "Qwen3-ASR-0.6B", "Qwen3-ASR-1.7B"),
        f"transformers has its model type, but {_NO_SIZES}",
        _GIVE,
    ),
    Lacking(
        ("MiMo-VL-7B-RL", "MiMo-VL-7B-RL-2508", "MiMo-VL-7B-SFT", "MiMo-VL-7B-SFT-2508"),
        f"MiMo-VL has Qwen2.5-VL's layers with sizes of its own; {_NO_SIZES}",
        f"{_GIVE}; Qwen/Qwen2.5-VL-7B-Instruct has such layers",
    ),
    Lacking(
        ("Nanbeige4.2-3B",),
        f"Nanbeige4.2 {_LOOPS}",
        "Nanbeige/Nanbeige4.1-3B is the model before it",
    ),
    Lacking(
        ("dots.ocr", "dots.ocr-1.5", "Motif-3-Beta", "Motif-3"),
        f"transformers 5.23 lacks its model type: {_REMOTE}",
        "`fsdp-advisor models` lists the models of the catalog",
    ),
    Lacking(
        (
            "Lara-4-Mini-Base", "Lara-4-Mini", "Lara-Mini", "Hy4-VL", "OmniASR", "omniASR-LLM-300M", "omniASR-LLM-1B", "omniASR-LLM-7B",
            "omniASR-CTC-300M", "omniASR-CTC-1B",
        ),
        "its model type came with transformers 5.24, whose default sizes are all that was found of it; no published total confirms them",
        "install transformers 5.24 and give its hub id or config.json, which is then recorded once",
    ),
    Lacking(
        (
            "Moondream3-preview", "Moondream-3", "Moondream2", "Grok-2", "Grok-2.5", "RWKV-7-World", "InternLM2-20B", "InternLM2-7B",
            "InternLM2-chat-20B", "InternLM2-chat-7B", "InternLM2.5-20B-chat", "InternLM2.5-7B-chat-1M", "InternLM2.5-1.8B-chat",
            "ChatGLM3-6B-base", "DeepSeek-MoE-16B-base", "DeepSeek-MoE-16B-chat", "Phi-3-small-8k-instruct", "Phi-3-small-128k-instruct",
        ),
        f"transformers 5.23 lacks its model type: {_REMOTE}",
        "`fsdp-advisor models` lists the models of the catalog",
    ),
)  # fmt: skip


def hint(lacking: Lacking) -> str:
    """The hint of the error about an unknown model that is in LACKING."""
    return f"{lacking.why}; {lacking.instead}"
