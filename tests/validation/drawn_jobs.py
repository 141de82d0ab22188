"""Draws jobs from all options together, and compares their predicted peaks with PyTorch's own step: `drawn_jobs.py --minutes 15`.

A job takes five to thirty seconds. Jobs whose options do not go together are not counted. Of every job that is simulated,
drawn_jobs.csv keeps both peaks; a test compares today's predictions with them. The campaign prints each job that differs or fails, and
at its end how many were equal, or were refused when they were recorded or simulated.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from adapter_peaks import Line, read, write
from small_models import Case, name_of, options_of, small_models

from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request

RESULTS = Path(__file__).with_name("drawn_jobs.csv")
_SIZE = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 1000, "max_position_embeddings": 512,
}  # fmt: skip
_EXPERTS = {**_SIZE, "num_experts_per_tok": 2, "head_dim": 32}
_MORE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {**_EXPERTS, "model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 64},
    "gpt_oss": {**_EXPERTS, "model_type": "gpt_oss", "num_local_experts": 4, "sliding_window": 64},
    "qwen3_next": {
        **_EXPERTS, "model_type": "qwen3_next", "num_experts": 4, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    },
    "granite": {**_SIZE, "model_type": "granite"},
    "olmo3": {**_SIZE, "model_type": "olmo3"},
    "smollm3": {**_SIZE, "model_type": "smollm3", "pad_token_id": 0},
    "glm4": {**_SIZE, "model_type": "glm4", "head_dim": 32, "pad_token_id": 0},
    "cohere2": {**_SIZE, "model_type": "cohere2", "sliding_window": 64, "pad_token_id": 0, "eos_token_id": 1},
    "gpt_neox": {**_SIZE, "model_type": "gpt_neox"},
    "qwen2": {**_SIZE, "model_type": "qwen2"},
    "ministral": {**_SIZE, "model_type": "ministral", "head_dim": 32},
    "deepseek_v3": {
        **_SIZE, "model_type": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 2,
        "topk_group": 1, "moe_intermediate_size": 64, "first_k_dense_replace": 1, "q_lora_rank": 64, "kv_lora_rank": 32,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
    },
    "nemotron_h": {
        **_SIZE, "model_type": "nemotron_h", "layers_block_type": ["mamba", "moe", "attention", "moe"], "head_dim": 32,
        "mamba_num_heads": 8, "mamba_head_dim": 32, "ssm_state_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 64, "moe_shared_expert_intermediate_size": 64,
    },
    "falcon_h1": {
        **_SIZE, "model_type": "falcon_h1", "head_dim": 32, "mamba_d_ssm": 256, "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 32,
        "mamba_chunk_size": 64,
    },
    "lfm2": {**_SIZE, "model_type": "lfm2", "layer_types": ["conv", "conv", "full_attention", "conv"]},
    "gemma3_images": {
        "model_type": "gemma3", "mm_tokens_per_image": 64,
        "text_config": {**_SIZE, "model_type": "gemma3_text", "head_dim": 32, "sliding_window": 64, "vocab_size": 262_208},
        "vision_config": {
            "model_type": "siglip_vision_model", "num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 4,
            "intermediate_size": 128, "image_size": 224, "patch_size": 14, "vision_use_head": False,
        },
    },
    "qwen2_5_vl": {
        "model_type": "qwen2_5_vl", "text_config": {**_SIZE, "hidden_size": 512, "vocab_size": 152_064},
        "vision_config": {
            "depth": 4, "hidden_size": 64, "num_heads": 4, "intermediate_size": 128, "out_hidden_size": 512,
            "fullatt_block_indexes": [1, 3],
        },
    },
    "opt": {
        "model_type": "opt", "hidden_size": 128, "ffn_dim": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 1000,
        "max_position_embeddings": 512, "word_embed_proj_dim": 128,
    },
}  # fmt: skip
CONFIGS = {**small_models(vocabulary=1000), **_MORE}
WITHOUT_SDPA = ("gemma2", "gpt_oss")

ALWAYS: Mapping[str, Sequence[str]] = {
    "gpus": ("1", "2", "2", "4", "8", "8"),
    "strategy": ("ddp", "zero2", "zero3", "hsdp"),
    "framework": ("torch", "torch", "accelerate", "trainer", "trl", "trl", "torchtitan", "axolotl", "llamafactory"),
    "precision": ("bf16-mixed", "bf16-mixed", "bf16", "fp32", "fp16-mixed"),
    "micro_batch_size": ("1", "2", "3", "5"),
    "seq_len": ("64", "128", "200", "1000", "4000", "6000"),
    "gradient_accumulation_steps": ("1", "1", "1", "2", "3"),
}
"""Options that every job has, with their values. DeepSpeed (zero1) cannot be simulated."""
SOMETIMES: Mapping[str, Sequence[str]] = {
    "activation_checkpointing": ("full", "full", "selective", "every-2"),
    "optim": (
        "sgd", "adafactor", "lion_32bit", "muon", "adamw_8bit", "paged_adamw_8bit", "schedule_free_adamw", "apollo_adamw", "adamw_torch",
        "rmsprop", "adam_mini", "galore_adamw", "ademamix",
    ),
    "loss": ("full", "chunked", "liger", "cce"),
    "use_liger_kernel": ("true",),
    "wrap": ("none", "layer"),
    "backend": ("fsdp1", "fsdp2"),
    "attention": ("eager", "sdpa", "flash_attention_2"),
    "packing": ("bfd", "wrapped"),
    "padding_free": ("true",),
    "padding_fraction": ("0.25",),
    "ignored_labels": ("0.5",),
    "reshard_after_forward": ("2", "false"),
    "forward_prefetch": ("true",),
    "backward_prefetch": ("post", "none"),
    "activation_offload": ("true",),
    "tiled_mlp": ("auto", "3"),
    "task": ("dpo", "reward", "kto"),
    "dtype": ("float32", "bfloat16"),
    "experts_implementation": ("eager", "batched_mm"),
    "nnodes": ("2",),
    "freeze": ("*embed_tokens*", "*layers.[0-1]*", "*lm_head*"),
}  # fmt: skip
"""Options of which a job has up to four."""
ADAPTERS: Mapping[str, Sequence[str]] = {
    "lora_target_modules": ("all-linear",),
    "lora_r": ("8",),
    "lora_modules_to_save": ("lm_head",),
    "lora_dropout": ("0.1",),
    "use_dora": ("true",),
    "use_rslora": ("true",),
    "dtype": ("float32", "bfloat16"),
}
"""Options of which a job with adapters has up to three."""
QUANTIZED: Sequence[Case] = (
    {"load_in_8bit": "true"},
    *(
        {"load_in_4bit": "true", "bnb_4bit_quant_storage": storage, "use_bnb_nested_quant": nested}
        for storage in ("uint8", "bfloat16", "float32")
        for nested in ("true", "false")
    ),
)
"""Options of a quantized base."""
METHODS: Sequence[Mapping[str, object]] = (
    {"peft_type": "IA3", "target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    {"peft_type": "LOHA", "r": 4, "target_modules": ["q_proj", "v_proj"]},
    {"peft_type": "LOKR", "r": 4, "target_modules": ["q_proj", "v_proj"]},
    {"peft_type": "VERA", "r": 16, "target_modules": ["q_proj"]},
    {"peft_type": "OFT", "oft_block_size": 16, "target_modules": ["q_proj"]},
    {"peft_type": "BOFT", "boft_block_size": 4, "target_modules": ["q_proj"]},
    {"peft_type": "LN_TUNING", "target_modules": ["input_layernorm"]},
    {"peft_type": "FOURIERFT", "n_frequency": 50, "target_modules": ["q_proj"]},
    {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 8, "task_type": "CAUSAL_LM"},
    {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 8, "task_type": "CAUSAL_LM"},
    {
        "peft_type": "LORA",
        "r": 4,
        "target_modules": "all-linear",
        "layers_to_transform": [0, 1],
        "layers_pattern": "layers",
    },
    {"peft_type": "ADALORA", "init_r": 6, "target_r": 4, "total_step": 100, "target_modules": ["q_proj", "v_proj"]},
)
"""Configurations of PEFT's other methods."""


