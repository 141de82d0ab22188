"""Steps that torch.compile compiles on a simulated GPU, by layers or as a whole, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken
from rehearsed_jobs import row_of

pytestmark = pytest.mark.slow

SHAPES: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "vocab_size": 100, "max_position_embeddings": 4096, "tie_word_embeddings": False, "pad_token_id": 0,
}  # fmt: skip
"""The vocabulary is small, so that the peak is in a layer. Sequences are long, so that what the allocator adds to a block is little."""
EXPERTS = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
ENGINES: dict[str, dict[str, Any]] = {
    "single": {"strategy": "ddp"},
    "trainer": {"strategy": "ddp", "framework": "trainer"},
    "ddp": {"strategy": "ddp", "gpus": 2},
    "fsdp2": {"strategy": "zero3", "backend": "fsdp2", "gpus": 2},
}
Job = tuple[dict[str, Any], str, str, str, int, int]


def _job(
    model: str,
    engine: str,
    precision: str,
    checkpointing: str = "none",
    batch: int = 4,
    length: int = 4000,
    **shapes: int,
) -> Job:
    experts = EXPERTS if model in ("mixtral", "qwen3_moe") else {}
    return {"model_type": model, **SHAPES, **experts, **shapes}, engine, precision, checkpointing, batch, length


JOBS = {"qwen3_moe, one GPU": _job("qwen3_moe", "single", "bf16")}
MORE = {
    " ".join(words): _job(*words)
    for words in product(
        ("llama", "qwen2", "qwen3", "qwen3_moe"), ("single", "ddp", "fsdp2"), ("bf16", "bf16-mixed"), ("none", "full")
    )
} | {"llama, another batch": _job("llama", "single", "bf16-mixed", batch=1, length=2048)}  # fmt: skip
CASES: dict[str, Job] = dict(taken(list(JOBS.items()), list(MORE.items())))
"""Configuration, engine, precision, checkpointing, micro-batch, sequence length."""

FLASH = {"attention": "flash_attention_2"}
FROZEN_ENDS = {"vocab_size": 20_480}
"""A vocabulary with which FSDP2 gathers large frozen weights of embedding and head."""
LORA: dict[str, Any] = {"use_peft": True, "lora_r": 16, "lora_target_modules": "q_proj,v_proj"}
QLORA = {**LORA, "load_in_4bit": True}
FROZEN = {"freeze": ["model.embed_tokens", "model.layers.0"]}
LORA_OF_ALL = {
    **LORA,
    "lora_dropout": 0.1,
    "lora_target_modules": "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj",
}
OTHERS: dict[str, tuple[Job, dict[str, Any]]] = dict(
    taken(
        [
            ("llama, half of the budget", (_job("llama", "single", "bf16"), {"memory_budget": 0.5})),
            ("llama as a whole", (_job("llama", "single", "bf16"), {"compile": "model"})),
            ("qwen3_moe as a whole", (_job("qwen3_moe", "single", "bf16-mixed"), {"compile": "model"})),
            ("llama as a whole in DDP", (_job("llama", "ddp", "bf16-mixed"), {"compile": "model"})),
            ("llama as a whole, sharded", (_job("llama", "fsdp2", "bf16-mixed", "full"), {"compile": "model"})),
            ("llama in the Trainer", (_job("llama", "trainer", "bf16-mixed"), {"compile": "model"})),
            ("llama, LoRA of all layers with dropout", (_job("llama", "single", "bf16-mixed"), LORA_OF_ALL)),
            ("llama, sharded, LoRA", (_job("llama", "fsdp2", "bf16-mixed", **FROZEN_ENDS), LORA)),
            ("llama, QLoRA", (_job("llama", "single", "bf16-mixed"), QLORA)),
            ("llama, frozen in part", (_job("llama", "single", "bf16-mixed"), FROZEN)),
            ("llama, flash-attn", (_job("llama", "fsdp2", "bf16-mixed", "full"), FLASH)),
            (
                "llama as a whole, flash-attn, one row",
                (_job("llama", "single", "bf16", batch=1), {**FLASH, "compile": "model"}),
            ),
        ],
        [
            ("llama, nothing but inputs", (_job("llama", "single", "bf16-mixed"), {"memory_budget": 0.0})),
            ("qwen3, sharded", (_job("qwen3", "fsdp2", "bf16-mixed"), {"memory_budget": 0.3})),
            ("qwen3_moe, half", (_job("qwen3_moe", "single", "bf16"), {"memory_budget": 0.5})),
            ("qwen3_moe as a whole in DDP", (_job("qwen3_moe", "ddp", "bf16"), {"compile": "model"})),
            (
                "llama as a whole, sharded, not checkpointed",
                (_job("llama", "fsdp2", "bf16-mixed"), {"compile": "model"}),
            ),
            ("qwen3_moe as a whole, sharded", (_job("qwen3_moe", "fsdp2", "bf16"), {"compile": "model"})),
            ("qwen3_moe, checkpointed", (_job("qwen3_moe", "fsdp2", "bf16-mixed", "full"), {"compile": "model"})),
            (
                "llama in the Trainer, checkpointed",
                (_job("llama", "trainer", "bf16-mixed", "full"), {"compile": "model"}),
            ),
            ("llama as a whole, LoRA", (_job("llama", "single", "bf16"), {**LORA, "compile": "model"})),
            (
                "llama as a whole in DDP, LoRA",
                (_job("llama", "ddp", "bf16", "full"), {**LORA_OF_ALL, "compile": "model"}),
            ),
            (
                "qwen3, sharded and checkpointed, LoRA of all layers",
                (_job("qwen3", "fsdp2", "bf16-mixed", "full", **FROZEN_ENDS), LORA_OF_ALL),
            ),
            (
                "llama as a whole, sharded, LoRA",
                (_job("llama", "fsdp2", "bf16", **FROZEN_ENDS), {**LORA, "compile": "model"}),
            ),
            (
                "llama as a whole, sharded and checkpointed, LoRA of all layers",
                (_job("llama", "fsdp2", "bf16-mixed", "full", **FROZEN_ENDS), {**LORA_OF_ALL, "compile": "model"}),
            ),
            ("qwen3_moe, LoRA, flash-attn", (_job("qwen3_moe", "single", "bf16-mixed", "full"), {**LORA, **FLASH})),
            ("llama, flash-attn, one row", (_job("llama", "ddp", "bf16-mixed", batch=1, length=16_000), FLASH)),
            (
                "llama as a whole, flash-attn, one row, checkpointed",
                (_job("llama", "single", "bf16-mixed", "full", 1, 24_000), {**FLASH, "compile": "model"}),
            ),
            ("qwen3, flash-attn, half", (_job("qwen3", "single", "bf16"), {**FLASH, "memory_budget": 0.5})),
            (
                "mistral with a window, flash-attn",
                (_job("mistral", "ddp", "bf16-mixed", "full", 2, 8000), {**FLASH, "compile": "model"}),
            ),
            ("gemma2 as a whole, flash-attn", (_job("gemma2", "fsdp2", "bf16-mixed"), {**FLASH, "compile": "model"})),
            (
                "qwen3_moe as a whole, flash-attn",
                (_job("qwen3_moe", "single", "bf16-mixed"), {**FLASH, "compile": "model"}),
            ),
            ("qwen3 as a whole, QLoRA", (_job("qwen3", "single", "bf16-mixed"), {**QLORA, "compile": "model"})),
            ("llama, sharded, frozen in part", (_job("llama", "fsdp2", "bf16-mixed"), FROZEN)),
            ("llama as a whole, half", (_job("llama", "single", "bf16"), {"compile": "model", "memory_budget": 0.5})),
        ],
        days=5,
    )
)
"""Jobs, and other options of the compiler."""


def _lora(options: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments of PEFT's LoraConfig; None without adapters."""
    if "use_peft" not in options:
        return None
    modules, dropout = options["lora_target_modules"].split(","), options.get("lora_dropout", 0.0)
    return {"r": options["lora_r"], "target_modules": modules, "lora_dropout": dropout}


