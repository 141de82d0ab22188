"""What is assumed for options that were not given, and which given options are reported as ignored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from matrix import in_turn

from fsdp_advisor import estimate, recommend
from fsdp_advisor.assumption_notes import assumption_notes
from fsdp_advisor.assumptions import keeps_packed_base_whole, settled
from fsdp_advisor.errors import UsageError
from fsdp_advisor.estimator import requested
from fsdp_advisor.export.choice import report_for
from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.ignored import ignored_in_estimate, ignored_in_search
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest

GPT2 = "openai-community/gpt2"


@pytest.mark.parametrize(
    ("gpus", "gpu", "nodes"),
    [(8, "H100", 1), (16, "H100", 2), (12, "H100", 2), (8, "RTX 4090", 1), (8, "GB200", 2), (16, "24GiB", 2)],
)
def test_nodes_follow_from_the_number_of_gpus(gpus: int, gpu: str, nodes: int) -> None:
    request = settled(make_request({"model": GPT2, "gpus": gpus, "gpu": gpu}))
    assert request.nnodes == nodes
    assert ("nnodes" in request.assumed) == (nodes > 1)


def test_given_nodes_and_precision_stay() -> None:
    given = {"model": GPT2, "gpus": 16, "gpu": "V100", "nnodes": 1, "precision": "bf16-mixed"}
    request = settled(make_request(given))
    assert (request.nnodes, request.precision, request.assumed) == (1, "bf16-mixed", frozenset())


@pytest.mark.parametrize("framework", ["torchtitan", "axolotl"])
def test_the_allocator_setting_of_a_frameworks_launcher_is_assumed(framework: str) -> None:
    job = {"model": "meta-llama/Llama-3.1-8B", "gpus": 8, "gpu": "H100", "framework": framework}
    assert settled(make_request(job)).allocator_conf == "expandable_segments:True"
    assert settled(make_request({**job, "framework": "trainer"})).allocator_conf is None


def test_an_assumed_allocator_setting_changes_the_estimate_like_a_given_one() -> None:
    job = {
        "model": "meta-llama/Llama-3.1-8B",
        "gpus": 8,
        "gpu": "H100",
        "framework": "axolotl",
        "strategy": "zero3",
        "backend": "fsdp2",
    }
    [assumed] = estimate(**job).estimates
    [stated] = estimate(**job, allocator_conf="expandable_segments:True").estimates
    [without] = estimate(**job, allocator_conf="expandable_segments:False").estimates
    assert assumed.allocator == stated.allocator
    assert assumed.needed_bytes < without.needed_bytes


def test_a_request_constructed_directly_is_taken_as_it_is() -> None:
    assert settled(EstimateRequest(model=GPT2, gpus=16, gpu="V100")).nnodes == 1


def test_a_search_for_the_number_of_gpus_assumes_no_nodes() -> None:
    request = make_request({"model": GPT2, "gpus": 64, "gpu": "H100", "find": "gpus"}, RecommendRequest)
    assert settled(request).nnodes == 1


@pytest.mark.parametrize("gpu", ["T4", "V100"])
def test_a_gpu_without_bf16_trains_in_fp16(gpu: str) -> None:
    report = estimate(model=GPT2, gpus=2, gpu=gpu, strategy="ddp")
    assert report.estimates[0].plan.precision == "fp16-mixed"
    assert any("does not compute in bf16" in note for note in report.notes)


@pytest.mark.parametrize("gpu", ["T4", "V100"])
@pytest.mark.parametrize("ask", [estimate, recommend])
def test_flash_attention_is_refused_on_gpus_without_its_kernels(ask: Callable[..., Any], gpu: str) -> None:
    with pytest.raises(UsageError, match=f"flash-attn has no kernels for {gpu}"):
        ask(model=GPT2, gpu=gpu, attention="flash_attention_2")


@pytest.mark.parametrize("ask", [estimate, recommend])
def test_flash_attention_is_refused_in_fp32(ask: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="not in fp32"):
        ask(model=GPT2, gpu="A100", attention="flash_attention_2", precision="fp32")


@pytest.mark.parametrize(
    ("options", "storage"),
    [
        ({"gpus": 2}, "bfloat16"),
        ({"gpus": 2, "precision": "fp32"}, "float32"),
        ({"gpus": 2, "gpu": "T4"}, "float16"),
        ({"gpus": 1}, "uint8"),
        ({"gpus": 2, "bnb_4bit_quant_storage": "uint8"}, "uint8"),
    ],
    ids=str,
)
def test_a_search_stores_weights_in_4_bits_so_that_several_gpus_share_them(
    options: dict[str, Any], storage: str
) -> None:
    job = {"model": GPT2, "gpu": "H100", "use_peft": True, "load_in_4bit": True, **options}
    assert settled(make_request(job, RecommendRequest)).bnb_4bit_quant_storage == storage
    assert settled(make_request(job)).bnb_4bit_quant_storage == options.get("bnb_4bit_quant_storage", "uint8")


@pytest.mark.parametrize("task", ["dpo", "kto", "reward", "grpo"])
def test_a_task_of_trl_is_trained_with_trl(task: str) -> None:
    request = settled(make_request({"model": GPT2, "gpus": 8, "gpu": "A100", "task": task}))
    assert (request.framework, request.activation_checkpointing) == ("trl", "full")
    notes = assumption_notes(request, find_gpu("A100"))
    assert any(note.startswith(f"framework trl is assumed, which has task {task}") for note in notes)
    assert any("LLaMA-Factory has it too" in note for note in notes) is (task in ("dpo", "kto"))
    with pytest.raises(UsageError, match=f"framework torch has no task {task}"):
        estimate(model=GPT2, gpus=8, gpu="A100", task=task, framework="torch")


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"gpus": 4}, 2),
        ({"gpus": 3}, 8),
        ({"gpus": 8}, None),
        ({"gpus": 4, "micro_batch_size": 1}, None),
        ({"gpus": 4, "num_generations": 8}, None),
        ({"gpus": 4, "gradient_accumulation_steps": 2}, None),
        ({"gpus": 4, "steps_per_generation": 4}, 4),
        ({"gpus": 4, "task": "dpo"}, None),
    ],
    ids=str,
)
def test_grpo_generates_whole_groups_by_default(options: dict[str, Any], steps: int | None) -> None:
    job = {"model": GPT2, "gpu": "A100", "task": "grpo", **options}
    request = settled(make_request(job))
    assert request.steps_per_generation == steps
    notes = [note for note in assumption_notes(request, find_gpu("A100")) if note.startswith("--steps-per-generation")]
    assert bool(notes) is ("steps_per_generation" in request.assumed) is (steps is not None and steps != 4)
    searched = settled(make_request(job, RecommendRequest))
    assert searched.steps_per_generation == options.get("steps_per_generation")


@pytest.mark.slow
def test_an_exported_search_of_grpo_keeps_the_steps_per_generation_of_its_plan() -> None:
    job = {"model": GPT2, "gpus": 4, "gpu": "A100", "task": "grpo", "seq_len": 64, "max_completion_length": 16}
    (estimated,) = estimate(**job, strategy="ddp").estimates
    assert estimated.plan.generation is not None and estimated.plan.generation.steps == 2
    fixed = {"backend": "ddp", "activation_checkpointing": "full"}
    (found,) = report_for("trl", make_request({**job, **fixed})).estimates
    assert found.plan.generation is not None and found.plan.generation.steps is None
    assert found.plan.micro_batch_size % 2 == 0


@pytest.mark.parametrize(
    ("framework", "options", "expected"),
    [
        ("axolotl", {}, (True, "bfloat16")),
        ("axolotl", {"precision": "fp32"}, (True, "bfloat16")),
        ("llamafactory", {"gpu": "T4"}, (True, "float16")),
        ("llamafactory", {"precision": "fp32"}, (True, "float32")),
        ("trl", {}, (False, "uint8")),
        ("axolotl", {"use_bnb_nested_quant": False}, (False, "bfloat16")),
        ("axolotl", {"bnb_4bit_quant_storage": "uint8"}, (True, "uint8")),
        ("axolotl", {"load_in_4bit": False}, (False, "uint8")),
        ("axolotl", {"load_in_4bit": False, "load_in_8bit": True}, (False, "uint8")),
    ],
    ids=str,
)
def test_weights_in_4_bits_are_stored_as_the_framework_does(
    framework: str, options: dict[str, Any], expected: tuple[bool, str]
) -> None:
    job = {"model": GPT2, "gpus": 2, "gpu": "A100", "use_peft": True, "load_in_4bit": True, "framework": framework}
    request = settled(make_request({**job, **options}))
    assert (request.use_bnb_nested_quant, request.bnb_4bit_quant_storage) == expected
    again = settled(make_request(request.changed))
    assert (again.use_bnb_nested_quant, again.bnb_4bit_quant_storage) == expected
    notes = assumption_notes(request, find_gpu(str(request.gpu)))
    is_noted = not {"use_bnb_nested_quant", "bnb_4bit_quant_storage"}.isdisjoint(request.assumed)
    assert any("stores weights in 4 bits" in note or "quantizes their scales" in note for note in notes) is is_noted
    names_storage = any("--bnb-4bit-quant-storage" in note for note in notes)
    assert names_storage is (
        framework == "axolotl" and "bnb_4bit_quant_storage" in request.assumed
    )  # llamafactory has no key
    assert any("--no-use-bnb-nested-quant" in note for note in notes) is ("use_bnb_nested_quant" in request.assumed)


@pytest.mark.parametrize(("framework", "whole"), [("trainer", True), ("axolotl", False)])
def test_only_axolotl_shards_weights_in_4_bits_that_are_stored_in_integers(framework: str, *, whole: bool) -> None:
    job = {"model": GPT2, "gpus": 2, "use_peft": True, "load_in_4bit": True, "bnb_4bit_quant_storage": "uint8"}
    assert keeps_packed_base_whole(settled(make_request({**job, "framework": framework}))) is whole


def test_axolotls_files_store_weights_in_4_bits_as_its_option_does(tmp_path: Path) -> None:
    file = tmp_path / "qlora.yaml"
    file.write_text(f"base_model: {GPT2}\nadapter: qlora\nload_in_4bit: true\nlora_r: 16\nlora_alpha: 32\nbf16: true\n")
    read = settled(requested({"config_file": str(file), "gpus": 2, "gpu": "A100"}, EstimateRequest))
    job = {"model": GPT2, "gpus": 2, "gpu": "A100", "framework": "axolotl", "use_peft": True, "load_in_4bit": True}
    assert adaptation_of(read).quantization == adaptation_of(settled(make_request(job))).quantization


def test_the_options_of_a_recommendation_reproduce_what_a_framework_would_choose_otherwise() -> None:
    words = recommend(model=GPT2, gpus=2, gpu="A100", framework="trl", strategy="ddp").recommendation.options
    assert words[words.index("--activation-checkpointing") + 1] == "none"


@pytest.mark.parametrize(
    ("options", "estimated", "searched"),
    [
        ({}, "bfloat16", "bfloat16"),
        ({"framework": "accelerate"}, "bfloat16", "bfloat16"),
        ({"framework": "trainer", "backend": "fsdp1"}, "bfloat16", "bfloat16"),
        ({"framework": "trl"}, "auto", "bfloat16"),  # it loads fp32 by default, as a search does
        ({"framework": "trl", "dtype": "auto"}, "auto", "auto"),
        ({"dtype": "auto"}, "bfloat16", "bfloat16"),
        ({"dtype": "float32"}, "float32", "float32"),
        ({"backend": "fsdp1"}, "auto", "auto"),  # a flat parameter has one dtype, and adapters are in fp32
        ({"load_in_8bit": True}, "auto", "auto"),
        ({"precision": "fp32"}, "auto", "auto"),
        ({"precision": "fp16-mixed"}, "float16", "float16"),
        ({"precision": "fp16-mixed", "lora_modules_to_save": "lm_head"}, "auto", "auto"),
        ({"use_peft": False, "freeze": ("wte",)}, "auto", "auto"),
    ],
    ids=str,
)
def test_a_frozen_base_is_stored_as_its_framework_loads_it(
    options: dict[str, Any], estimated: str, searched: str
) -> None:
    job = {"model": GPT2, "gpus": 2, "gpu": "H100", "use_peft": True, **options}
    assert settled(make_request(job)).dtype == estimated
    assert settled(make_request(job, RecommendRequest)).dtype == searched


@pytest.mark.parametrize(
    ("options", "note"),
    [
        ({}, "stored in bfloat16, as transformers loads most checkpoints; --dtype float32 doubles it"),
        ({"framework": "trl"}, "stored in fp32, as TRL loads it; --dtype bfloat16 halves it"),
        ({"backend": "fsdp1"}, "stored in fp32, because FSDP1 flattens one dtype, which is that of adapters; --dtype bfloat16 halves it"),
        ({"dtype": "bfloat16"}, ""),
        ({"load_in_8bit": True}, ""),
        ({"gpu": "T4"}, "stored in float16, which must be asked for when it is loaded; --dtype float32 doubles it"),
        ({"gpu": "T4", "lora_modules_to_save": "lm_head"}, ""),
        ({"use_peft": False}, ""),
    ],
    ids=str,
)  # fmt: skip
def test_a_note_names_the_dtype_of_a_frozen_base_and_how_to_change_it(options: dict[str, Any], note: str) -> None:
    request = settled(make_request({"model": GPT2, "gpus": 2, "gpu": "H100", "use_peft": True, **options}))
    notes = assumption_notes(request, find_gpu(str(request.gpu)))
    assert [text for text in notes if "frozen base" in text] == ([f"the frozen base is {note}"] if note else [])


def test_every_interface_says_what_it_assumes() -> None:
    job: dict[str, Any] = {"model": GPT2, "gpus": 16, "gpu": "V100", "strategy": "ddp"}
    request = make_request(job)
    advice = recommend(**job, micro_batch_size=1)
    for report in (estimate(**job), advice.report, report_for("torchrun", request)):
        assert [note.partition(" ")[0] for note in report.notes] == ["2", "precision"]
        assert report.request.nnodes == report.estimates[0].plan.nnodes == 2
    assert advice.recommendation.winner is not None
    assert advice.recommendation.winner.plan.precision == "fp16-mixed"


@pytest.mark.parametrize("nnodes", [1, 2])
def test_the_options_of_a_recommendation_reproduce_its_nodes_and_precision(nnodes: int) -> None:
    job: dict[str, Any] = {"model": GPT2, "gpus": 16, "gpu": "T4", "nnodes": nnodes, "precision": "bf16-mixed"}
    words = recommend(**job, strategy="ddp", micro_batch_size=1).recommendation.options
    again = settled(
        make_request({name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2], strict=True)})
    )
    assert (again.nnodes, again.precision) == (nnodes, "bf16-mixed")


def test_the_changed_options_reproduce_the_request() -> None:
    for given in ({"gpus": 16, "nnodes": 1}, {"gpus": 16}, {"gpu": "T4", "precision": "bf16-mixed"}):
        request = settled(make_request({"model": GPT2, "gpu": "H100", **given}))
        assert settled(make_request(request.changed)) == request


def test_an_export_without_a_strategy_keeps_what_is_assumed() -> None:
    report = report_for("fsdp2", make_request({"model": GPT2, "gpus": 16, "gpu": "V100", "global_batch_size": 64}))
    plan = report.estimates[0].plan
    assert (plan.nnodes, plan.precision) == (2, "fp16-mixed")
    assert plan.micro_batch_size * plan.gradient_accumulation_steps * 16 == 64


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"interconnect": "RoCE"}, "interconnect"),
        ({"offload_device": "nvme", "offload": "none", "strategy": "zero3"}, "offload_device"),
        ({"backward_prefetch": "post"}, "backward_prefetch"),
        ({"reshard_after_forward": "2", "strategy": "zero2"}, "reshard_after_forward"),
        ({"state_dict_type": "full", "strategy": "ddp"}, "state_dict_type"),
        ({"state_dict_type": "full", "strategy": "zero1"}, "state_dict_type"),
        ({"price": 2}, "price"),
        ({"seq_len": 512, "find": "sequence"}, "seq_len"),
        ({"micro_batch_size": 4, "find": "batch"}, "micro_batch_size"),
        ({"gpu": "H100", "find": "gpu-type"}, "gpu"),
    ],
)
def test_an_option_without_effect_is_reported(options: dict[str, Any], name: str) -> None:
    request = make_request({"model": GPT2, **options}, RecommendRequest)
    notes = [*ignored_in_estimate(request, ()), *ignored_in_search(request)]
    assert [note.partition(" ")[0] for note in notes] == [name]


@pytest.mark.parametrize(("strategy", "is_ignored"), [("ddp", True), ("zero3", True), ("zero1", False), ("all", False)])
def test_sizes_of_deepspeeds_buckets_are_reported_where_no_row_is_of_deepspeed(strategy: str, is_ignored: bool) -> None:
    notes = estimate(model=GPT2, gpus=2, strategy=strategy, zero_buckets="reduce_bucket_size=2e8").notes
    assert ("zero_buckets is ignored: only backend deepspeed has it" in notes) == is_ignored


def test_commands_write_host_memory_as_a_size() -> None:
    report = recommend(model=GPT2, gpus=1, gpu="24GiB", host_memory="64GiB", strategy="ddp", micro_batch_size=1)
    words = report.recommendation.options
    assert words[words.index("--host-memory") + 1] == "64GiB"


def test_local_state_dicts_are_the_reason_for_fsdp1() -> None:
    report = estimate(model=GPT2, gpus=2, strategy="zero3", state_dict_type="local")
    assert report.estimates[0].plan.backend == "fsdp1"
    assert "FSDP1 is assumed, because FSDP2 has no local state dicts" in report.notes


def test_options_with_an_effect_are_not_reported() -> None:
    options = {
        "model": GPT2,
        "gpus": 16,
        "nnodes": 2,
        "interconnect": "RoCE",
        "price": 2,
        "tokens": "1B",
        "seq_len": 512,
    }
    request = make_request(options, RecommendRequest)
    assert not [*ignored_in_estimate(request, ()), *ignored_in_search(request)]


@pytest.mark.parametrize("options", [{"offload": "parameters"}, {"offload": "optimizer"}, {}])
def test_offload_to_nvme_means_deepspeed(options: dict[str, Any]) -> None:
    job: dict[str, Any] = {"model": GPT2, "gpus": 2, "gpu": "24GiB", "offload_device": "nvme", **options}
    rows = estimate(**job).estimates
    assert {row.plan.backend for row in rows if row.plan.offload != "none"} == {"deepspeed"}
    winner = recommend(**job, micro_batch_size=1).recommendation.winner
    assert winner is not None and (winner.plan.offload == "none" or winner.plan.backend == "deepspeed")


def test_a_search_that_offloads_names_the_scales_that_can_be_nested() -> None:
    job: dict[str, Any] = {
        "model": "Qwen/Qwen2.5-0.5B",
        "gpus": 1,
        "use_peft": True,
        "load_in_4bit": True,
        "micro_batch_size": 1,
        "activation_checkpointing": "full",
    }
    offloads = recommend(**job, gpu="8GiB", strategy="zero2", offload="optimizer").recommendation
    assert offloads.winner is not None
    (note,) = [each for each in offloads.notes if "scales" in each]
    assert "--use-bnb-nested-quant divides that by four" in note
    assert not any("scales" in each for each in recommend(**job, gpu="H100", strategy="ddp").recommendation.notes)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"precision": "bf16-mixed", "use_peft": True}, "is for precision fp16-mixed"),
        ({"precision": "fp16-mixed"}, "cannot be trained"),
        (
            {"precision": "fp16-mixed", "use_peft": True, "lora_modules_to_save": "lm_head"},
            "does not unscale gradients",
        ),
        ({"precision": "fp16-mixed", "use_peft": True, "dtype": "bfloat16"}, "autocast converts weights in bfloat16"),
    ],
    ids=str,
)
def test_weights_in_16_bits_that_cannot_be_trained_so_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        estimate(model=GPT2, gpu="H100", **{"dtype": "float16", **options})


@in_turn(0, of=3)
def test_adapters_on_a_base_in_float16_need_what_those_on_one_in_bfloat16_need() -> None:
    job = {"model": GPT2, "gpu": "A100", "gpus": 2, "strategy": "ddp", "use_peft": True}
    (found,) = estimate(**job, precision="fp16-mixed", dtype="float16").estimates
    (expected,) = estimate(**job, precision="bf16-mixed", dtype="bfloat16").estimates
    assert found.peak_tensor_bytes == expected.peak_tensor_bytes


def test_a_note_names_models_that_clamp_hidden_states_in_float16() -> None:
    def notes(**options: Any) -> bool:
        (row,) = estimate(model="google-t5/t5-small", gpu="A100", precision="fp16-mixed", **options).estimates
        return any("clamp" in note for note in row.not_modelled)

    assert notes(gpus=2, strategy="zero3") and not notes(gpus=1, strategy="ddp")


@pytest.mark.parametrize(
    ("options", "is_noted"),
    [
        ({"optim": "adamw_bnb_8bit", "strategy": "zero3"}, True),
        ({"optim": "adamw_bnb_8bit", "strategy": "zero3", "backend": "fsdp1"}, False),
        ({"optim": "adamw_bnb_8bit", "strategy": "zero1"}, False),
        ({"optim": "adamw_torch_8bit", "strategy": "zero3"}, False),
    ],
    ids=str,
)
def test_a_note_says_that_the_optimizer_is_why_fsdp1_is_assumed(options: dict[str, Any], *, is_noted: bool) -> None:
    notes = estimate(model=GPT2, gpus=4, gpu="A100", **options).notes
    assert any(note.startswith("FSDP1 is assumed, because bitsandbytes' kernels") for note in notes) is is_noted
