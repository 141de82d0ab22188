"""Predicted peaks of a mixture of experts in dtypes that PyTorch's fake tensors refuse for grouped products, against its engines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from compared_peaks import predicted_and_simulated

from fsdp_advisor.job.parsing import make_request  # after the check

pytestmark = pytest.mark.slow

MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 1000, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "ddp", "gpus": "4", "precision": "bf16-mixed"},
        {"strategy": "zero3", "backend": "fsdp2", "gpus": "4", "precision": "fp32"},
    ],
    ids=["autocast", "fp32"],
)
def test_grouped_products_of_fp32_weights_are_predicted(options: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL))
    request = {"seq_len": "128", "micro_batch_size": "2", **options, "model": str(path)}
    predicted, simulated = predicted_and_simulated(make_request(request))
    assert predicted == simulated