@pytest.fixture(scope="module")
def other_peaks(run: Callable[..., dict[str, int]]) -> dict[str, int]:
    jobs = {
        name: [
            *job,
            options.get("compile", "layer"),
            "none",
            options.get("memory_budget", 1.0),
            options.get("attention", "sdpa"),
            _lora(options),
            options.get("load_in_4bit", False),
            options.get("freeze", []),
        ]
        for name, (job, options) in OTHERS.items()
    }
    return run("compiled.py", json.dumps(jobs))


@in_turn(3, of=4)
@pytest.mark.parametrize("name", OTHERS)
def test_whole_models_and_memory_budgets_need_what_is_predicted(
    name: str, other_peaks: dict[str, int], tmp_path: Path
) -> None:
    (config, engine, precision, checkpointing, batch, length), options = OTHERS[name]
    row = row_of(
        tmp_path, config, precision=precision, micro_batch_size=batch, seq_len=length, activation_checkpointing=checkpointing,
        **{"compile": "layer", **options, **ENGINES[engine]},
    )  # fmt: skip
    assert row.peak_allocated_bytes == pytest.approx(other_peaks[name], rel=1e-3)


OF_TRL = {"library": "trl", "regions": True}
OF_ACCELERATE = {"library": "accelerate", "regions": True}
SHARDED: dict[str, Any] = {"strategy": "zero3", "backend": "fsdp2"}
HALF: dict[str, Any] = {"dtype": "bfloat16"}
HALF_ADAPTED = {**HALF, "lora": True}
PACKED = {**HALF_ADAPTED, "packs": True}
OF_FLASH = {"library": "trl", **FLASH, "lora": True}
LONG = {"batch": 4, "length": 16_000}
"""A batch whose tensors are much larger than the rest, up to 1 MiB, that the allocator does not split from a block."""
WHOLE = {"length": 8192}
"""A length with which large tensors fill blocks, so that the allocator leaves no rest."""
TRAINERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = dict(
    taken(
        [
            ("the Trainer, sharded and checkpointed", ({"fsdp": True, "checkpointing": True}, SHARDED)),
            ("the Trainer in DDP", ({}, {})),
            ("the Trainer in DDP, LoRA", (HALF_ADAPTED, {})),
            (
                "the Trainer, sharded and checkpointed, flash-attn",
                ({**FLASH, "fsdp": True, "checkpointing": True}, SHARDED),
            ),
            (
                "TRL, checkpointed, flash-attn, one row",
                ({"library": "trl", **FLASH, "batch": 1, "checkpointing": True}, {}),
            ),
            ("accelerate, sharded", ({"library": "accelerate", "fsdp": True}, SHARDED)),
            ("regions, sharded and checkpointed", ({**OF_ACCELERATE, "fsdp": True, "checkpointing": True}, SHARDED)),
            ("regions, an MoE, sharded", ({"model": "qwen3_moe", **OF_ACCELERATE, "fsdp": True}, SHARDED)),
            ("regions in the Trainer", ({"regions": True, "checkpointing": True}, {})),
            ("TRL, sharded", ({"library": "trl", "fsdp": True}, SHARDED)),
            ("regions in TRL, an MoE, sharded", ({"model": "qwen3_moe", **OF_TRL, "fsdp": True}, SHARDED)),
            ("regions in TRL, an MoE, checkpointed", ({"model": "qwen3_moe", **OF_TRL, "checkpointing": True}, {})),
            ("DPO by regions", ({**OF_TRL, "task": "dpo"}, {})),
            (
                "DPO, sharded and checkpointed",
                (
                    {"library": "trl", **LONG, "length": 8000, "task": "dpo", "fsdp": True, "checkpointing": True},
                    SHARDED,
                ),
            ),
            ("a reward model", ({"library": "trl", "task": "reward"}, {})),
            ("TRL, sharded, LoRA", ({"library": "trl", "lora": True, "fsdp": True}, SHARDED)),
            (
                "regions in TRL, checkpointed, LoRA",
                ({"model": "qwen3", **OF_TRL, "lora": True, "checkpointing": True}, {}),
            ),
            ("TRL, an MoE, checkpointed", ({"model": "qwen3_moe", "library": "trl", "checkpointing": True}, {})),
            ("TRL, sharded, LoRA, flash-attn", ({**OF_FLASH, "fsdp": True}, SHARDED)),
            ("the Trainer on one GPU, QLoRA", ({**PACKED, "gpus": 1}, {})),
            ("TRL in DDP, QLoRA", ({"library": "trl", **PACKED}, HALF)),
            ("DPO in DDP, LoRA", ({"library": "trl", "task": "dpo", **HALF_ADAPTED, **WHOLE}, HALF)),
        ],
        [
            ("TRL in DDP", ({"library": "trl"}, {})),
            ("the Trainer in DDP, QLoRA", (PACKED, {})),
            ("TRL on one GPU, QLoRA", ({"library": "trl", **PACKED, "gpus": 1}, HALF)),
            ("KTO on one GPU, LoRA", ({"library": "trl", "task": "kto", **HALF_ADAPTED, "gpus": 1}, HALF)),
            ("TRL on one GPU, LoRA, flash-attn", ({**OF_FLASH, **WHOLE, "gpus": 1}, {})),
            ("TRL in DDP, LoRA, flash-attn", ({**OF_FLASH, **WHOLE}, {})),
            (
                "regions in TRL, sharded and checkpointed, LoRA",
                (
                    {"model": "qwen3", **OF_TRL, **HALF_ADAPTED, **WHOLE, "fsdp": True, "checkpointing": True},
                    {**SHARDED, **HALF},
                ),
            ),
            (
                "TRL, sharded and checkpointed, LoRA",
                (
                    {"model": "qwen3", "library": "trl", **HALF_ADAPTED, **WHOLE, "fsdp": True, "checkpointing": True},
                    {**SHARDED, **HALF},
                ),
            ),
            (
                "the Trainer, sharded and checkpointed, LoRA",
                ({**HALF_ADAPTED, "fsdp": True, "checkpointing": True}, SHARDED),
            ),
            (
                "regions in the Trainer, sharded, LoRA",
                ({"model": "qwen3", **HALF_ADAPTED, "regions": True, "fsdp": True}, SHARDED),
            ),
            ("regions, sharded, LoRA", ({**OF_ACCELERATE, **HALF_ADAPTED, "fsdp": True}, SHARDED)),
            (
                "accelerate, sharded and checkpointed, LoRA",
                ({"library": "accelerate", **HALF_ADAPTED, "fsdp": True, "checkpointing": True}, SHARDED),
            ),
            ("accelerate, LoRA", ({"model": "qwen3", "library": "accelerate", **HALF_ADAPTED}, {})),
            ("TRL, an MoE", ({"model": "qwen3_moe", "library": "trl"}, {})),
            (
                "regions in TRL, an MoE, sharded and checkpointed",
                ({"model": "qwen3_moe", **OF_TRL, "fsdp": True, "checkpointing": True}, SHARDED),
            ),
            ("regions in TRL", (OF_TRL, {})),
            ("DPO by regions, sharded", ({**OF_TRL, **LONG, "task": "dpo", "fsdp": True}, SHARDED)),
            ("KTO by regions", ({**OF_TRL, **LONG, "task": "kto"}, {})),
            ("KTO in DDP", ({"library": "trl", **LONG, "length": 8000, "task": "kto"}, {})),
            ("KTO by regions, sharded", ({**OF_TRL, **LONG, "task": "kto", "fsdp": True}, SHARDED)),
            ("the Trainer, sharded", ({"fsdp": True}, SHARDED)),
            (
                "regions, sharded and checkpointed, flash-attn",
                ({**OF_ACCELERATE, **FLASH, "fsdp": True, "checkpointing": True}, SHARDED),
            ),
            ("DPO by regions, flash-attn", ({**OF_TRL, **FLASH, "task": "dpo"}, {})),
            ("regions, sharded", ({**OF_ACCELERATE, "fsdp": True}, SHARDED)),
            ("regions, in DDP", (OF_ACCELERATE, {})),
            ("regions, an MoE, in DDP", ({"model": "qwen3_moe", **OF_ACCELERATE}, {})),
            (
                "regions in the Trainer, sharded and checkpointed",
                ({"regions": True, "fsdp": True, "checkpointing": True}, SHARDED),
            ),
            (
                "accelerate, sharded and checkpointed",
                ({"library": "accelerate", "fsdp": True, "checkpointing": True}, SHARDED),
            ),
            (
                "regions, an MoE, sharded and checkpointed",
                ({"model": "qwen3_moe", **OF_ACCELERATE, "fsdp": True, "checkpointing": True}, SHARDED),
            ),
            ("regions in the Trainer, an MoE", ({"model": "qwen3_moe", "regions": True}, {})),
        ],
        days=7,
    )
)
"""Models on one or two GPUs that a trainer or accelerate compiles, as a whole or by regions: settings of the script, and options."""


