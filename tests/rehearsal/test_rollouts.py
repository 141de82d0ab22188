"""Steps of TRL's GRPOTrainer on simulated GPUs, and their phases, compared with the prediction."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn, taken
from rehearsed_jobs import (
    CONFIG,
    FSDP2_OPTIONS,
    FSDP2_SETTINGS,
    LORA_OPTIONS,
    LORA_SETTINGS,
    SETTINGS,
    ZERO3_OPTIONS,
    ZERO3_SETTINGS,
    predicted,
)  # fmt: skip

from fsdp_advisor.assumptions import gpu_of
from fsdp_advisor.engines.registry import step_program
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.memory.allocator.caching import CachingAllocator
from fsdp_advisor.memory.allocator.conf import AllocatorConf
from fsdp_advisor.memory.allocator.operations import step_operations
from fsdp_advisor.memory.libraries import cublas_workspace_bytes
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.tape import GENERATION_PHASES
from fsdp_advisor.rehearsal.rehearse import Settings, rehearse
from fsdp_advisor.tapes import kept_gpu_tape, row_tape

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parent / "scripts"

OLD = {"beta": 0.1, "num_iterations": 2}
ACCUMULATED = {"gradient_accumulation_steps": 2, "steps_per_generation": 2}
JOBS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = dict(
    taken(
        [
            ("a reference and old scores", (OLD, OLD)),
            (
                "accumulated and checkpointed, sharded by FSDP2",
                (
                    {**ACCUMULATED, **FSDP2_SETTINGS, "gradient_checkpointing": True},
                    {**ACCUMULATED, **FSDP2_OPTIONS, "activation_checkpointing": "full"},
                ),
            ),
            ("no scores", ({}, {})),
        ],
        [
            (
                "adapters that FSDP2 shards",
                ({**LORA_SETTINGS, **FSDP2_SETTINGS, "beta": 0.1}, {**LORA_OPTIONS, **FSDP2_OPTIONS, "beta": 0.1}),
            ),
            ("half precision, accumulated", ({"precision": "bf16", **ACCUMULATED}, {"precision": "bf16", **ACCUMULATED})),
            (
                "adapters",
                (
                    {**LORA_SETTINGS, "beta": 0.1, "per_device_train_batch_size": 4},
                    {**LORA_OPTIONS, "beta": 0.1, "micro_batch_size": 4},
                ),
            ),
            (
                "generated within an update",
                (
                    {"gradient_checkpointing": True, "gradient_accumulation_steps": 2, "beta": 0.1},
                    {"activation_checkpointing": "full", "gradient_accumulation_steps": 2, "beta": 0.1},
                ),
            ),
            ("a copy that FSDP2 shards", ({**OLD, **FSDP2_SETTINGS}, {**OLD, **FSDP2_OPTIONS})),
            ("sharded by ZeRO-3", (ZERO3_SETTINGS, ZERO3_OPTIONS)),
            (
                "adapters that ZeRO-3 shards",
                ({**LORA_SETTINGS, **ZERO3_SETTINGS, "beta": 0.1}, {**LORA_OPTIONS, **ZERO3_OPTIONS, "beta": 0.1}),
            ),
            (
                "adapters, accumulated and checkpointed",
                (
                    {**LORA_SETTINGS, **ACCUMULATED, "gradient_checkpointing": True},
                    {**LORA_OPTIONS, **ACCUMULATED, "activation_checkpointing": "full"},
                ),
            ),
            (
                "adapters, generated within an update and checkpointed",
                (
                    {**LORA_SETTINGS, "gradient_checkpointing": True, "gradient_accumulation_steps": 2, "beta": 0.1},
                    {**LORA_OPTIONS, "activation_checkpointing": "full", "gradient_accumulation_steps": 2, "beta": 0.1},
                ),
            ),
        ],
        days=3,
    )
)  # fmt: skip
"""The trainer's settings, and the same as options of an estimate."""
UNSPLIT = 1 << 20
"""The allocator leaves so much of a large block unused. It counts at the peak of a phase, and at that of the step, whose libraries are
added to a phase. Source: c10/core/CachingDeviceAllocator.h, should_split."""


SCRIPT = f"""
import sys
sys.path.insert(0, {str(SCRIPTS)!r})
import torch
from datasets import Dataset
from training import tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer

arguments = GRPOConfig(
    max_steps=3, optim="adamw_torch_fused", output_dir="out", report_to="none", save_strategy="no", bf16=True, num_generations=2,
    per_device_train_batch_size=2, max_completion_length=64, beta=0.1, gradient_checkpointing=False, disable_tqdm=True,
)
model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{CONFIG}), dtype=torch.float32)
import trl.trainer.grpo_trainer
trl.trainer.grpo_trainer.create_model_from_path = lambda *_, **__: AutoModelForCausalLM.from_config(model.config, dtype=torch.float32)
GRPOTrainer(
    model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=arguments,
    train_dataset=Dataset.from_dict({{"prompt": ["a"] * 64}}), processing_class=tokenizer(),
).train()
"""


