"""Jobs that need software which does not run on their GPU."""

from __future__ import annotations

from typing import Any

import pytest

from fsdp_advisor import estimate, recommend
from fsdp_advisor.errors import UsageError

JOB = {"model": "gpt2", "gpus": 8, "seq_len": 512}
QLORA = {"use_peft": True, "load_in_4bit": True}


@pytest.mark.parametrize(
    ("gpu", "options", "message"),
    [
        ("A100-80GB", {"optim": "adamw_torch_fp8"}, "torchao's fp8 AdamW does not run on A100-80GB"),
        ("T4", {"optim": "adamw_torch_fp8", "strategy": "zero3"}, "needs? compute capability 8.9"),
        ("Gaudi-3", {"attention": "flash_attention_2"}, "flash-attn does not run on Gaudi-3"),
        ("TPU-v6e", {"attention": "flash_attention_2"}, "flash-attn does not run on TPU-v6e"),
        ("Gaudi-3", {"optim": "adamw_bnb_8bit"}, "bitsandbytes' adamw_bnb_8bit does not run"),
        ("Gaudi-3", {"optim": "paged_adamw_32bit"}, "bitsandbytes' paged_adamw_32bit does not run"),
        ("Gaudi-3", {**QLORA, "bnb_4bit_quant_type": "fp4"}, "fp4 does not run"),
        ("TPU-v6e", {"optim": "lion_32bit"}, "bitsandbytes' lion_32bit does not run"),
        ("TPU-v6e", QLORA, "bitsandbytes does not run on TPU-v6e"),
        ("Trainium-2", {"use_peft": True, "load_in_8bit": True}, "bitsandbytes does not run on Trainium-2"),
        ("TPU-v6e", {"use_liger_kernel": True, "model": "meta-llama/Llama-3.2-1B"}, "Liger does not run"),
        ("TPU-v6e", {"loss": "cce"}, "Cut Cross Entropy does not run"),
        ("Gaudi-3", {"fp8": "rowwise"}, "fp8 by torchao does not run"),
        ("TPU-v6e", {"allocator_conf": "expandable_segments:True"}, "caching allocator does not run on TPU-v6e"),
        ("TPU-v6e", {"backend": "deepspeed"}, "backend deepspeed does not run on TPU-v6e"),
        ("Trainium-2", {"strategy": "zero1"}, "backend deepspeed does not run on Trainium-2"),
    ],
)  # fmt: skip
def test_software_that_does_not_run_on_the_gpu_is_refused(gpu: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as raised:
        estimate(**{**JOB, "gpu": gpu, **options})
    assert raised.value.hint


@pytest.mark.parametrize(
    ("gpu", "options"),
    [
        ("L4", {"optim": "adamw_torch_fp8"}),
        ("A100-80GB", {"optim": "adamw_torch_fp8", "offload": "optimizer"}),  # which steps on the host
        ("Gaudi-3", {"optim": "lion_32bit", "backend": "deepspeed"}),
        ("MI300X", {"attention": "flash_attention_2"}),
    ],
)
def test_software_that_runs_on_the_gpu_is_estimated(gpu: str, options: dict[str, Any]) -> None:
    assert estimate(**JOB, gpu=gpu, strategy="zero2", **options).estimates[0].peak_tensor_bytes


def test_a_gpu_of_unknown_capability_has_a_note_on_what_the_optimizer_needs() -> None:
    def notes(gpu: str) -> str:
        return " ".join(estimate(**JOB, gpu=gpu, strategy="zero2", optim="adamw_torch_fp8").notes)

    assert "compute capability 8.9" in notes("24GiB") and "compute capability" not in notes("H100")


def test_rows_whose_backend_does_not_run_on_the_gpu_are_left_out() -> None:
    report = estimate(**JOB, gpu="TPU-v6e")
    assert {row.backend for row in report.estimates} == {"ddp", "fsdp2"}
    (note,) = (note for note in report.notes if "left out" in note)
    assert note.startswith(
        "ZeRO-1, ZeRO-2 + optimizer offload and ZeRO-3 + optimizer offload are left out: backend deepspeed"
    )


def test_a_search_leaves_out_a_backend_that_does_not_run_on_the_gpu() -> None:
    found = recommend(**JOB, gpu="TPU-v6e", micro_batch_size=1).recommendation
    assert all(
        plan.backend != "deepspeed"
        for plan in (c.plan for c in (found.winner, *(r.candidate for r in found.runners_up)))
    )
    assert any("does not run on TPU-v6e" in rejection.reason for rejection in found.rejected)


def test_a_search_for_a_gpu_type_skips_those_that_cannot_step_the_optimizer() -> None:
    options = {"model": "gpt2", "seq_len": 512, "gpus": 1, "micro_batch_size": 1, "find": "gpu-type"}
    sweep = recommend(**options, optim="adamw_torch_fp8").recommendation.sweep
    tried = {row.gpu for row in sweep.rows}
    assert "RTX-4090" in tried and not tried & {"A100-80GB", "RTX-3090", "T4"}


def test_expandable_segments_are_not_advised_where_pytorchs_allocator_does_not_run() -> None:
    """A step with retries, for which the setting helps on a GPU of the same size."""
    job = {"model": "Qwen/Qwen3-8B", "gpus": 8, "strategy": "zero3", "activation_checkpointing": "full"}
    (row,) = estimate(**job, gpu="TPU-v6e").estimates
    assert row.allocator.verdict != "fits"
    assert row.allocator.expandable_segments_help is None and not any("PYTORCH_ALLOC_CONF" in w for w in row.warnings)
