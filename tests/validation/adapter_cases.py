"""Jobs with adapters, frozen parameters or a quantized base that are both simulated and predicted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from small_models import Case, Configs, small_models

_DRAWN = [
    json.loads(line)
    for line in Path(__file__).with_name("drawn_adapters.jsonl").read_text(encoding="utf-8").splitlines()
]
"""Random jobs under plain PyTorch: model, method, engine, checkpointing, accumulation, dtypes and sizes were drawn independently."""
CONFIGS: Configs = {
    **small_models(
        vocabulary=1024, llama={"vocab_size": 1000}, mistral={"sliding_window": None}, gpt2={"vocab_size": 515, "n_positions": 256}
    ),
    **{drawn["name"]: drawn["config"] for drawn in _DRAWN},
}  # fmt: skip
MODELS = ("llama", "qwen3", "mistral", "gemma2", "phi3", "mixtral", "falcon", "gpt2", "bert", "t5")
NEEDED: dict[str, dict[str, str]] = {  # options of methods without a default in PEFT, or of models without sdpa
    "mixtral": {"lora_target_modules": "q_proj,v_proj"},
    "phi3": {"lora_target_modules": "qkv_proj"},
    "gemma2": {"attention": "eager"},
    "t5": {"attention": "eager"},
}
ENGINES: tuple[dict[str, str], ...] = (
    {"strategy": "ddp", "gpus": "1"},
    {"strategy": "ddp", "gpus": "4"},
    {"strategy": "zero3", "backend": "fsdp2", "gpus": "4"},
    {"strategy": "zero2", "backend": "fsdp2", "gpus": "64"},
    {"strategy": "zero3", "backend": "fsdp1", "gpus": "4"},
    {"strategy": "zero2", "backend": "fsdp1", "gpus": "8"},
    {"strategy": "hsdp", "backend": "fsdp2", "gpus": "8", "nnodes": "2"},
)
VARIATIONS: tuple[dict[str, str], ...] = (
    {},
    {"activation_checkpointing": "full"},
    {"gradient_accumulation_steps": "2"},
    {"lora_target_modules": "all-linear", "lora_r": "4"},
    {"use_dora": "true"},
    {"lora_dropout": "0.1"},
    {"precision": "bf16"},
    {"dtype": "bfloat16"},
    {"precision": "fp32", "micro_batch_size": "1"},
)
METHODS: tuple[dict[str, Any], ...] = (
    {"peft_type": "IA3"},
    {"peft_type": "VERA", "r": 16},
    {"peft_type": "ADALORA", "total_step": 100},
    {"peft_type": "LOHA", "target_modules": ["q_proj"]},
    {"peft_type": "LOKR", "target_modules": ["q_proj"]},
    {"peft_type": "OFT", "oft_block_size": 32},
    {"peft_type": "FOURIERFT"},
    {"peft_type": "BOFT", "boft_block_size": 4, "boft_n_butterfly_factor": 2, "target_modules": ["q_proj"]},
    {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 8},
    {"peft_type": "WAVEFT", "n_frequency": 64, "target_modules": ["q_proj"]},
)
SHARING: tuple[dict[str, Any], ...] = (
    {"peft_type": "LILY", "r": 4, "stride_A": 3, "num_B": 2, "target_modules": ["gate_proj", "up_proj"]},
    {"peft_type": "LILY", "r": 4, "stride_A": 2, "num_B": 2, "target_modules": ["q_proj"]},
    {"peft_type": "RANDLORA", "r": 4, "target_modules": ["q_proj", "v_proj"]},
    {"peft_type": "UNILORA", "theta_d_length": 256, "target_modules": ["q_proj", "v_proj"]},
    {"peft_type": "TINYLORA"},
    {"peft_type": "VBLORA", "num_vectors": 16, "vector_length": 64},
)
"""Methods whose layers have matrices or buffers in common."""


def _sharding(method: dict[str, Any]) -> Case:
    """The options of FSDP2 with which the method can be trained. AdaLoRA reads its matrices after the forward, so they must stay
    gathered. VeRA's fixed matrices stay in fp32.
    """
    match method["peft_type"]:
        case "ADALORA":
            return ENGINES[3]
        case "VERA":
            return {**ENGINES[2], "precision": "fp32"}
        case _:
            return ENGINES[2]


def _flattens(case: Case) -> bool:
    """Whether FSDP1 can flatten the case's units, although adapters are in fp32."""
    return case.get("backend") != "fsdp1" or not {"bf16", "bfloat16"} & {case.get("precision"), case.get("dtype")}


