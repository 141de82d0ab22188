"""Print the figures of many estimates, one JSON line per job: `python tests/figures.py > figures.jsonl`.

Run it before and after a change that must not change any figure, and compare both files with `diff`. Texts are left out, so
messages may change.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Any

from fsdp_advisor import estimate
from fsdp_advisor.errors import AdvisorError

BASE: dict[str, Any] = {
    "model": "meta-llama/Llama-2-7b-hf",
    "gpus": 16,
    "nnodes": 2,
    "gpu": "A100-80GB",
    "seq_len": 1024,
}
MODELS = ("openai-community/gpt2", "google-t5/t5-small", "mistralai/Mixtral-8x7B-v0.1", "google/vit-base-patch16-224")
ENGINES = (
    {"backend": "fsdp1"},
    {"backend": "deepspeed"},
    {"offload": "optimizer"},
    {"offload": "parameters"},
    {"offload": "parameters", "backend": "deepspeed", "offload_device": "nvme"},
    {},
)
OPTIMIZERS = ("adamw_torch", "sgd", "sgd_momentum", "adafactor", "adamw_bnb_8bit")
OPTIONS = (
    {"gradient_accumulation_steps": 4},
    {"activation_checkpointing": "full"},
    {"attention": "eager"},
    {"attention": "flash_attention_2"},
    {"wrap": "none"},
    {"micro_batch_size": 4},
    {"gpus": 1, "nnodes": 1},
    {"gpus": 6, "nnodes": 1},
    {"reserved": True},
    {"allocator_conf": "expandable_segments:True"},
)


def jobs() -> Iterator[dict[str, Any]]:
    """Every engine with each precision, framework, optimizer and option; and every model with each engine."""
    for engine in ENGINES:
        for precision, framework in product(
            ("fp32", "bf16", "bf16-mixed", "fp16-mixed"), ("torch", "accelerate", "trainer")
        ):
            yield BASE | engine | {"precision": precision, "framework": framework}
        yield from (BASE | engine | {"optim": optim} for optim in OPTIMIZERS)
        yield from (BASE | engine | option for option in OPTIONS)
        yield from (BASE | engine | {"model": model} for model in MODELS)


def figures(value: object) -> object:
    """The value without its texts."""
    if isinstance(value, dict):
        return {key: figures(item) for key, item in value.items() if not isinstance(item, str)}
    if isinstance(value, (list, tuple)):
        return [figures(item) for item in value if not isinstance(item, str)]
    return value


def main() -> None:
    for job in jobs():
        try:
            rows = estimate(explain=True, **job).as_dict()["estimates"]
        except AdvisorError as error:
            print(json.dumps({"job": job, "error": type(error).__name__}))
            continue
        found = {f"{row['strategy']} {row['backend']} {row['offload']}": figures(row) for row in rows}
        print(json.dumps({"job": job, "figures": found}, sort_keys=True))


if __name__ == "__main__":
    main()
