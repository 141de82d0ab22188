"""Steps with the losses of TRL, Liger and cut cross entropy on a simulated GPU, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import rehearsed_jobs
from matrix import in_turn, taken

pytestmark = in_turn(2, of=5)

CONFIG = {**rehearsed_jobs.CONFIG, "num_hidden_layers": 2}
JOBS = dict(
    taken(
        [
            ("trl", ("trl", "bf16-mixed", False, 4, 2048, False, 0.0)),
            ("liger in half precision", ("liger", "bf16", True, 3, 2000, False, 0.0)),
            ("trl and a copy of the head", ("trl", "bf16-mixed", False, 4, 2048, True, 0.0)),
            ("trl and ignored labels", ("trl", "bf16-mixed", False, 4, 2048, False, 0.6)),
        ],
        [
            ("trl in half precision, less than a tile", ("trl", "bf16", True, 1, 1000, False, 0.0)),
            ("cce", ("cce", "bf16-mixed", True, 4, 2048, False, 0.0)),
            ("liger and a copy of the head", ("liger", "bf16-mixed", False, 4, 2048, True, 0.0)),
        ],
        days=2,
    )
)
"""Loss, precision, whether embeddings are tied, micro-batch, sequence length, whether PEFT trains LoRA and a copy of the head, and the
fraction of ignored labels.
"""


@pytest.fixture(scope="module")
def peaks(run: Callable[..., dict[str, int]]) -> dict[str, int]:
    return run("losses.py", json.dumps(CONFIG), json.dumps(JOBS))


@pytest.mark.parametrize("name", JOBS)
def test_the_loss_of_the_library_needs_what_is_predicted(name: str, peaks: dict[str, int], tmp_path: Path) -> None:
    loss, precision, tied, batch, length, adapts, ignored = JOBS[name]
    config = {**CONFIG, "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": tied}
    by = {"framework": "trl"} if loss == "trl" else {"framework": "trainer", "loss": loss}
    by |= rehearsed_jobs.LORA_OPTIONS | {"lora_modules_to_save": "lm_head", "dtype": "float32"} if adapts else {}
    job = {"precision": precision, "micro_batch_size": batch, "seq_len": length, "ignored_labels": ignored}
    row = rehearsed_jobs.row_of(tmp_path, config, **job, **by)
    assert row.peak_allocated_bytes == pytest.approx(peaks[name], rel=2e-4)


def test_trl_casts_a_head_of_one_tile_again_for_each_tile_of_tokens(
    run: Callable[..., dict[str, int]], tmp_path: Path
) -> None:
    config = {**CONFIG, "architectures": ["LlamaForCausalLM"], "vocab_size": 20_000}
    found = run("losses.py", json.dumps(config), json.dumps({"trl": ("trl", "bf16-mixed", False, 4, 2048, False, 0.0)}))
    row = rehearsed_jobs.row_of(
        tmp_path, config, framework="trl", precision="bf16-mixed", micro_batch_size=4, seq_len=2048
    )
    assert row.peak_allocated_bytes == pytest.approx(found["trl"], rel=2e-4)


def test_trl_keeps_terms_of_the_routers_loss_for_each_layer(run: Callable[..., dict[str, int]], tmp_path: Path) -> None:
    config = {
        "model_type": "qwen3_moe", "hidden_size": 256, "moe_intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 1000,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    found = run("losses.py", json.dumps(config), json.dumps({"trl": ("trl", "bf16-mixed", False, 4, 2000, False, 0.0)}))
    row = rehearsed_jobs.row_of(
        tmp_path, config, framework="trl", precision="bf16-mixed", micro_batch_size=4, seq_len=2000
    )
    assert row.peak_allocated_bytes == pytest.approx(found["trl"], rel=1e-3)


def test_trl_computes_its_loss_in_tiles_for_vision_language_models(
    run: Callable[..., dict[str, int]], tmp_path: Path
) -> None:
    text = {key: value for key, value in CONFIG.items() if key not in ("model_type", "tie_word_embeddings")}
    tower = {"depth": 2, "hidden_size": 128, "num_heads": 4, "intermediate_size": 256, "out_hidden_size": 512}
    config = {
        "model_type": "qwen3_vl", "text_config": text | {"head_dim": 64}, "vision_config": tower | {"deepstack_visual_indexes": [0]},
        "tie_word_embeddings": False,
    }  # fmt: skip
    found = run("losses.py", json.dumps(config), json.dumps({"trl": ("trl", "bf16-mixed", False, 4, 2048, False, 0.0)}))
    row = rehearsed_jobs.row_of(
        tmp_path,
        config | {"architectures": ["Qwen3VLForConditionalGeneration"]},
        framework="trl", precision="bf16-mixed", micro_batch_size=4, seq_len=2048,
    )  # fmt: skip
    assert row.peak_allocated_bytes == pytest.approx(found["trl"], rel=1e-3)
