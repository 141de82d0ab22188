"""Predicted peaks against accelerate's and the Trainer's own code around the whole model, under fake tensors.

They are equal to the byte except for scalars of 512 bytes each: the loss divided by the number of micro-batches, the number of tokens
that normalizes it, the gradient norm and the clipping factor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from adapter_peaks import SCALARS_BYTES
from matrix import in_turn, taken, with_all_cases
from simulated_cases import BERT, FRAMEWORKS, GPT2, MORE_FRAMEWORKS, T5, TINY, Case, of_case, plan_of

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")

from compared_peaks import predicted_and_simulated, tape_for  # after the checks
from torch.distributed.fsdp._fully_shard import _fsdp_init
from torch.multiprocessing.reductions import StorageWeakRef

from fsdp_advisor import estimate
from fsdp_advisor.engines.registry import not_modelled
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.recording import TransformersSource, source_of
from fsdp_advisor.step_figures import peak_of_step  # after the checks
from fsdp_advisor.tape_keys import tape_key_of  # after the checks
from fsdp_advisor.validation import frameworks
from fsdp_advisor.validation.failures import ModeUnavailable
from fsdp_advisor.validation.modes import choose_mode
from fsdp_advisor.validation.real import check
from fsdp_advisor.validation.simulate import simulate

pytestmark = pytest.mark.slow

TINY_CONFIG = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize("case", taken(FRAMEWORKS, MORE_FRAMEWORKS, days=6), ids=str)
def test_predicted_peaks_equal_the_frameworks_except_for_scalars(case: Case) -> None:
    plan = plan_of(case)
    model = resolve(case.model)
    assert model.profile is not None
    profile = of_case(model.profile)
    step = peak_of_step(profile, model.tape(tape_key_of(plan)), plan)
    found = simulate(TransformersSource(profile.config, name=case.model, task=profile.task), plan)
    for phase, n_bytes in found.phase_peaks.items():
        assert 0 <= n_bytes - step.phase_peaks[phase] <= SCALARS_BYTES, (phase, n_bytes, step.phase_peaks[phase])


ADAPTERS: tuple[dict[str, str], ...] = (
    {"lora_target_modules": "all-linear", "dtype": "bfloat16", "activation_checkpointing": "full"},
)
MORE_ADAPTERS: tuple[dict[str, str], ...] = (
    {"model_type": "mistral", "gradient_accumulation_steps": "3", "activation_checkpointing": "full"},
    {"precision": "bf16", "activation_checkpointing": "full"},
    {"activation_checkpointing": "reentrant", "lora_r": "64", "gradient_accumulation_steps": "2"},
    {"use_orig_params": "false", "precision": "bf16", "activation_checkpointing": "reentrant"},
    {"model_type": "qwen3", "lora_dropout": "0.1", "gpus": "2"},
    {"lora_modules_to_save": "lm_head"},
    {"dtype": "bfloat16", "gradient_accumulation_steps": "2"},
    {"use_orig_params": "false", "gpus": "7"},
    {"use_orig_params": "false", "use_dora": "true", "precision": "fp32"},
    {
        "use_orig_params": "false", "use_dora": "true", "precision": "bf16", "lora_target_modules": "all-linear",
        "activation_checkpointing": "full",
    },
    {"use_orig_params": "false", "dtype": "bfloat16", "lora_target_modules": "all-linear", "lora_dropout": "0.1"},
    {"use_orig_params": "false", "lora_modules_to_save": "lm_head", "activation_checkpointing": "full"},
    {"use_orig_params": "false", "precision": "bf16", "gradient_accumulation_steps": "2"},
)  # fmt: skip


@with_all_cases
@pytest.mark.parametrize("case", taken(ADAPTERS, MORE_ADAPTERS), ids=str)
def test_the_trainer_makes_units_of_adapters_with_fsdp1(case: dict[str, str], tmp_path: Path) -> None:
    values = dict(case)
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps({**TINY_CONFIG, "num_key_value_heads": 4, "model_type": values.pop("model_type", "llama")})
    )
    usual = {
        "gpus": "4",
        "strategy": "zero3",
        "backend": "fsdp1",
        "framework": "trainer",
        "seq_len": "64",
        "use_peft": "true",
    }
    request = make_request({**usual, **values, "model": str(config)})
    (plan,) = plans(request, seq_len=64)
    model = resolve(request.model).adapted(adaptation_of(request))
    profile = model.profile
    assert profile is not None
    assert tape_key_of(plan, profile).wrap == "peft"
    step = peak_of_step(profile, tape_for(model, plan), plan)
    found = simulate(source_of(profile.config, name=request.model, task=profile.task), plan)
    for phase, n_bytes in found.phase_peaks.items():
        assert 0 <= n_bytes - step.phase_peaks[phase] <= SCALARS_BYTES, (phase, n_bytes, step.phase_peaks[phase])


@in_turn(2, of=3)
def test_a_doubly_quantized_base_is_simulated_under_fsdp2(tmp_path: Path) -> None:
    """accelerate makes a state dict of the model, which reads the offset of the scales."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY_CONFIG))
    quantized = {"use_peft": True, "load_in_4bit": True, "use_bnb_nested_quant": True}
    job = {"gpus": 4, "strategy": "zero3", "framework": "trainer", "seq_len": 64, "model": str(config), **quantized}
    predicted, simulated = predicted_and_simulated(make_request(job))
    assert all(0 <= simulated[phase] - n_bytes <= SCALARS_BYTES for phase, n_bytes in predicted.items())