def draw(source: random.Random) -> Case:
    """A job whose options need not go together."""

    def some(options: Mapping[str, Sequence[str]], most: int) -> Case:
        names = source.sample(list(options), source.randint(0, most))
        return {name: source.choice(options[name]) for name in names}

    case = {"model": source.choice(list(CONFIGS)), **{name: source.choice(values) for name, values in ALWAYS.items()}}
    if case["model"] in WITHOUT_SDPA:
        case["attention"] = "eager"
    return {**case, **some(SOMETIMES, 4), **_change(source, some(ADAPTERS, 3))}


def _change(source: random.Random, options: Case) -> Case:
    """The adapters of a job, with these options for LoRA, and its quantized base."""
    match source.choice(("none", "none", "lora", "quantized", "method")):
        case "lora":
            return {"use_peft": "true", **options}
        case "quantized":
            return {"use_peft": "true", **options, **source.choice(QUANTIZED)}
        case "method":
            return {"peft_config": json.dumps(source.choice(METHODS), separators=(",", ":"))}
        case _:
            return {}


def case_of(name: str) -> Case:
    """The case with this name (`small_models.name_of`)."""
    model, *options = name.split(" ")
    return {"model": model, **dict(option.split("=", 1) for option in options)}


def _goes_together(case: Case, folder: Path) -> bool:
    """Whether the options of a case make a plan."""
    try:
        request = make_request(options_of(CONFIGS, case, folder))
        plans(request, seq_len=int(case["seq_len"]))
    except AdvisorError:
        return False
    return True


def _drawn(seed: int, minutes: float) -> Iterator[Case]:
    print("seed", seed, flush=True)
    source, end = random.Random(seed), time.monotonic() + 60 * minutes
    while time.monotonic() < end:
        case = draw(source)
        with tempfile.TemporaryDirectory() as folder:
            if _goes_together(case, Path(folder)):
                yield case


def main() -> None:
    from compared_peaks import predicted_and_simulated

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=random.randrange(1_000_000))
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument(
        "jobs", nargs="*", help="names of jobs, as this prints them, that are compared instead of drawn ones"
    )
    options = parser.parse_args()
    lines = read(RESULTS)
    counts = dict.fromkeys(("equal", "differs", "refused", "fails"), 0)
    for case in map(case_of, options.jobs) if options.jobs else _drawn(options.seed, options.minutes):
        name = name_of(case)
        try:
            with tempfile.TemporaryDirectory() as folder:
                predicted, simulated = predicted_and_simulated(make_request(options_of(CONFIGS, case, Path(folder))))
        except AdvisorError:
            counts["refused"] += 1
            continue
        except Exception as error:  # one that fails must not end the others
            counts["fails"] += 1
            print(f"FAILS {type(error).__name__}: {str(error)[:300]}", name, flush=True)
            continue
        line = Line(simulated=simulated, predicted=predicted)
        if line.agrees(case["framework"]):
            counts["equal"] += 1
            lines[name] = line
            write(lines, RESULTS)
        else:
            counts["differs"] += 1
            print("DIFFERS", name, predicted, simulated, flush=True)
    print(counts)


if __name__ == "__main__":
    main()
