"""The time of Liger's loss, whose tiles add to the head's gradient and, under autocast, cast its weight."""

from __future__ import annotations

import pytest

from fsdp_advisor import estimate

pytest.importorskip("torch")


def loss_seconds(strategy: str, backend: str) -> float:
    (row,) = estimate(
        model="meta-llama/Llama-3.2-1B", gpus=8, gpu="H100-80GB", strategy=strategy, backend=backend, framework="trainer",
        use_liger_kernel=True, micro_batch_size=4, seq_len=2048, precision="bf16-mixed",
    ).estimates  # fmt: skip
    assert row.step is not None
    return row.step.breakdown["loss"]


def test_only_autocast_casts_the_weight_in_each_tile() -> None:
    """FSDP and DeepSpeed compute with bf16 weights, DDP with fp32 weights under autocast."""
    by_ddp, by_fsdp2, by_deepspeed = (
        loss_seconds(*one) for one in (("ddp", "ddp"), ("zero2", "fsdp2"), ("zero2", "deepspeed"))
    )
    assert by_deepspeed == pytest.approx(by_fsdp2)
    assert by_ddp > 2 * by_fsdp2