@in_turn(2, of=4)
@pytest.mark.parametrize("name", TRAINERS)
def test_trainers_that_compile_need_what_is_predicted(
    name: str, run_on_ranks: Callable[..., dict[str, int]], tmp_path: Path
) -> None:
    settings, options = TRAINERS[name]
    usual = {
        "model": "llama", "library": "trainer", "attention": "sdpa", "task": "sft", "fsdp": False, "checkpointing": False,
        "regions": False, "lora": False, "packs": False,
        "dtype": "float32", "gpus": 2,
    }  # fmt: skip
    job = {**usual, **settings}
    config, _, precision, _, batch, length = _job(job["model"], "trainer", "bf16-mixed", length=8000)
    if job["library"] == "trl":  # more than one tile of its loss
        config |= {"vocab_size": 40_000}
    elif job["lora"]:
        config |= FROZEN_ENDS
    if job["task"] != "sft":  # a step has two sequences per example, or two batches
        batch, length = 2, 4000
    batch, length = job.get("batch", batch), job.get("length", length)
    job |= {"batch": batch, "length": length}
    found = run_on_ranks("compiled_trainers.py", json.dumps(config), json.dumps(job), gpus=job["gpus"])
    row = row_of(
        tmp_path, config, precision=precision, micro_batch_size=batch, seq_len=length, gpus=job["gpus"],
        compile="layer" if job["regions"] else "model", task=job["task"], attention=job["attention"],
        **((QLORA if job["packs"] else LORA) if job["lora"] else {}),
        **{"framework": job["library"], "activation_checkpointing": "full" if job["checkpointing"] else "none", **options},
    )  # fmt: skip
    assert row.peak_allocated_bytes == pytest.approx(found["peak"], rel=1e-3)


@pytest.fixture(scope="module")
def peaks(run: Callable[..., dict[str, int]]) -> dict[str, int]:
    return run("compiled.py", json.dumps(CASES))


@in_turn(1, of=4)
@pytest.mark.parametrize("name", CASES)
def test_compiled_layers_need_what_is_predicted(name: str, peaks: dict[str, int], tmp_path: Path) -> None:
    config, engine, precision, checkpointing, batch, length = CASES[name]
    row = row_of(
        tmp_path, config, precision=precision, micro_batch_size=batch, seq_len=length, activation_checkpointing=checkpointing,
        compile="layer", **ENGINES[engine],
    )  # fmt: skip
    assert row.peak_allocated_bytes == pytest.approx(peaks[name], rel=1e-3)