def _lora() -> list[Case]:
    """Cases of LoRA: each architecture with each engine; the variations take turns."""
    cases = []
    for m, model in enumerate(MODELS):
        for e, engine in enumerate(ENGINES):
            variation = VARIATIONS[(3 * m + 2 * e) % len(VARIATIONS)]
            cases.append({"model": model, **engine, "use_peft": "true", **NEEDED.get(model, {}), **variation})
    return [case for case in cases if _flattens(case)]


FEW: list[Case] = [
    {"model": "llama", **ENGINES[0], "use_peft": "true", "activation_checkpointing": "full"},
    {"model": "qwen3", **ENGINES[2], "use_peft": "true", "lora_target_modules": "all-linear", "dtype": "bfloat16"},
    {"model": "llama", **ENGINES[4], "use_peft": "true", "gradient_accumulation_steps": "3"},
    {"model": "llama", **ENGINES[1], "use_peft": "true", "load_in_4bit": "true", "precision": "bf16"},
    {"model": "llama", **ENGINES[3], "freeze": "model.layers.[2-3]"},
    {"model": "llama", **ENGINES[2], "peft_config": json.dumps(METHODS[0])},
    {"model": "llama", **ENGINES[1], "peft_config": json.dumps(SHARING[0])},
    {"model": "llama", **ENGINES[4], "use_peft": "true", "load_in_4bit": "true", "precision": "fp32", "bnb_4bit_quant_storage": "float32"},
    {"model": "qwen3", **ENGINES[2], "use_peft": "true", "load_in_4bit": "true", "bnb_4bit_quant_storage": "bfloat16"},
]  # fmt: skip
MORE: list[Case] = [
    *_lora(),
    {"model": "llama", **ENGINES[2], "use_peft": "true", "load_in_4bit": "true"},
    *({"model": "llama", **e, "peft_config": json.dumps(m)} for m in METHODS for e in (ENGINES[0], _sharding(m))),
    *({"model": "llama", **ENGINES[5], "peft_config": json.dumps(METHODS[2]), "precision": p} for p in ("bf16-mixed", "fp32")),
    *({"model": "llama", **ENGINES[0], "peft_config": json.dumps(m)} for m in SHARING),
    *({"model": "llama", **e, "freeze": p} for p in ("lm_head", "model.layers.[0-2]", "model.layers") for e in ENGINES),
    *({"model": "llama", **e, "use_peft": "true", "lora_modules_to_save": "lm_head"} for e in ENGINES),
    *({"model": "mistral", **ENGINES[0], "use_peft": "true", **base} for base in (
        {"load_in_8bit": "true"},
        {"load_in_8bit": "true", "use_dora": "true"},
        {"load_in_4bit": "true", "use_dora": "true", "lora_target_modules": "all-linear", "use_bnb_nested_quant": "true"},
        {"load_in_4bit": "true", "use_bnb_nested_quant": "true"},
        {"load_in_4bit": "true", "bnb_4bit_quant_type": "fp4", "lora_target_modules": "all-linear"},
        {"load_in_4bit": "true", "activation_checkpointing": "full", "gradient_accumulation_steps": "2"},
    )),
    {"model": "llama", **ENGINES[0], "peft_config": json.dumps(METHODS[2]), "activation_checkpointing": "reentrant",
     "gradient_accumulation_steps": "2", "optim": "schedule_free_radam"},
    {"model": "gpt2", **ENGINES[0], "use_peft": "true", "load_in_4bit": "true", "lora_target_modules": "all-linear"},
    {"model": "gpt2", **ENGINES[1], "use_peft": "true", "load_in_4bit": "true", "activation_checkpointing": "full"},
    {"model": "bert", **ENGINES[2], "use_peft": "true", "load_in_4bit": "true", "use_dora": "true", "lora_target_modules": "all-linear",
     "precision": "fp16-mixed"},
    *({"model": drawn["name"], **drawn["options"]} for drawn in _DRAWN),
]  # fmt: skip
