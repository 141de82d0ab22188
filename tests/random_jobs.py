"""Random jobs of small and medium catalogued models, the same in every run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.job.compatibility import BACKENDS, OFFLOADS, plans
from fsdp_advisor.job.parsing import make_request

MODELS = (
    "openai-community/gpt2",
    "Qwen/Qwen2.5-0.5B",
    "google-t5/t5-small",
    "google-bert/bert-base-uncased",
    "google/vit-base-patch16-224",
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-2-7b-hf",
)
GPUS = ("T4", "RTX-4090", "A100-40GB", "H100-80GB", "MI300X", "12GiB", "40GiB")
FRAMEWORKS = ("torch", "torch", "accelerate", "trainer", "deepspeed")


def random_jobs(count: int, seed: int, **fixed: Any) -> Iterator[dict[str, Any]]:
    """`count` jobs that the request accepts, as keywords of `estimate`."""
    choose = random.Random(seed)
    made = 0
    while made < count:
        job = _job(choose) | fixed
        try:
            plans(make_request(job), seq_len=1)
        except AdvisorError:
            continue
        made += 1
        yield job


def _job(choose: random.Random) -> dict[str, Any]:
    strategy = choose.choice(tuple(BACKENDS))
    offload = choose.choice(("none", "none", "optimizer", "parameters"))
    gpus = choose.choice((1, 2, 4, 8, 16))
    return {
        "model": choose.choice(MODELS),
        "gpu": choose.choice(GPUS),
        "gpus": gpus,
        "nnodes": 2 if gpus == 16 else 1,
        "strategy": strategy,
        "backend": choose.choice(OFFLOADS[offload].get(strategy, ("auto",))),
        "offload": offload,
        "framework": choose.choice(FRAMEWORKS),
        "precision": choose.choice(("fp32", "bf16", "bf16-mixed", "fp16-mixed")),
        "optim": choose.choice(("adamw_torch_fused", "adamw_torch", "sgd", "adafactor")),
        "micro_batch_size": choose.choice((1, 2, 3, 8, 32)),
        "gradient_accumulation_steps": choose.choice((1, 1, 2, 5)),
        "activation_checkpointing": choose.choice(("none", "full")),
    }
