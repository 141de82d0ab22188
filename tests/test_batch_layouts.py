"""Packed, padding-free and padded batches: which jobs have them, and what they change in an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn
from tiny_llama import LLAMA, write

from fsdp_advisor import estimate
from fsdp_advisor.errors import UsageError
from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.report import Report

pytestmark = pytest.mark.slow


def report(model: str, **options: Any) -> Report:
    job = {"gpu": "H100-80GB", "strategy": "ddp", "precision": "bf16", "seq_len": 256, "micro_batch_size": 4}
    return estimate(**{"model": model, **job, **options})


def peak(model: str, **options: Any) -> int:
    found = report(model, **options).estimates[0].peak_tensor_bytes
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padding_fraction": 0.3, "packing": "wrapped"}, "have no padding"),
        ({"padding_fraction": 0.3, "padding_free": True}, "have no padding"),
        ({"packing": "bfd", "task": "dpo", "framework": "trl"}, "not for dpo"),
        ({"padding_free": True, "framework": "torchtitan", "strategy": "zero3", "gpus": 2}, "packs its batches itself"),
    ],
)
def test_impossible_batches_are_refused(options: dict[str, Any], message: str, model: str) -> None:
    with pytest.raises(UsageError, match=message):
        report(model, **options)


@in_turn(0, of=2)
def test_speeds_count_tokens_that_are_not_padding(model: str) -> None:
    padded = report(model, padding_fraction=0.25, attention="eager")
    step = padded.estimates[0].step
    assert step is not None and step.tokens == 4 * 192
    assert any("75% of the tokens that are not padding" in note for note in padded.notes)
    row = padded.estimates[0].as_dict()
    assert row["samples_per_second_per_gpu"] == pytest.approx(4 / step.seconds, rel=1e-4)
    assert "25% padding" in " ".join(str(padded).split())


@in_turn(0, of=2)
def test_wrapped_packing_needs_what_unpacked_rows_need(model: str) -> None:
    assert peak(model, packing="wrapped") == peak(model)


@in_turn(1, of=2)
def test_a_row_of_all_tokens_makes_a_mask_only_without_flash_attention(model: str) -> None:
    flash = {"attention": "flash_attention_2"}
    tokens = 4 * 256
    assert peak(model, padding_free=True) - peak(model) > 2 * tokens**2  # at least the additive mask of one layer
    assert peak(model, padding_free=True, **flash) - peak(model, **flash) < tokens**2
    assert peak(model, padding_free=True) == peak(model, packing="bfd")


@in_turn(0, of=2)
def test_flash_attention_leaves_padding_out(model: str) -> None:
    most, some = (peak(model, padding_fraction=f, attention="flash_attention_2") for f in (0.2, 0.8))
    assert some < most


@in_turn(1, of=2)
def test_a_masked_step_is_recorded_with_the_kernels_of_the_gpu_alone(home: Path) -> None:
    """Under a mask, sdpa runs cuDNN's kernel on an H100 and not on an A100."""
    model = str(write(home / "model" / "config.json", {**LLAMA, "vocab_size": 999}))
    resolved = resolve(model)
    assert resolved.profile is not None
    for gpu, kernels in (("A100-80GB", {"default"}), ("H100-80GB", {"default", "cudnn"})):
        job = {
            "model": model,
            "gpu": gpu,
            "strategy": "ddp",
            "precision": "bf16",
            "seq_len": 256,
            "micro_batch_size": 4,
        }
        estimate_resolved(make_request({**job, "padding_fraction": 0.3}), resolved)
        keys = map(TapeKey.from_name, resolved.profile.tapes)
        assert {key.kernel for key in keys if key.device == "gpu"} == kernels
