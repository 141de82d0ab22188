"""The time of optimizers' updates, against the kernels of a step on an H100 (Llama 3.2 1B under the Trainer, torch.profiler)."""

from __future__ import annotations

import pytest

from fsdp_advisor import estimate

KERNELS_MS = {"adamw_bnb_8bit": 31.4, "adafactor": 40.4}
"""The kernels of the update alone, without those of clipping."""
CLIPPING_MS = 12 * 1.236e9 / 2.6e12 * 1e3
"""The gradients are read twice and written once, in fp32, at the rate of an update."""


def optimizer_ms(optim: str, gpu: str = "H100-80GB", framework: str = "trainer") -> float:
    (row,) = estimate(
        model="meta-llama/Llama-3.2-1B", gpus=1, gpu=gpu, strategy="ddp", framework=framework, optim=optim,
        micro_batch_size=1, seq_len=512, activation_checkpointing="none",
    ).estimates  # fmt: skip
    assert row.step is not None
    return row.step.breakdown["optimizer"] * 1e3


@pytest.mark.parametrize("optim", KERNELS_MS)
def test_update_takes_as_long_as_its_kernels(optim: str) -> None:
    assert optimizer_ms(optim) - CLIPPING_MS == pytest.approx(KERNELS_MS[optim], rel=0.05)


def test_bitsandbytes_8_bit_updates_are_limited_by_their_states_not_by_memory() -> None:
    adamw, lion = (optimizer_ms(f"{name}_8bit", framework="torch") for name in ("adamw_bnb", "lion"))
    assert adamw == pytest.approx(2 * lion, rel=0.01)
    assert adamw == pytest.approx(optimizer_ms("adamw_bnb_8bit", gpu="H200", framework="torch"), rel=0.01)