@pytest.mark.parametrize("framework", ["torch", "trainer"])
def test_an_optimizer_that_allocates_more_on_the_cpu_is_not_simulated(framework: str) -> None:
    job = {
        "model": "Qwen/Qwen2.5-0.5B",
        "gpus": 2,
        "strategy": "zero3",
        "framework": framework,
        "optim": "stable_adamw",
    }
    (plan,) = plans(make_request(job), seq_len=64)
    with pytest.raises(ModeUnavailable, match="on the CPU it allocates more"):
        simulate(TransformersSource({"model_type": "gpt2"}, name="gpt2"), plan)


@in_turn(2, of=5)
def test_flat_parameters_keep_copies_of_adapters_inputs_in_the_first_step_alone(tmp_path: Path) -> None:
    """PEFT reads the dtype of the shard there, as with `use_orig_params` in each step. Later it is that of the last gathered weight."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY_CONFIG))
    usual = {"gpus": 4, "strategy": "zero3", "backend": "fsdp1", "framework": "trainer", "dtype": "bfloat16"}
    job = {**usual, "model": str(config), "gpu": "A100-80GB", "seq_len": 512, "use_peft": True, "lora_r": 1}
    rows = {original: estimate(**job, use_orig_params=original).estimates[0] for original in (True, False)}
    phases = {original: row.job_peaks.phases for original, row in rows.items() if row.job_peaks is not None}
    first, steady = (phases[False][name].gpu_bytes for name in ("first_step", "steady_step"))
    assert first == phases[True]["first_step"].gpu_bytes > steady
    assert rows[False].needed_bytes == rows[True].needed_bytes


COPIES: tuple[dict[str, str], ...] = ({"lora_modules_to_save": "lm_head"}, {"lora_modules_to_save": "embed_tokens"})
MORE_COPIES: tuple[dict[str, str], ...] = (
    {"lora_modules_to_save": "embed_tokens,lm_head"},
    {"lora_target_modules": "embed_tokens,q_proj"},
    {"lora_target_modules": "lm_head,q_proj"},
    {
        "lora_modules_to_save": "lm_head",
        "framework": "trainer",
        "dtype": "bfloat16",
        "gradient_accumulation_steps": "2",
    },
)


def check_accelerates_phases(config: Path, options: dict[str, str]) -> None:
    """Assert that the peak of each phase is that of accelerate's FSDP2 on 4 ranks, but for accelerate's scalars."""
    usual = {"gpus": "4", "strategy": "zero3", "framework": "accelerate", "seq_len": "64"}
    predicted, simulated = predicted_and_simulated(make_request({**usual, **options, "model": str(config)}))
    for phase, n_bytes in simulated.items():
        assert 0 <= n_bytes - predicted[phase] <= SCALARS_BYTES, (phase, n_bytes, predicted[phase])


@in_turn(0, of=3)
@pytest.mark.parametrize("case", taken(COPIES, MORE_COPIES, days=2), ids=str)
def test_accelerate_keeps_adapters_of_embedding_and_head_in_their_units(case: dict[str, str], tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**TINY_CONFIG, "vocab_size": 1000}))
    check_accelerates_phases(config, {"use_peft": "true", **case})


@in_turn(0, of=3)
@pytest.mark.parametrize(
    "frozen", [{"use_peft": "true"}, {"freeze": "embed_tokens"}, {"use_peft": "true", "framework": "trainer"}], ids=str
)
def test_only_accelerates_checkpoints_need_no_gradient_of_a_frozen_embeddings_output(
    frozen: dict[str, str], tmp_path: Path
) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY_CONFIG))
    check_accelerates_phases(config, {"activation_checkpointing": "full", **frozen})


QLORA: dict[str, str] = {
    "load_in_4bit": "true",
    "bnb_4bit_quant_storage": "bfloat16",
    "use_peft": "true",
    "lora_target_modules": "all-linear",
}
WITH_UINT8 = {**QLORA, "bnb_4bit_quant_storage": "uint8"}


@in_turn(0, of=5)
@pytest.mark.parametrize(
    "case",
    taken(
        [
            {**WITH_UINT8, "framework": "trl"},
            {**QLORA, "framework": "trl", "backend": "fsdp1", "activation_checkpointing": "reentrant"},
        ],
        [
            {**WITH_UINT8, "framework": "accelerate"},
            {**WITH_UINT8, "framework": "trainer", "activation_checkpointing": "full"},
            {**QLORA, "framework": "trl", "dtype": "bfloat16"},
            {**QLORA, "framework": "trl", "backend": "fsdp1"},
            {"use_peft": "true", "framework": "trl", "dtype": "bfloat16"},
            {**QLORA, "framework": "axolotl", "backend": "fsdp1", "activation_checkpointing": "reentrant"},
            {**QLORA, "framework": "trainer", "activation_checkpointing": "reentrant"},
        ],
        days=2,
    ),
    ids=str,
)
def test_quantized_bases_equal_accelerates_and_trls_steps(case: dict[str, str], tmp_path: Path) -> None:
    """Under FSDP2, accelerate leaves packed integers whole, and adapters next to 4-bit weights in 16 bits; FSDP1's become fp32. TRL's loss
    gathers the head in the dtype in which it is stored.
    """
    config = tmp_path / "config.json"
    config.write_text(json.dumps(TINY_CONFIG))
    check_accelerates_phases(config, case)


OF_AXOLOTL: tuple[dict[str, str], ...] = (
    {},
    {**QLORA, "activation_checkpointing": "full"},
    {**QLORA, "activation_checkpointing": "reentrant", "strategy": "zero2", "gradient_accumulation_steps": "2"},
)
AXOLOTLS_DORA = {"use_peft": "true", "use_dora": "true", "dtype": "bfloat16", "lora_target_modules": "all-linear"}
MORE_OF_AXOLOTL: tuple[dict[str, str], ...] = (
    {"activation_checkpointing": "full", "gpus": "3"},
    {"use_peft": "true", "dtype": "bfloat16"},
    {"use_peft": "true", "dtype": "bfloat16", "activation_checkpointing": "full", "lora_target_modules": "all-linear"},
    QLORA,
    {**QLORA, "bnb_4bit_quant_storage": "uint8", "gpus": "3"},
    {"use_peft": "true", "dtype": "bfloat16", "gradient_accumulation_steps": "2", "strategy": "zero2"},
    {**AXOLOTLS_DORA, "gradient_accumulation_steps": "2", "strategy": "zero2"},
    {**AXOLOTLS_DORA, "activation_checkpointing": "full"},
    {"strategy": "ddp", "backend": "ddp"},
    {**QLORA, "strategy": "ddp", "backend": "ddp", "activation_checkpointing": "full"},
)


@in_turn(3, of=5)
@pytest.mark.parametrize("case", taken(OF_AXOLOTL, MORE_OF_AXOLOTL, days=2), ids=str)
def test_axolotl_keeps_bf16_weights_and_makes_units_of_adapters(case: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("axolotl")
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**TINY_CONFIG, "model_type": "llama"}))
    usual = {"gpus": "4", "strategy": "zero3", "framework": "axolotl", "seq_len": "64", "precision": "bf16-mixed"}
    predicted, simulated = predicted_and_simulated(make_request({**usual, **case, "model": str(config)}))
    for phase, n_bytes in simulated.items():
        assert 0 <= n_bytes - predicted[phase] <= SCALARS_BYTES, (phase, n_bytes, predicted[phase])


@in_turn(2, of=3)
@pytest.mark.parametrize(
    ("trainer", "framework", "tied"),
    taken(
        [("AccelerateTrainer", "accelerate", True), ("TransformersTrainer", "trainer", False)],
        [("AccelerateTrainer", "accelerate", False), ("TransformersTrainer", "trainer", True)],
    ),
)
def test_fsdp2_frees_unsharded_parameters_before_the_first_step(
    trainer: str, framework: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 moves parameters to the GPU to shard them. Here a clone replaces the move."""
    moved: list[tuple[str, StorageWeakRef]] = []
    alive: list[str] = []
    forward = getattr(frameworks, trainer).forward

    def move(parameters: list[torch.Tensor], buffers: list[torch.Tensor], device: torch.device) -> None:
        for kind, tensors in (("parameter", parameters), ("buffer", buffers)):
            for tensor in tensors:
                tensor.data = tensor.data.clone()
                moved.append((kind, StorageWeakRef(tensor.untyped_storage())))

    def before(self: Any) -> torch.Tensor:
        alive.extend(kind for kind, storage in moved if not storage.expired())
        return forward(self)

    monkeypatch.setattr(_fsdp_init, "_move_states_to_device", move)
    monkeypatch.setattr(getattr(frameworks, trainer), "forward", before)
    case = Case(TINY, "fsdp2", "zero3", 4, 2, 64, framework=framework)
    simulate(
        TransformersSource(TINY_CONFIG | {"tie_word_embeddings": tied}, name="tiny", task="causal-lm"), plan_of(case)
    )
    assert [kind for kind, _ in moved].count("parameter") > 20
    assert alive and set(alive) == {"buffer"}