@in_turn(4, of=8)
@pytest.mark.parametrize("name", JOBS)
def test_steps_and_phases_need_what_is_predicted(
    name: str, run_on_ranks: Callable[..., dict[str, int]], tmp_path: Path
) -> None:
    settings, options = JOBS[name]
    usual = {"max_completion_length": 64, "num_generations": 2, "steps_per_generation": 1}
    job = json.dumps({**SETTINGS, **usual, **settings})
    found = run_on_ranks("rollouts.py", json.dumps(CONFIG), job, gpus=options.get("gpus", 1))
    row = predicted(tmp_path, **{"task": "grpo", **usual, **options})

    assert row.peak_allocated_bytes == pytest.approx(max(found.values()), rel=1e-3)
    libraries = row.peak_allocated_bytes - row.peak_tensor_bytes
    for phase in {"generate", "score"} & set(row.job_peaks.phases):
        predicted_bytes = row.job_peaks.phases[phase].gpu_bytes + libraries
        assert predicted_bytes == pytest.approx(found[phase], rel=2e-3, abs=2 * UNSPLIT)


COMPILED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = dict(
    taken(
        [
            ("regions, sharded", ({"compiled": "regions", **FSDP2_SETTINGS}, {"compile": "layer", **FSDP2_OPTIONS})),
            ("the model, sharded", ({"compiled": "model", **FSDP2_SETTINGS}, {"compile": "model", **FSDP2_OPTIONS})),
            ("the model", ({"compiled": "model"}, {"compile": "model"})),
        ],
        [
            ("regions", ({"compiled": "regions"}, {"compile": "layer"})),
            ("regions on every rank", ({"compiled": "regions"}, {"compile": "layer", "gpus": 2})),
            (
                "regions, sharded and checkpointed",
                (
                    {"compiled": "regions", "gradient_checkpointing": True, **FSDP2_SETTINGS},
                    {"compile": "layer", "activation_checkpointing": "full", **FSDP2_OPTIONS},
                ),
            ),
            ("the model on every rank", ({"compiled": "model"}, {"compile": "model", "gpus": 2})),
            (
                "the model, sharded and checkpointed",
                (
                    {"compiled": "model", "gradient_checkpointing": True, **FSDP2_SETTINGS},
                    {"compile": "model", "activation_checkpointing": "full", **FSDP2_OPTIONS},
                ),
            ),
            (
                "the model in half precision",
                ({"compiled": "model", "precision": "bf16"}, {"compile": "model", "precision": "bf16"}),
            ),
        ],
        days=3,
    )
)


@in_turn(3, of=8)
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_steps_need_what_is_predicted(
    name: str, run_on_ranks: Callable[..., dict[str, int]], tmp_path: Path
) -> None:
    """Other GPUs generate. The trained model and a reference model score completions before the step."""
    settings, options = COMPILED[name]
    usual = {"max_completion_length": 1024, "num_generations": 2, "steps_per_generation": 1, **OLD}
    job = {**SETTINGS, **usual, "per_device_train_batch_size": 4, "length": 4096, **settings}
    found = run_on_ranks("rollouts.py", json.dumps(CONFIG), json.dumps(job), gpus=options.get("gpus", 1))
    served = {"use_vllm": True, "vllm_mode": "server"}
    row = predicted(tmp_path, **{"task": "grpo", "micro_batch_size": 4, "seq_len": 4096, **usual, **served, **options})
    assert row.peak_allocated_bytes == pytest.approx(max(found.values()), rel=1e-3)
    libraries = row.peak_allocated_bytes - row.peak_tensor_bytes
    scored = row.job_peaks.phases["score"].gpu_bytes + libraries
    assert scored == pytest.approx(found["score"], rel=2e-3, abs=2 * UNSPLIT)


BLOOM = {
    "model_type": "bloom", "architectures": ["BloomForCausalLM"], "hidden_size": 512, "n_layer": 4, "n_head": 8, "vocab_size": 50_000,
}  # fmt: skip
"""Its masks and its position bias are as long as the cache."""
MISTRAL = {
    **CONFIG,
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "head_dim": 64,
    "sliding_window": 256,
}
GEMMA = {
    **MISTRAL, "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 6, "sliding_window_pattern": 3,
    "tie_word_embeddings": True,
}  # fmt: skip
"""A third of its layers keep all keys and values, the others those of a window."""


