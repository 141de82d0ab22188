"""The predicted peak of LOMO and AdaLomo, compared with lomo-optim on a simulated GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken

from fsdp_advisor.estimator import estimate
from fsdp_advisor.job.choices import OptimizerName

pytestmark = in_turn(0, of=5)

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 40_000, "hidden_size": 1024,
    "intermediate_size": 3072, "num_hidden_layers": 3, "num_attention_heads": 16, "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}  # fmt: skip
BATCH, TOKENS = 2, 128
CLASSES: dict[OptimizerName, str] = {"lomo": "Lomo", "adalomo": "AdaLomo"}


@pytest.mark.parametrize("name", taken(["adalomo"], ["lomo"]))
def test_the_peak_of_an_update_in_backward_is_predicted(
    name: OptimizerName, run: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    found = run("lomo.py", CLASSES[name], str(path), str(BATCH), str(TOKENS))
    [row] = estimate(
        model=str(path), optim=name, strategy="ddp", gpus=1, gpu="H100-80GB", precision="bf16",
        micro_batch_size=BATCH, seq_len=TOKENS,
    ).estimates  # fmt: skip
    assert row.peak_allocated_bytes == pytest.approx(found["allocated"], rel=0.001)