@pytest.mark.parametrize("name", taken([BERT], ["FacebookAI/roberta-base", T5]))
def test_models_that_accelerate_cannot_wrap_have_a_note(name: str) -> None:
    plan = plan_of(Case(name, "fsdp2", "zero3", 8, 2, 128, framework="accelerate"))
    profile = resolve(name).profile
    assert profile is not None
    assert any("accelerate 1.15 fails" in note for note in not_modelled(profile, plan))
    with pytest.raises(ValueError, match="is shared with a parameter already managed by another FSDP group"):
        simulate(TransformersSource(profile.config, name=name, task=profile.task), plan)


def test_frameworks_are_always_simulated() -> None:
    assert choose_mode(plan_of(FRAMEWORKS[0]), None, "cpu").mode == "simulate"
    with pytest.raises(ModeUnavailable, match="can be simulated, not measured"):
        check(plan_of(FRAMEWORKS[0]), "cuda")


@pytest.mark.parametrize(
    "case",
    [
        Case(GPT2, "fsdp2", "zero3", 8, 1, 128, "fp16-mixed", framework="accelerate"),
        Case(GPT2, "deepspeed", "zero3", 8, 1, 128, framework="accelerate"),
        Case(GPT2, "deepspeed", "zero3", 8, 1, 128, framework="deepspeed"),
        Case(GPT2, "fsdp2", "zero3", 1, 1, 128, framework="trainer"),
    ],
    ids=str,
)
def test_unsupported_plans_are_refused_with_a_hint(case: Case) -> None:
    with pytest.raises(ModeUnavailable) as refused:
        simulate(TransformersSource({"model_type": "gpt2"}, name="gpt2"), plan_of(case))
    assert refused.value.hint


@in_turn(2, of=3)
@pytest.mark.parametrize("checkpointing", taken(["none"], ["full"]))
def test_trls_routers_loss_keeps_what_transformers_function_keeps(checkpointing: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    experts = {"model_type": "qwen3_moe", "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
    config.write_text(json.dumps({**TINY_CONFIG, **experts, "num_key_value_heads": 2, "head_dim": 16}))
    options = {"framework": "trl", "strategy": "ddp", "seq_len": "2000", "activation_checkpointing": checkpointing}
    check_accelerates_phases(config, options)


@in_turn(2, of=3)
@pytest.mark.parametrize("dtype", taken(["bfloat16"], ["float32"]))
def test_trls_loss_gathers_the_trained_copy_of_the_head(dtype: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**TINY_CONFIG, "vocab_size": 20_000}))
    adapted = {"use_peft": "true", "lora_modules_to_save": "lm_head"}
    check_accelerates_phases(config, {"framework": "trl", "dtype": dtype, **adapted})
