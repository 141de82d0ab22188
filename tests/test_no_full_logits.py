"""No step of TRL's trainers or of torchtitan holds the logits of a whole batch, which plain PyTorch's step does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken
from vision_models import MODELS

pytest.importorskip("torch")

from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.tape import Divided, Staging, Tiled, value_at
from fsdp_advisor.tape_keys import tape_key_of

pytestmark = pytest.mark.slow

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 64_000, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
B, T = 8, 4096
OF_BF16 = 2
USUAL: dict[str, Any] = {"strategy": "ddp", "micro_batch_size": B, "seq_len": T, "activation_checkpointing": "none"}


def _largest_storage(folder: Path, config: dict[str, Any] = CONFIG, **options: Any) -> tuple[int, int]:
    """Bytes of the largest storage of a step, and of the logits of all its tokens in bf16."""
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    request = make_request({"model": str(path), **USUAL, **options})
    (plan,) = plans(request, seq_len=T)
    model = resolve(request.model).adapted(adaptation_of(request))
    tape = model.tape(replace(tape_key_of(plan, model.profile), at=plan.tape_shape))
    born = {index for births in tape.births for index, _ in births}  # stored tapes share one table of sizes
    sizes = [
        size.bytes_at(B, T) if isinstance(size, Tiled | Divided) else value_at(size, B, T)
        for size in (tape.sizes[index] for index in born)
        if not isinstance(size, Staging)
    ]
    return max(sizes), plan.sequences * T * CONFIG["vocab_size"] * OF_BF16


def test_the_step_of_plain_pytorch_holds_the_logits(tmp_path: Path) -> None:
    largest, logits = _largest_storage(tmp_path)
    assert largest == 2 * logits, "the loss computes in fp32"


@pytest.mark.parametrize("task", taken(["sft", "dpo"], ["kto", "grpo"]))
def test_no_step_of_trl_holds_the_logits(task: str, tmp_path: Path) -> None:
    """A tile has at most 4,096 tokens and 32,768 words, in fp32; the next largest is the gradient of the head."""
    largest, logits = _largest_storage(tmp_path, framework="trl", task=task)
    assert largest <= 4096 * 32_768 * 4 < logits / 4


@in_turn(0, of=3)
def test_cut_cross_entropy_of_a_model_that_reads_images_holds_no_logits(tmp_path: Path) -> None:
    largest, logits = _largest_storage(
        tmp_path,
        {"model_type": "mistral3", **MODELS["mistral3"][0], "text_config": CONFIG},
        loss="cce",
        framework="axolotl",
    )
    assert largest < logits / 4


def test_no_step_of_torchtitan_holds_the_logits(tmp_path: Path) -> None:
    """A chunk has an eighth of them, in fp32."""
    pytest.importorskip("torchtitan")
    options = {"framework": "torchtitan", "strategy": "zero3", "gpus": 4}
    largest, logits = _largest_storage(tmp_path, **options)
    assert largest == 2 * logits / 8
