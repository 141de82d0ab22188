"""Predicted peaks of mixtures of experts against PyTorch's engines: grouped products in dtypes that its fake tensors refuse, and
transformers' other code for experts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matrix import in_turn, of_today, taken, with_all_cases

pytest.importorskip("torch")

from compared_peaks import predicted_and_simulated

from fsdp_advisor import estimate  # after the check
from fsdp_advisor.job.parsing import make_request

pytestmark = pytest.mark.slow

MIXTRAL = {
    "model_type": "mixtral", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 4, "vocab_size": 1000, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.mark.parametrize(
    "options",
    of_today(
        [
            pytest.param({"strategy": "ddp", "gpus": "4", "precision": "bf16-mixed"}, id="autocast"),
            pytest.param({"strategy": "zero3", "backend": "fsdp2", "gpus": "4", "precision": "fp32"}, id="fp32"),
        ],
        2,
    ),
)
def test_grouped_products_of_fp32_weights_are_predicted(options: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MIXTRAL))
    request = {"seq_len": "128", "micro_batch_size": "2", **options, "model": str(path)}
    predicted, simulated = predicted_and_simulated(make_request(request))
    assert predicted == simulated


WIDE = {**MIXTRAL, "intermediate_size": 1024, "vocab_size": 100}
"""Its peak is in a layer, not in the loss."""
FSDP2 = {"strategy": "zero3", "backend": "fsdp2"}
DDP = {"strategy": "ddp"}


@in_turn(1, of=5)
@pytest.mark.parametrize(
    "options",
    taken(
        [{**FSDP2, "experts_implementation": "eager", "expert_imbalance": "2"}],
        [
            {**DDP, "experts_implementation": "eager"},
            {**DDP, "experts_implementation": "batched_mm"},
            {**FSDP2, "experts_implementation": "eager", "activation_checkpointing": "full"},
            {**FSDP2, "experts_implementation": "batched_mm", "precision": "fp32"},
            {"strategy": "zero3", "backend": "fsdp1", "experts_implementation": "eager", "expert_imbalance": "1.5"},
        ],
    ),
    ids=lambda options: "-".join(options.values()),
)
def test_other_code_for_experts_is_predicted(options: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(WIDE))
    usual = {"seq_len": "128", "micro_batch_size": "2", "gpus": "4", "precision": "bf16-mixed", "model": str(path)}
    predicted, simulated = predicted_and_simulated(make_request({**usual, **options}))
    assert predicted == simulated


@with_all_cases
def test_a_busy_expert_raises_the_peak_of_a_loop_alone(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(WIDE))
    peaks = {}
    for code in ("grouped_mm", "eager"):
        for imbalance in (1.0, 2.0):
            report = estimate(
                model=str(path), strategy="ddp", precision="bf16-mixed", seq_len=512, micro_batch_size=8,
                experts_implementation=code, expert_imbalance=imbalance,
            )  # fmt: skip
            peaks[code, imbalance] = report.estimates[0].peak_tensor_bytes
            assert any("expert_imbalance" in note for note in report.notes) == ((code == "eager") == (imbalance == 1.0))
    assert peaks["grouped_mm", 1.0] == peaks["grouped_mm", 2.0]
    assert peaks["eager", 1.0] < peaks["eager", 2.0]
