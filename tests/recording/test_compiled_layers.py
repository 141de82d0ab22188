"""Layers that torch.compile compiles: what they change, and which jobs are refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matrix import in_turn

from fsdp_advisor import estimate, recommend
from fsdp_advisor.errors import NotRecordable, UsageError
from fsdp_advisor.estimator import lazy_report
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.strategy_estimate import StrategyEstimate

CONFIG = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 100,
}  # fmt: skip


def _row(folder: Path, **options: Any) -> StrategyEstimate:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG))
    usual = {"gpu": "H100-80GB", "strategy": "ddp", "micro_batch_size": 4, "seq_len": 1000, "precision": "bf16"}
    (row,) = estimate(model=str(path), **(usual | options)).estimates  # type: ignore[arg-type]  # several types
    return row


@in_turn(2, of=4)
@pytest.mark.slow
def test_compiled_layers_save_memory_and_launches_on_a_gpu_alone(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    eager, compiled = _row(tmp_path), _row(tmp_path, compile="layer")
    assert eager.peak_allocated_bytes is not None and compiled.peak_allocated_bytes is not None
    assert compiled.peak_allocated_bytes < 0.9 * eager.peak_allocated_bytes
    assert eager.step is not None and compiled.step is not None
    assert compiled.step.seconds < 0.9 * eager.step.seconds
    for name in ("matmul", "attention"):
        assert eager.step.breakdown[name] > 0, name
        assert compiled.step.breakdown[name] == pytest.approx(eager.step.breakdown[name]), name
    assert compiled.simulated_peak_bytes == eager.simulated_peak_bytes
    frugal = _row(tmp_path, compile="layer", memory_budget=0.5)
    assert frugal.peak_allocated_bytes is not None and frugal.step is not None
    assert frugal.peak_allocated_bytes < compiled.peak_allocated_bytes and frugal.step.seconds > compiled.step.seconds


@in_turn(3, of=4)
@pytest.mark.slow
def test_layers_in_accelerates_checkpoints_are_not_compiled(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    options: dict[str, Any] = {
        "strategy": "zero3",
        "backend": "fsdp2",
        "gpus": 2,
        "precision": "bf16-mixed",
        "compile": "layer",
    }
    wrapped, checkpointed = (
        _row(tmp_path, framework=framework, activation_checkpointing="full", **options)
        for framework in ("accelerate", "trainer")
    )
    assert any("the layers run uncompiled" in why for why in wrapped.not_modelled)
    assert wrapped.peak_allocated_bytes is not None and checkpointed.peak_allocated_bytes is not None
    assert wrapped.peak_allocated_bytes > checkpointed.peak_allocated_bytes
    assert wrapped.step is not None and checkpointed.step is not None
    assert wrapped.step.seconds > checkpointed.step.seconds


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"framework": "axolotl"}, "--framework axolotl"),
        (
            {"framework": "trl", "task": "grpo", "gpus": 8, "num_generations": 8, "max_completion_length": 64},
            "--task grpo without --use-vllm",
        ),
        ({"attention": "eager"}, "--attention eager"),
        ({"activation_checkpointing": "every-2"}, "--activation-checkpointing every-2"),
        ({"activation_checkpointing": "selective"}, "--activation-checkpointing selective"),
        (
            {
                "model": "meta-llama/Llama-3.2-1B",
                "framework": "torchtitan",
                "compile": "model",
                "strategy": "zero3",
                "gpus": 2,
            },
            "torchtitan does not compile the whole model",
        ),
        ({"model": "meta-llama/Llama-3.2-1B", "use_liger_kernel": True}, "--use-liger-kernel"),
        ({"use_peft": True, "use_dora": True}, "adapters other than LoRA"),
        ({"use_peft": True, "load_in_8bit": True}, "a base in 8 bits"),
        ({"use_peft": True, "load_in_8bit": True, "framework": "trl", "task": "dpo"}, "a base in 8 bits"),
        (
            {"use_peft": True, "load_in_4bit": True, "strategy": "zero3", "gpus": 2},
            "a base in 4 bits, except with",
        ),
        (
            {"use_peft": True, "load_in_4bit": True, "framework": "accelerate"},
            "a base in 4 bits in --framework accelerate",
        ),
        ({"use_peft": True, "load_in_4bit": True, "framework": "trl", "task": "dpo"}, "a base in 4 bits in --task dpo"),
        ({"use_peft": True, "framework": "llamafactory"}, "adapters in --framework llamafactory"),
        ({"use_peft": True, "framework": "trl", "task": "reward"}, "adapters in --task reward"),
        (
            {"use_peft": True, "framework": "trl", "task": "dpo", "strategy": "zero3", "gpus": 2},
            "adapters in --task dpo, except with",
        ),
        ({"use_peft": True, "framework": "trl", "task": "kto"}, "adapters in --task kto, except as a whole"),
        ({"use_peft": True, "load_in_4bit": True, "framework": "trl"}, "in --framework trl, except as a whole"),
        ({"use_peft": True, "lora_target_parameters": "c_attn.weight"}, "--lora-target-parameters"),
        ({"padding_free": True}, "packed or padded"),
        ({"padding_free": True, "framework": "trainer", "attention": "flash_attention_2"}, "packed or padded"),
        ({"padding_fraction": 0.3, "framework": "trl", "attention": "flash_attention_2"}, "packed or padded"),
        ({"wrap": "none"}, "--wrap none"),
        ({"backend": "deepspeed", "strategy": "zero3"}, "backend deepspeed"),
        ({"gpu": "V100-32GB", "precision": "fp32"}, "V100"),
        (
            {"compile": "model", "backend": "fsdp1", "strategy": "zero3"},
            "--compile model is not modelled with backend fsdp1",
        ),
        ({"memory_budget": 0.5, "activation_checkpointing": "full"}, "--memory-budget already recomputes"),
        ({"memory_budget": 0.5, "compile": "none"}, "--memory-budget has no effect without --compile"),
    ],
)
def test_jobs_that_are_not_modelled_with_compiled_layers_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        estimate(**({"model": "gpt2", "gpu": "H100-80GB", "strategy": "ddp", "compile": "layer"} | options))


def test_compiled_layers_are_not_searched() -> None:
    with pytest.raises(UsageError, match="search over compiled steps"):
        recommend(model="gpt2", gpu="H100-80GB", compile="layer")


def test_trls_loss_is_compiled_if_its_last_tile_is_whole() -> None:
    torch = pytest.importorskip("torch")
    from fsdp_advisor.recording.losses.compiled import leave_uncompiled

    loss = SimpleNamespace(weight=torch.empty(65537, 1), forward=lambda: 1)
    leave_uncompiled(loss, "model")
    assert loss.forward() == 1 and loss.forward._torchdynamo_disable  # type: ignore[attr-defined]  # Dynamo's own mark
    with pytest.raises(NotRecordable, match="65536 entries"):
        leave_uncompiled(SimpleNamespace(weight=torch.empty(65536, 1)), "model")


def test_rows_of_engines_that_do_not_compile_are_left_out_with_the_reason() -> None:
    job: dict[str, Any] = {"model": "openai-community/gpt2", "gpu": "H100-80GB", "gpus": 2, "compile": "layer"}
    report = lazy_report(make_request(job), resolve(job["model"]))
    assert {plan.backend for plan in report.estimates.plans} == {"ddp", "fsdp2"}
    rows = "ZeRO-1, ZeRO-2 + optimizer offload and ZeRO-3 + optimizer offload are left out: "
    assert f"{rows}--compile layer is not modelled with backend deepspeed" in "".join(report.notes)


def test_one_row_with_flash_attention_has_divided_code_and_no_mask() -> None:
    def notes(**options: Any) -> str:
        job = {"model": "openai-community/gpt2", "gpu": "H100-80GB", "compile": "model", **options}
        return "".join(lazy_report(make_request(job), resolve(job["model"])).notes)

    flash = {"attention": "flash_attention_2"}
    assert "divides the layer's compiled code" in notes(**flash)
    assert "divides" not in notes(**flash, micro_batch_size=2) and "divides" not in notes()
    assert "mask of all pairs" in notes() and "mask of all pairs" not in notes(**flash)


def test_compiled_layers_on_a_packed_checkpoint_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    packed = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "quantization_config": packed}))
    with pytest.raises(UsageError, match="a GPTQ checkpoint"):
        estimate(model=str(path), gpu="H100-80GB", strategy="ddp", compile="layer", use_peft=True)
