"""TRL's own parser reads the exported configurations as the plans say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from export_jobs import job, plan

from fsdp_advisor.export import export
from fsdp_advisor.job.adaptation import Adaptation
from fsdp_advisor.job.evaluation import Evaluation
from fsdp_advisor.job.generation import Generation
from fsdp_advisor.job.images import Images

pytestmark = pytest.mark.slow

LORA = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
NF4 = {
    "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16", "bnb_4bit_use_double_quant": True,
    "bnb_4bit_quant_storage": "bfloat16",
}  # fmt: skip
JOBS = {
    "qlora": job(plan("zero3", "fsdp2", framework="trainer"), adaptation=Adaptation(peft=LORA, quantization=NF4)),
    "lora": job(
        plan("zero3", "deepspeed", framework="trainer", activation_checkpointing="full"),
        adaptation=Adaptation(peft={**LORA, "target_modules": "all-linear"}),
    ),
    "dpo": job(plan("zero3", "fsdp2", framework="trl", loss_code="trl", task="dpo", reference="copy")),
    "precomputed": job(plan("ddp", "ddp", framework="trl", loss_code="trl", task="dpo")),
    "kto": job(plan("ddp", "ddp", framework="trl", loss_code="trl", task="kto", reference="copy")),
    "reward": job(
        plan("ddp", "ddp", framework="trl", task="reward"),
        task="sequence-classification",
        adaptation=Adaptation(peft=LORA, reward_head=True),
    ),
    "grpo": job(
        replace(
            plan("zero3", "fsdp2", framework="trl", loss_code="trl", task="grpo", reference="copy", micro_batch_size=8),
            generation=Generation(
                completion_length=64,
                completions_per_prompt=4,
                iterations=2,
                beta=0.04,
                generator="colocate",
                sleeps=True,
                max_length=2048,
            ),
        )
    ),
    "evaluated": job(
        plan(
            "ddp",
            "ddp",
            framework="trl",
            loss_code="trl",
            activation_offload=True,
            evaluation=Evaluation(batch_size=4, strategy="epoch"),
        )
    ),
    "images": job(
        plan("zero3", "fsdp2", framework="trl", loss_code="trl", images=Images(1, 768, 1024, 0)),
        model_name="Qwen/Qwen2.5-VL-7B-Instruct",
        task="image-text-to-text",
    ),
    "whole": job(plan("ddp", "ddp", framework="trainer", precision="fp32", optim="sgd_momentum", micro_batch_size=2)),
}


@pytest.fixture(scope="module")
def read(run: Callable[..., dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("trl")
    paths = {name: folder / f"{name}.yaml" for name in JOBS}
    for name, path in paths.items():
        Path(path).write_text(export("trl", JOBS[name]).text)
    found = run("parse_trl.py", *(f"{JOBS[name].plan.task}={path}" for name, path in paths.items()))
    return {name: found[str(path)] for name, path in paths.items()}


@pytest.mark.parametrize("name", JOBS)
def test_the_batch_and_the_engine_are_the_plan_s(name: str, read: dict[str, dict[str, Any]]) -> None:
    p, found = JOBS[name].plan, read[name]
    assert (found["model"], found["seq_len"]) == (JOBS[name].model_name, p.seq_len if p.generation is None else None)
    assert found["micro_batch_size"] == p.micro_batch_size
    assert (found["bf16"], found["checkpointing"]) == (p.mixed, p.activation_checkpointing == "full")
    assert found["fsdp_version"] == (2 if p.backend == "fsdp2" else None)
    assert found["deepspeed_stage"] == (3 if p.backend == "deepspeed" else None)
    assert found["optim"] == ("sgd" if p.optim == "sgd_momentum" else p.optim)


def test_a_job_with_images_names_a_data_set_with_images(read: dict[str, dict[str, Any]]) -> None:
    assert read["images"]["dataset"] == "trl-lib/llava-instruct-mix"


def test_the_completions_are_the_plan_s(read: dict[str, dict[str, Any]]) -> None:
    """GRPOConfig accepts them, and sets what the plan leaves to it."""
    assert read["grpo"]["completions"] == {
        "num_generations": 4, "max_completion_length": 64, "beta": 0.04, "num_iterations": 2, "steps_per_generation": 1,
        "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.3, "vllm_enable_sleep_mode": True,
        "vllm_tensor_parallel_size": 1, "vllm_max_model_length": 2048,
    }  # fmt: skip


def test_the_adapter_and_the_quantized_base_are_the_job_s(read: dict[str, dict[str, Any]]) -> None:
    names = ("qlora", "lora", "whole")
    assert [read[name]["rank"] for name in names] == [8, 8, None]
    assert [read[name]["adapted_task"] for name in ("lora", "reward")] == ["CAUSAL_LM", "SEQ_CLS"]
    assert [read[name]["modules"] for name in names] == [["q_proj", "v_proj"], "all-linear", None]
    assert [read[name]["dtype"] for name in names] == ["bfloat16", "bfloat16", "float32"]
    quantization = read["qlora"]["quantization"]
    assert {name: quantization.get(name) for name in NF4} == NF4
    assert [read[name]["precomputes"] for name in ("dpo", "precomputed", "kto", "whole")] == [False, True, False, None]
    assert read["lora"]["quantization"] is None and read["whole"]["quantization"] is None


@pytest.mark.parametrize("name", JOBS)
def test_the_learning_rate_is_trl_s_default_or_ten_times_that_for_adapters(
    name: str, read: dict[str, dict[str, Any]]
) -> None:
    written, default = read[name]["learning_rate"]
    assert written == pytest.approx((10 if JOBS[name].adaptation.method else 1) * default)


def test_evaluation_and_offload_are_the_plan_s(read: dict[str, dict[str, Any]]) -> None:
    assert read["evaluated"]["evaluation"] == {
        "eval_strategy": "epoch", "per_device_eval_batch_size": 4, "prediction_loss_only": True, "eval_accumulation_steps": None,
    }  # fmt: skip
    assert (read["evaluated"]["offloads"], read["whole"]["offloads"]) == (True, False)