@in_turn(2, of=8)
@pytest.mark.parametrize(("config", "completion_length"), taken([(BLOOM, 512)], [(GEMMA, 64), (MISTRAL, 64)]))
def test_caches_grow_as_the_model_keeps_keys_and_values(
    config: dict[str, Any], completion_length: int, run_on_ranks: Callable[..., dict[str, int]], tmp_path: Path
) -> None:
    """Keys and values of a sliding window, and masks and position biases that are as long as the cache."""
    usual = {"max_completion_length": completion_length, "num_generations": 2, "steps_per_generation": 1}
    found = run_on_ranks("rollouts.py", json.dumps(config), json.dumps({**SETTINGS, **usual}), gpus=1)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    options = {"task": "grpo", "framework": "trl", "precision": "bf16-mixed", "micro_batch_size": 2, "seq_len": 1024}
    job = {"gpu": "H100-80GB", "strategy": "ddp", "activation_checkpointing": "none"}
    generated, peak = peaks_of_allocator({"model": str(path), **job, **options, **usual})
    assert generated == pytest.approx(found["generate"], rel=2e-3)
    assert peak == pytest.approx(max(found.values()), rel=1e-3)


def peaks_of_allocator(options: dict[str, Any]) -> tuple[int, int]:
    """The allocated peaks of a job's generation, and of its third step, both with the libraries."""
    request = make_request(options)
    (plan,), model, (gpu, _) = plans(request, seq_len=1024), resolve(request.model), gpu_of(request)
    tape = kept_gpu_tape(model.profile, row_tape(model, plan), plan, gpu)
    workspaces = [cublas_workspace_bytes(gpu.compute_capability)] * plan.facts.threads
    program = step_program(model.profile, tape, plan)
    operations = step_operations(
        program, *plan.tape_shape, resident_threads=gpu.resident_threads, workspace_bytes=workspaces
    )
    allocator = CachingAllocator(operations.requests, AllocatorConf())
    for part in (operations.setup, operations.first, operations.following):
        allocator.run(part)
        if part is not operations.setup:
            allocator.begin_step(operations.carried_over)
    peaks: dict[bool, int] = {True: 0, False: 0}
    ends = [at for at, _, _ in operations.visits[1:]] + [len(operations.following)]
    for (at, _, name), end in zip(operations.visits, ends, strict=True):
        allocator.allocated_peak = allocator.allocated
        allocator.run(operations.following[at:end])
        generates = name.startswith(GENERATION_PHASES)
        peaks[generates] = max(peaks[generates], allocator.allocated_peak)
    return peaks[True], max(peaks.values())


EVALUATING: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 24}
EVALUATIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = dict(
    taken(
        [("a reference and old scores", (OLD, OLD))],
        [
            ("no scores, accumulated", (ACCUMULATED, ACCUMULATED)),
            ("adapters", ({**LORA_SETTINGS, "beta": 0.1}, {**LORA_OPTIONS, "beta": 0.1})),
            ("a copy that FSDP2 shards", ({**OLD, **FSDP2_SETTINGS}, {**OLD, **FSDP2_OPTIONS})),
        ],
    )
)


@in_turn(0, of=8)
@pytest.mark.parametrize("name", EVALUATIONS)
def test_evaluations_need_what_is_predicted(
    name: str, run_on_ranks: Callable[..., dict[str, int]], tmp_path: Path
) -> None:
    """They generate and score completions of their own."""
    settings, options = EVALUATIONS[name]
    usual = {"max_completion_length": 64, "num_generations": 2, "steps_per_generation": 1}
    job = json.dumps({**SETTINGS, **usual, **EVALUATING, **settings})
    found = run_on_ranks("rollouts.py", json.dumps(CONFIG), job, gpus=options.get("gpus", 1))
    evaluates = {"eval_strategy": "steps", "per_device_eval_batch_size": EVALUATING["per_device_eval_batch_size"]}
    row = predicted(tmp_path, **{"task": "grpo", **usual, **evaluates, **options})
    assert row.evaluation is not None  # its simulation goes on from the steps'
    assert row.evaluation.allocated_peak_bytes == pytest.approx(max(found["train"], found["evaluate"]), rel=1e-3)
    libraries = row.peak_allocated_bytes - row.peak_tensor_bytes
    assert row.job_peaks.phases["evaluate"].gpu_bytes + libraries == pytest.approx(found["evaluate"], rel=0.01)


@in_turn(6, of=8)
@pytest.mark.usefixtures("predicts_here")
def test_a_script_that_generates_is_recognized_and_predicted(rehearsal_python: Path, tmp_path: Path) -> None:
    """Its prompts, completions and rewards are the trainer's own: generation ends at the maximum length."""
    (tmp_path / "train.py").write_text(SCRIPT)
    found = rehearse(
        [str(rehearsal_python), str(tmp_path / "train.py")], Settings(gpu="H100-80GB", gpus=1, steps=2, quiet=True)
    )
    assert found.outcome == "completed" and found.prediction is not None and found.prediction.reason is None
    assert found.prediction.options["task"] == "grpo" and found.prediction.options["seq-len"] == "65"
    predicted, rehearsed = found.prediction.figures["peak_allocated_bytes"], found.ranks[0].peak("peak_allocated_bytes")
    assert predicted == pytest.approx(rehearsed, rel=0.01)
