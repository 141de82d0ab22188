"""Configuration files as users write them: what is read, what is ignored, what is not modelled, what is assumed."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser
from transformers import TrainingArguments

from fsdp_advisor import estimate
from fsdp_advisor.configs import Configuration, complete, from_paths, from_texts
from fsdp_advisor.configs.known_keys import known_keys
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.batch import divided
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.zero_buckets import zero_buckets
from fsdp_advisor.model import catalog
from fsdp_advisor.render.check_line import check_result


def read(name: str, text: str, **more: str) -> Configuration:
    return from_texts({name: dedent(text), **{k.replace("__", "."): dedent(v) for k, v in more.items()}})


def said(found: Configuration, kind: str) -> str:
    return "\n".join(item for reading in found.readings for item in getattr(reading, kind))


AXOLOTL = """
    base_model: meta-llama/Llama-3.1-8B
    load_in_4bit: true
    adapter: qlora
    lora_r: 32
    lora_target_linear: true
    plugins: [axolotl.integrations.liger.LigerPlugin]
    liger_fused_linear_cross_entropy: true
    liger_rope: true
    datasets: [{path: tatsu-lab/alpaca, type: alpaca}]
    sequence_len: 4096
    sample_packing: true
    micro_batch_size: 2
    gradient_accumulation_steps: 4
    optimizer: adamw_torch_8bit
    bf16: auto
    flash_attention: true
    gradient_checkpointing: true
    fsdp: [full_shard, auto_wrap]
    fsdp_config:
      fsdp_offload_params: true
      fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
      fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
    wandb_project: mine
"""


@pytest.mark.parametrize(
    ("config", "options", "is_said"),
    [
        ("", {"use_liger_kernel": True}, False),
        (
            ", liger_kernel_config: {fused_linear_cross_entropy: false}",
            {"use_liger_kernel": True, "loss": "full"},
            False,
        ),
        (", liger_kernel_config: {rope: false}", {"loss": "liger"}, True),
        (
            ", liger_kernel_config: {rope: false, rms_norm: false, swiglu: false, geglu: false}",
            {"loss": "liger"},
            False,
        ),
    ],
)
def test_use_liger_kernel_is_the_loss_and_all_other_kernels(
    config: str, options: dict[str, Any], is_said: bool
) -> None:
    found = read(
        "args.yaml", f"{{model_name_or_path: gpt2, per_device_train_batch_size: 1, use_liger_kernel: true{config}}}"
    )
    assert {k: v for k, v in found.options.items() if k in ("use_liger_kernel", "loss")} == options
    assert ("Liger's other kernels" in said(found, "not_modelled")) is is_said


def test_a_file_of_axolotl_is_read_with_notes_on_the_rest() -> None:
    found = read("axolotl.yaml", AXOLOTL)
    assert found.options == {
        "framework": "axolotl", "model": "meta-llama/Llama-3.1-8B", "seq_len": 4096, "micro_batch_size": 2,
        "gradient_accumulation_steps": 4, "attention": "flash_attention_2", "activation_checkpointing": "full",
        "backend": "fsdp1", "strategy": "zero3", "offload": "parameters", "wrap": "layer", "precision": "bf16-mixed",
        "optim": "adamw_torch_8bit", "use_peft": True, "lora_r": 32, "lora_dropout": 0.0, "lora_target_modules": "all-linear",
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True,
        "bnb_4bit_quant_storage": "bfloat16", "loss": "liger", "packing": "bfd", "backward_prefetch": "none",
    }  # fmt: skip
    assert "liger_rope: " in said(found, "not_modelled")
    assert "wandb_project" in said(found, "ignored")


@pytest.mark.parametrize(
    ("text", "shards"),
    [("", "auto"), ("tiled_mlp_num_shards: 6", "6"), ("deepspeed: {zero_optimization: {stage: 3}}", "auto")],
)
def test_axolotls_tiled_mlp_is_read(text: str, shards: str) -> None:
    found = read("axolotl.yaml", f"base_model: gpt2\nmicro_batch_size: 1\ntiled_mlp: true\n{text}\n")
    assert found.options["tiled_mlp"] == shards and "tiled_mlp" not in said(found, "not_modelled")


def test_axolotls_tiled_mlp_is_reported_where_it_fails_or_compiles() -> None:
    tiled = "base_model: gpt2\nmicro_batch_size: 1\ntiled_mlp: true\n"
    sharded = read("axolotl.yaml", f"{tiled}fsdp_version: 2\nfsdp_config: {{offload_params: false}}")
    assert "tiled_mlp" not in sharded.options and "fails with FSDP2" in said(sharded, "not_modelled")
    compiled = read("axolotl.yaml", f"{tiled}tiled_mlp_use_original_mlp: false")
    assert compiled.options["tiled_mlp"] == "auto" and "compiles the shards" in said(compiled, "not_modelled")


def test_settings_of_a_projection_are_read_and_others_are_reported() -> None:
    text = """
        model_name_or_path: Qwen/Qwen3-0.6B
        stage: sft
        optim: galore_adamw
        optim_args: rank=256, proj_type={}, scale=2
        optim_target_modules: {}
    """
    known = read("sft.yaml", text.format("std", "[attn, mlp]"))
    projection = {"optim_args": "proj_type=std,rank=256,scale=2", "optim_target_modules": "attn,mlp"}
    assert known.options | {"optim": "galore_adamw", **projection} == known.options
    assert "galore" not in said(known, "not_modelled")
    other = read("sft.yaml", text.format("left", ".*attn.*"))
    assert other.options["optim_args"] == "rank=256,scale=2" and "optim_target_modules" not in other.options
    reported = said(other, "not_modelled")
    assert "galore_adamw with proj_type left; the estimate assumes the Trainer's default" in reported
    assert "optim_target_modules: .*attn.* (the estimate projects all linear layers)" in reported


@pytest.mark.parametrize("name", ["axolotl.yaml"])
def test_every_key_of_a_file_is_read_or_named(name: str) -> None:
    import yaml

    text = dedent(AXOLOTL)
    (reading,) = from_texts({name: text}).readings
    accounted = [
        item.partition(":")[0].partition(".")[0] for item in (*reading.read, *reading.ignored, *reading.not_modelled)
    ]
    assert set(yaml.safe_load(text)) <= set(accounted)


def test_llama_factory_with_its_deepspeed_file(tmp_path: Path) -> None:
    (tmp_path / "ds_z3_offload.json").write_text(
        json.dumps(
            {
                "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "bf16": {"enabled": "auto"},
                "zero_optimization": {
                    "stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"},
                    "reduce_bucket_size": "auto", "sub_group_size": 1e9, "zero_quantized_weights": True,
                },
            }
        )
    )  # fmt: skip
    (tmp_path / "sft.yaml").write_text(
        dedent(
            """
            model_name_or_path: meta-llama/Meta-Llama-3-8B
            stage: dpo
            finetuning_type: lora
            lora_rank: 8
            template: llama3
            cutoff_len: 4096
            per_device_train_batch_size: 1
            gradient_accumulation_steps: 2
            bf16: true
            flash_attn: fa2
            quantization_bit: 4
            deepspeed: ds_z3_offload.json
            """
        )
    )
    found = from_paths([tmp_path / "sft.yaml"])
    assert found.options == {
        "model": "meta-llama/Meta-Llama-3-8B", "framework": "llamafactory", "task": "dpo", "seq_len": 4096,
        "attention": "flash_attention_2",
        "micro_batch_size": 1, "gradient_accumulation_steps": 2, "precision": "bf16-mixed", "activation_checkpointing": "reentrant",
        "strategy": "zero3", "backend": "deepspeed", "offload": "parameters", "offload_device": "cpu",
        "use_peft": True, "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0, "lora_target_modules": "all-linear",
        "load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "use_bnb_nested_quant": True, "bnb_4bit_quant_storage": "bfloat16",
        # transformers fills in "auto" alone; DeepSpeed's defaults count for keys that are missing
        "zero_buckets": "stage3_prefetch_bucket_size=50000000,stage3_param_persistence_threshold=100000",
    }  # fmt: skip
    assert "zero_quantized_weights: True" in said(found, "not_modelled")
    assert "gradient checkpointing, which LLaMA-Factory switches on" in said(found, "assumed")


def test_adam_mini_of_llamafactory_is_read(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(
        "model_name_or_path: gpt2\nfinetuning_type: full\noptim: adamw_torch\nuse_adam_mini: true\n"
    )
    assert from_paths([tmp_path / "sft.yaml"]).options["optim"] == "adam_mini"


@pytest.mark.parametrize(("value", "policy"), [("true", "reentrant"), ("false", "full")])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("args.yaml", "per_device_train_batch_size: 1\ngradient_checkpointing: true\n"
            "gradient_checkpointing_kwargs: {use_reentrant: VALUE}"),
        ("args.yaml", "per_device_train_batch_size: 1\nactivation_checkpointing: true\n"
            "activation_checkpointing_kwargs: {use_reentrant: VALUE}"),
        ("axolotl.yaml", "base_model: a/b\nmicro_batch_size: 1\ngradient_checkpointing: true\n"
            "gradient_checkpointing_kwargs: {use_reentrant: VALUE}"),
        ("factory.yaml", "stage: sft\nfinetuning_type: full\ncutoff_len: 512\nuse_reentrant_gc: VALUE"),
    ],
)  # fmt: skip
def test_reentrant_checkpoints_are_read(name: str, text: str, value: str, policy: str) -> None:
    found = read(name, text.replace("VALUE", value))
    assert found.options["activation_checkpointing"] == policy
    assert "reentrant" not in said(found, "not_modelled")


def test_reentrant_checkpoints_of_some_layers_are_refused() -> None:
    keywords = "{use_reentrant: true, every_n_layers: 2}"
    text = f"per_device_train_batch_size: 1\ngradient_checkpointing: true\ngradient_checkpointing_kwargs: {keywords}"
    with pytest.raises(UsageError, match="use_reentrant with every_n_layers: 2") as refusal:
        read("args.yaml", text)
    assert refusal.value.hint == "set use_reentrant: false, or leave every_n_layers out"


@pytest.mark.parametrize(
    ("name", "strategy", "offload"),
    [
        ("z3", "zero3", "none"),
        ("z3_offload", "zero3", "parameters"),
        ("z2", "zero2", "none"),
        ("z2_offload", "zero2", "optimizer"),
    ],
)
def test_configurations_that_llamafactory_ships_are_known(name: str, strategy: str, offload: str) -> None:
    path = f"examples/deepspeed/ds_{name}_config.json"
    text = (
        f"{{model_name_or_path: gpt2, stage: sft, finetuning_type: full, template: x, bf16: true, deepspeed: {path}}}"
    )
    found = from_texts({"llama.yaml": text})
    options = {"backend": "deepspeed", "strategy": strategy, "offload": offload, "precision": "bf16-mixed"}
    assert found.options.items() >= options.items()
    readings = {reading.file: reading for reading in found.readings}
    assert f"{path} as LLaMA-Factory ships it, because it was not given" in readings["llama.yaml"].assumed
    own = from_texts({"llama.yaml": text, path: '{"zero_optimization": {"stage": 1}}'})
    assert own.options["strategy"] == "zero1"


def test_a_named_file_that_is_missing_is_reported() -> None:
    found = read("args.json", '{"per_device_train_batch_size": 4, "deepspeed": "ds.json"}')
    assert found.readings[0].missing == ("ds.json",)


def test_trl_with_its_defaults() -> None:
    found = read(
        "sft.yaml",
        "{model_name_or_path: Qwen/Qwen2.5-7B, dataset_name: trl-lib/Capybara, packing: true, use_peft: true}",
    )
    expected = {
        "micro_batch_size": 8, "seq_len": 1024, "activation_checkpointing": "full", "precision": "bf16-mixed", "framework": "trl",
        "use_peft": True, "lora_dropout": 0.05, "packing": "bfd",
    }  # fmt: skip
    assert found.options.items() >= expected.items() and "strategy" not in found.options
    for words in ("micro-batch 8", "1024 tokens", "TRL's default"):
        assert words in said(found, "assumed")


def test_old_words_of_the_trainers_fsdp() -> None:
    found = read(
        "args.json",
        json.dumps(
            {
                "fsdp": "shard_grad_op auto_wrap offload",
                "fsdp_config": {"version": 1, "forward_prefetch": True},
                "fp16": True,
            }
        ),
    )
    assert (found.options["strategy"], found.options["backend"], found.options["offload"]) == (
        "zero3",
        "fsdp1",
        "parameters",
    )
    assert "fsdp: shard_grad_op; with FSDP1 the Trainer shards fully" in said(found, "not_modelled")
    assert found.options["precision"] == "fp16-mixed"
    assert found.options["forward_prefetch"] is True


@pytest.mark.parametrize(
    ("keys", "backend", "reported"),
    [
        ("fsdp_use_orig_params: false", "fsdp1", ""),
        ("fsdp_sharding_strategy: NO_SHARD", "ddp", "the estimate is of DDP"),
        ("fsdp_use_orig_params: true", "fsdp1", ""),
        ("fsdp_version: 2, fsdp_use_orig_params: false", "fsdp2", ""),
    ],
)
def test_ways_of_fsdp1_are_read_or_reported(keys: str, backend: str, reported: str) -> None:
    found = read("fsdp.yaml", f"distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {{{keys}}}")
    assert found.options["backend"] == backend
    assert reported in said(found, "not_modelled")
    assert bool(reported) == bool(said(found, "not_modelled"))
    assert found.options.get("use_orig_params", True) == (keys != "fsdp_use_orig_params: false")


def test_trainer_through_accelerate_in_a_launch_script() -> None:
    found = read(
        "train.sh",
        """
        #!/bin/bash
        #SBATCH --nodes=2
        export NNODES=2
        GPUS=8
        MODEL=${MODEL:-meta-llama/Llama-2-7b-hf}
        export PYTORCH_ALLOC_CONF=expandable_segments:True
        accelerate launch --config_file fsdp.yaml --num_machines $NNODES --num_processes 16 \\
            --machine_rank $SLURM_NODEID run_clm.py \\
            --model_name_or_path $MODEL --per_device_train_batch_size=4 --block_size 4096 --bf16 \\
            --gradient_checkpointing true --output_dir out --torch_compile
        """,
        fsdp__yaml="""
        compute_environment: LOCAL_MACHINE
        distributed_type: FSDP
        mixed_precision: bf16
        num_machines: 1
        num_processes: 8
        fsdp_config: {fsdp_version: 2, fsdp_reshard_after_forward: false, fsdp_auto_wrap_policy: SIZE_BASED_WRAP, fsdp_min_num_params: 1000}
        """,
    )  # fmt: skip
    assert found.options == {
        "framework": "trainer", "gpus": 16, "nnodes": 2, "model": "meta-llama/Llama-2-7b-hf", "micro_batch_size": 4, "seq_len": 4096,
        "precision": "bf16-mixed", "activation_checkpointing": "full", "strategy": "zero2", "backend": "fsdp2", "offload": "none",
        "allocator_conf": "expandable_segments:True", "wrap": "size:1000", "compile": "model",
    }  # fmt: skip
    assert "gpus 16 as here, not 8 as in fsdp.yaml" in said(found, "assumed")


TRAINERS = "model_name_or_path: a/b\nper_device_train_batch_size: 2\nbf16: true\n"
FSDP2 = "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}\n"


@pytest.mark.parametrize(
    "text",
    [
        TRAINERS + "torch_compile: true",
        TRAINERS + "torch_compile: true\nuse_peft: true\nlora_r: 8",
        TRAINERS + "torch_compile_mode: default",
        TRAINERS + "torch_compile_backend: inductor",
        "finetuning_type: full\ncutoff_len: 512\ndisable_gradient_checkpointing: true\ntorch_compile: true",
        FSDP2 + "dynamo_config: {dynamo_backend: INDUCTOR, dynamo_mode: default, dynamo_use_dynamic: false}",
        FSDP2 + "dynamo_config: {backend: inductor}",
        FSDP2 + "dynamo_backend: INDUCTOR",
    ],
)
def test_compiled_models_are_read(text: str) -> None:
    found = complete(read("file.yaml", text), {})
    assert found.options["compile"] == "model"
    assert not said(found, "not_modelled") and not found.readings[0].ignored
    assert complete(read("file.yaml", text), {"compile": "none"}).options["compile"] == "none"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (TRAINERS + "torch_compile: true\nuse_peft: true\nload_in_8bit: true", "a base in 8 bits"),
        ("base_model: a/b\nmicro_batch_size: 1\ntorch_compile: auto", "--framework axolotl"),
        ("finetuning_type: full\ncutoff_len: 512\ntorch_compile: true", "--activation-checkpointing reentrant"),
        (TRAINERS + "torch_compile_backend: eager", "backend eager"),
        (FSDP2.replace("2", "1") + "dynamo_backend: INDUCTOR", "backend fsdp1"),
    ],
)
def test_compilation_that_is_not_modelled_is_left_out_with_the_reason(text: str, words: str) -> None:
    found = complete(read("file.yaml", text), {})
    assert "compile" not in found.options
    assert words in said(found, "not_modelled") and "not compiled" in said(found, "not_modelled")


def test_regions_of_accelerate_are_read_as_layers_also_if_the_trainer_compiles() -> None:
    regions = "dynamo_config: {dynamo_use_regional_compilation: true"
    accelerate = read("file.yaml", FSDP2 + regions + ", dynamo_backend: INDUCTOR}")
    assert complete(accelerate, {}).options["compile"] == "layer" and not said(accelerate, "not_modelled")
    assert "compile" not in read("file.yaml", FSDP2 + regions + "}").options
    arguments = read("accelerate.yaml", FSDP2 + regions + "}", train__yaml=TRAINERS + "torch_compile: true")
    assert complete(arguments, {}).options["compile"] == "layer"


def test_modes_of_the_compiler_are_named_and_a_search_does_not_compile() -> None:
    found = read("file.yaml", TRAINERS + "torch_compile_mode: max-autotune")
    assert found.options["compile"] == "model" and "CUDA graphs" in said(found, "not_modelled")
    searched = complete(found, {}, ("micro_batch_size",))
    assert "compile" not in searched.options and "a search does not compile" in said(searched, "not_modelled")
    assert "compile" not in read("file.yaml", TRAINERS + "torch_compile: false").options
    assert "compile" not in read("file.yaml", FSDP2 + "dynamo_config: {dynamo_backend: 'NO'}").options


def test_misspelt_keys_and_strategies_are_named() -> None:
    keys = "fsdp_version: 1, fsdp_sharding_strategy: FULL_SHRAD, fsdp_activation_chekpointing: true, fsdp_state_dict_typ: X"
    found = read("fsdp.yaml", f"distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {{{keys}}}")
    assert "did you mean FULL_SHARD?" in said(found, "not_modelled")
    assert "chekpointing: True (did you mean fsdp_activation_checkpointing?)" in said(found, "not_modelled")
    assert "fsdp_state_dict_typ: X (did you mean fsdp_state_dict_type?)" in said(found, "not_modelled")
    found = read("fsdp.yaml", "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_sync_module_state: true}")
    assert said(found, "unknown") == "fsdp_sync_module_state (did you mean fsdp_sync_module_states?)"


def test_keys_of_a_section_are_reported_as_the_file_writes_them() -> None:
    """The Trainer and axolotl accept the keys of `fsdp_config` with and without the prefix fsdp_."""
    section = "{fsdp_version: 2, fsdp_reshard_after_forward: false, state_dict_type: FULL_STATE_DICT, fsdp_unknown: 1}"
    for file in ("fsdp: full_shard\noutput_dir: out", "base_model: meta-llama/Llama-2-7b-hf\ndatasets: []"):
        found = read("job.yaml", f"{file}\nfsdp_config: {section}")
        assert found.options["strategy"] == "zero2"
        assert "fsdp_config.fsdp_reshard_after_forward: False" in said(found, "read")
        assert "fsdp_config.fsdp_unknown" in said(found, "ignored")
        assert "fsdp_config.state_dict_type: FULL_STATE_DICT" in said(found, "read")


@pytest.mark.parametrize(
    ("file", "keys", "saves_as"),
    [
        ("fsdp: full_shard\noutput_dir: out\nfsdp_config", "{}", "full"),
        ("fsdp: full_shard\noutput_dir: out\nfsdp_config", "{state_dict_type: SHARDED_STATE_DICT}", "sharded"),
        ("distributed_type: FSDP\nfsdp_config", "{fsdp_version: 2}", "sharded"),
        ("distributed_type: FSDP\nfsdp_config", "{fsdp_version: 2, fsdp_state_dict_type: FULL_STATE_DICT}", "full"),
        ("distributed_type: FSDP\nfsdp_config", "{fsdp_version: 1}", "full"),
        ("distributed_type: FSDP\nfsdp_config", "{fsdp_version: 1, fsdp_state_dict_type: 2}", "local"),
        (
            "distributed_type: FSDP\nfsdp_config",
            "{fsdp_version: 1, fsdp_state_dict_type: SHARDED_STATE_DICT}",
            "sharded",
        ),
    ],
)
def test_the_type_of_state_dicts_is_that_of_the_file_or_of_its_consumer(file: str, keys: str, saves_as: str) -> None:
    """transformers 5.23, _process_fsdp_args: full. accelerate 1.15, `set_state_dict_type`: full with FSDP1, sharded with FSDP2."""
    options = complete(read("job.yaml", f"{file}: {keys}"), {"model": "gpt2", "gpus": 4}).options
    assert estimate(**options).estimates[0].plan.saves_as == saves_as


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("torchrun --nnodes 2 --nproc-per-node=8 train.py --bf16 --per_device_train_batch_size 2",
            {"gpus": 16, "nnodes": 2, "strategy": "ddp", "micro_batch_size": 2}),
        ("torchrun --standalone --nproc_per_node 4 -m train --fp16 --output_dir x", {"gpus": 4, "precision": "fp16-mixed"}),
        ("deepspeed --num_gpus 8 train.py --deepspeed ds.json", {"gpus": 8, "strategy": "zero1", "framework": "deepspeed"}),
        ("accelerate launch --use_fsdp --fsdp_version 2 --num_processes 8 --mixed_precision bf16 train.py --steps 3",
            {"gpus": 8, "strategy": "zero3", "backend": "fsdp2", "precision": "bf16-mixed"}),
        ("srun torchrun --nproc-per-node 8 -m torchtitan.train --module llama3 --config llama3_8b"
            " --training.seq_len 4096 --parallelism.tensor_parallel_degree 2",
            {"seq_len": 4096, "gpus": 8, "strategy": "zero3"}),
        ("trl dpo --model_name_or_path gpt2 --max_length 512 --beta 0.1", {"seq_len": 512, "model": "gpt2", "task": "dpo"}),
        ("CUDA_VISIBLE_DEVICES=0,1 python train.py --model_name_or_path gpt2 --optim sgd --optim_args momentum=0.9",
            {"optim": "sgd_momentum"}),
        ("python train.py --model_name_or_path gpt2 --optim rmsprop --optim_args alpha=0.9", {"optim": "rmsprop"}),
    ],
)  # fmt: skip
def test_options_on_a_command_line_are_read(command: str, options: dict[str, Any]) -> None:
    ds = '{"zero_optimization": {"stage": 1}}'
    found = from_texts({"run.sh": command, "ds.json": ds} if "ds.json" in command else {"run.sh": command})
    assert found.options.items() >= options.items(), found
    if "tensor_parallel" in command:
        assert "tensor_parallel_degree: 2 (tensor parallelism)" in said(found, "not_modelled")
    if "--steps" in command:
        assert "arguments of the script that are not read: steps" in said(found, "not_modelled")


def test_a_file_of_deepspeed_is_read_with_its_number_of_ranks() -> None:
    config = {
        "train_batch_size": 64, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
        "fp16": {"enabled": True, "loss_scale": 0}, "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/x"}, "reduce_bucket_size": 2e8},
        "tensor_parallel": {"autotp_size": 4}, "wall_clock_breakdown": False,
    }  # fmt: skip
    found = from_texts({"ds.json": json.dumps(config)})
    assert found.options == {
        "gpus": 8, "micro_batch_size": 2, "gradient_accumulation_steps": 4, "global_batch_size": 64, "precision": "fp16-mixed",
        "strategy": "zero2",
        "backend": "deepspeed", "offload": "optimizer", "offload_device": "nvme", "optim": "adamw_torch_fused", "framework": "deepspeed",
        "zero_buckets": "reduce_bucket_size=200000000",
    }  # fmt: skip
    assert "tensor_parallel: " in said(found, "not_modelled")
    assert "8 GPUs: train_batch_size / (micro-batch x accumulation)" in said(found, "assumed")


@pytest.mark.parametrize(
    ("stage", "sizes"),
    [
        (2, {"reduce_bucket_size": 10**8}),
        (3, {"stage3_param_persistence_threshold": 0}),
        (3, {"reduce_bucket_size": 10**6, "stage3_prefetch_bucket_size": 900_000}),
        (3, {"stage3_max_live_parameters": 10**15, "stage3_max_reuse_distance": 0}),
    ],
)
@pytest.mark.parametrize("framework", ["deepspeed", "trainer"])
def test_sizes_of_buckets_in_a_file_count(framework: str, stage: int, sizes: dict[str, int]) -> None:
    """Also 0, and a square as frameworks fill it in for "auto"."""
    zero = {"stage": stage, "reduce_bucket_size": "auto", **sizes}
    texts = {"ds.json": json.dumps({"zero_optimization": zero})}
    if framework == "trainer":
        texts["args.json"] = '{"per_device_train_batch_size": 4, "deepspeed": "ds.json", "bf16": true}'
    options = from_texts(texts).options
    assert options["framework"] == framework
    assert zero_buckets(options["zero_buckets"]).items() >= sizes.items()
    assert make_request({"model": "gpt2", **options}).zero_buckets == options["zero_buckets"]


def test_a_size_of_buckets_that_deepspeed_refuses_is_refused_with_what_is_possible() -> None:
    options = read("ds.json", '{"zero_optimization": {"stage": 2, "reduce_bucket_size": 0}}').options
    with pytest.raises(UsageError, match="must be sizes such as reduce_bucket_size=2e8, with the keys"):
        make_request({"model": "gpt2", **options})


def test_the_optimizer_section_of_deepspeed_names_its_muon() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "Muon", "params": {"lr": 0.02}},
    }
    found = from_texts({"ds.json": json.dumps(config)})
    assert found.options["optim"] == "muon" and "optimizer" not in said(found, "not_modelled")


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [
        ("ds.json", '{"zero_optimization": {"stage": 2, "reduce_bucket_size": [1]}}', "reduce_bucket_size is .1., not a whole number"),
        ("ds.json", '{"zero_optimization": {"stage": 2, "sub_group_size": "big"}}', "sub_group_size is big, not a whole number"),
        (
            "ds.json", '{"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": "most"}}}',
            "offload_optimizer.ratio is most, not a number",
        ),
        ("grpo.yaml", "{num_generations: 8, output_dir: o, max_completion_length: abc}", "max_completion_length is abc"),
        ("axolotl.yaml", "{base_model: gpt2, micro_batch_size: 1, plugins: true}", "plugins is True, not a list of names"),
        ("axolotl.yaml", "{base_model: gpt2, adapter: lora, lora_r: 8, lora_target_modules: 1}", "target_modules is 1"),
    ],
)  # fmt: skip
def test_an_impossible_value_is_refused_with_its_key(file: str, text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        from_texts({file: text})


@pytest.mark.parametrize("scatters", [False, True])
def test_muon_under_zero3_is_read_with_reduce_scatter_off(scatters: bool) -> None:
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "reduce_scatter": scatters},
        "optimizer": {"type": "Muon", "params": {"lr": 0.02}},
    }
    found = from_texts({"ds.json": json.dumps(config)})
    assert found.options["optim"] == "muon"
    assert ("fails without reduce_scatter: false" in said(found, "not_modelled")) is scatters


BATCH = {"train_batch_size": 128, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
LAUNCH = "deepspeed --num_gpus 8 train.py --deepspeed ds.json --model_name_or_path gpt2 --bf16"


@pytest.mark.parametrize(
    ("sizes", "more", "given", "refusal"),
    [
        (BATCH, "", {}, "micro-batch 2 x accumulation 4 x 8 GPUs = 64, not train_batch_size 128"),
        (BATCH, "", {"gpus": 16}, None),
        (BATCH, "", {"gradient_accumulation_steps": 8}, None),
        (BATCH, "", {"global_batch_size": 64}, None),
        ({"train_batch_size": 128, "train_micro_batch_size_per_gpu": 2}, "", {}, None),
        (BATCH, " --per_device_train_batch_size 3", {}, "train_micro_batch_size_per_gpu is 2, not 3 as in run.sh"),
        (BATCH | {"train_micro_batch_size_per_gpu": "auto"}, " --per_device_train_batch_size 4", {}, None),
    ],
)
def test_sizes_with_which_deepspeed_stops_are_refused(
    sizes: dict[str, Any], more: str, given: dict[str, Any], refusal: str | None
) -> None:
    config = json.dumps({**sizes, "zero_optimization": {"stage": 2}})
    files = {"run.sh": LAUNCH + more, "ds.json": config}
    if refusal is not None:
        with pytest.raises(UsageError, match=refusal):
            complete(from_texts(files), given)
        return
    request = divided(make_request(complete(from_texts(files), given).options))
    world, whole = given.get("gpus", 8), given.get("global_batch_size", 128)
    assert (request.gpus, request.micro_batch_size * request.gradient_accumulation_steps * world) == (world, whole)


@pytest.mark.parametrize(
    ("half", "keys", "zero", "precision", "words"),
    [
        ("bf16", {}, {"stage": 2}, "bf16-mixed", None),
        ("bf16", {"bf16_optimizer_states": True, "bf16_master_weights_and_grads": True}, {"stage": 3}, "bf16", None),
        ("bf16", {"bf16_master_weights_and_grads": True}, {"stage": 2}, None, "requires an offloaded optimizer"),
        ("bf16", {"bf16_optimizer_states": True}, {"stage": 2}, None, "requires bf16_master_weights_and_grads"),
        ("fp16", {"fp16_master_weights_and_grads": True}, {"stage": 1}, None, "requires an offloaded optimizer"),
        ("bf16", {"bf16_master_weights_and_grads": True}, {"stage": 0}, None, "ZeRO stages 1 to 3 only"),
        (
            "bf16", {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": False},
            {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "bf16-mixed", "the estimate has masters in fp32",
        ),
    ],
)  # fmt: skip
def test_deepspeeds_16_bit_masters_are_read_reported_or_refused(
    half: str, keys: dict[str, bool], zero: dict[str, Any], precision: str | None, words: str | None
) -> None:
    config = {**BATCH, half: {"enabled": True, **keys}, "zero_optimization": zero}
    found = from_texts({"ds.json": json.dumps(config)})
    if words is not None:
        assert words in said(found, "not_modelled")
    embedded = from_texts({"train.yaml": json.dumps({"output_dir": "out", "deepspeed": config})})
    if precision is not None:
        assert complete(found, {}).options["precision"] == precision
    else:
        for refused in (found, embedded):
            with pytest.raises(UsageError, match=words):
                complete(refused, {})


def test_the_number_of_gpus_of_deepspeeds_launcher_wins_unless_a_host_file_may_name_more_nodes() -> None:
    config = json.dumps({**BATCH, "zero_optimization": {"stage": 2}})
    assert from_texts({"run.sh": LAUNCH, "ds.json": config}).options["gpus"] == 8
    hosts = LAUNCH.replace("--num_gpus 8", "--num_gpus 8 --hostfile hosts")
    assert from_texts({"run.sh": hosts, "ds.json": config}).options["gpus"] == 16


def test_a_file_of_torchtune_is_read() -> None:
    found = read(
        "8B_full.yaml",
        """
        tokenizer: {_component_: torchtune.models.llama3.llama3_tokenizer, max_seq_len: 8192}
        model: {_component_: torchtune.models.qwen2_5.lora_qwen2_5_7b_instruct, lora_rank: 8}
        batch_size: 2
        gradient_accumulation_steps: 8
        optimizer: {_component_: bitsandbytes.optim.PagedAdamW8bit, lr: 2e-5}
        loss: {_component_: torchtune.modules.loss.CEWithChunkedOutputLoss}
        compile: true
        optimizer_in_bwd: true
        dtype: bf16
        enable_activation_checkpointing: true
        fsdp_cpu_offload: true
        tensor_parallel_dim: 2
        """,
    )
    assert found.options == {
        "framework": "torch", "model": "Qwen/Qwen2.5-7B", "micro_batch_size": 2, "gradient_accumulation_steps": 8, "seq_len": 8192,
        "precision": "bf16", "activation_checkpointing": "full", "offload": "parameters", "strategy": "zero3", "backend": "fsdp2",
        "optim": "paged_adamw_8bit", "use_peft": True, "lora_r": 8, "lora_alpha": 16, "lora_dropout": 0.0,
        "lora_target_modules": "q_proj,v_proj", "use_dora": False,
    }  # fmt: skip
    for words in (
        "adapters in its dtype",
        "chunked loss",
        "torch.compile",
        "optimizer_in_bwd",
        "tensor_parallel_dim",
    ):
        assert words in said(found, "not_modelled")


TUNE = "model: {_component_: torchtune.models.llama3_1.llama3_1_8b}\nloss: {_component_: torchtune.modules.loss.LinearCrossEntropyLoss}\n"


def test_what_torchtunes_keys_change_in_memory_is_not_ignored() -> None:
    keys = "enable_fp8_training: true\nrun_val_every_n_steps: 50\nresize_token_embeddings: true\nclip_grad_norm: 1.0\n"
    found = read("8B_full.yaml", TUNE + keys)
    for words in ("loss._component_", "enable_fp8_training", "run_val", "resize_token", "clip_grad"):
        assert words in said(found, "not_modelled") and words not in said(found, "ignored")
    plain = read("8B_full.yaml", "model: {_component_: torchtune.models.llama3_1.llama3_1_8b}\n"
        "loss: {_component_: torch.nn.CrossEntropyLoss}\ncompile: False\n")  # fmt: skip
    assert "CrossEntropyLoss" in said(plain, "read") and said(plain, "not_modelled") == ""


def test_the_length_of_torchtunes_uncut_samples_is_an_assumption() -> None:
    found = read("8B_full.yaml", TUNE + "tokenizer: {max_seq_len: null}\n")
    assert found.options["seq_len"] == 2048
    assert "2048 tokens: the file does not limit samples (tokenizer.max_seq_len)" in said(found, "assumed")


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        ("torchtune.rlhf.loss.DPOLoss}", "torchtune.rlhf.loss.DPOLoss (preference and reinforcement learning)"),
        ("torchtune.dev.grpo.loss.GRPOSimpleLoss}", "GRPOSimpleLoss (preference and reinforcement learning)"),
        ("torch.nn.CrossEntropyLoss}\nteacher_model: {_component_: x}", "teacher_model (knowledge distillation)"),
    ],
)  # fmt: skip
def test_torchtunes_jobs_of_another_task_are_refused(loss: str, reason: str) -> None:
    model = "model: {_component_: torchtune.models.llama3_1.llama3_1_8b}\n"
    with pytest.raises(UsageError, match=re.escape(reason)):
        complete(read("8B.yaml", f"{model}loss: {{_component_: {loss}\n"), {})


TITAN_TOML = """
    [model]
    name = "llama3"
    flavor = "8B"
    [optimizer]
    name = "AdamW"
    implementation = "foreach"
    [training]
    local_batch_size = 1
    seq_len = 8192
    [parallelism]
    data_parallel_replicate_degree = 2
    data_parallel_shard_degree = 4
    tensor_parallel_degree = 4
    [activation_checkpoint]
    mode = "selective"
    selective_ac_option = "op"
    [compile]
    enable = true
"""
TITAN_PYTHON = """
    def llama3_8b():
        return Trainer.Config(
            loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()),
            hf_assets_path="./assets/hf/Llama-3.1-8B",
            optimizer=default_adamw(lr=3e-4),
            training=TrainingConfig(local_batch_size=1, seq_len=8192, dtype="bfloat16"),
            parallelism=ParallelismConfig(tensor_parallel_degree=8),
            activation_checkpoint=SelectiveAC.Config(),
        )

    def llama3_70b():
        return Trainer.Config(training=TrainingConfig(seq_len=4096), activation_checkpoint=FullAC.Config())
"""


def test_a_file_of_torchtitan_is_read_with_its_mesh() -> None:
    found = read("llama3_8b.toml", TITAN_TOML)
    assert found.options == {
        "framework": "torchtitan", "model": "meta-llama/Llama-3.1-8B", "micro_batch_size": 1, "seq_len": 8192,
        "precision": "bf16-mixed", "optim": "adamw_torch", "strategy": "hsdp", "backend": "fsdp2", "nnodes": 2, "gpus": 8,
        "activation_checkpointing": "selective", "loss": "full", "compile": "layer",
    }  # fmt: skip
    assert "tensor_parallel_degree: 4" in said(found, "not_modelled")


@pytest.mark.parametrize(
    ("section", "option", "said_of"),
    [
        ('recipe_name = "rowwise"\nfilter_fqns = ["output"]', "rowwise", ""),
        (
            'enable_fsdp_float8_all_gather = true\nfilter_fqns = ["output"]',
            "tensorwise",
            "enable_fsdp_float8_all_gather",
        ),
        ('recipe_name = "rowwise"\nfilter_fqns = ["output", "attention.wq"]', "rowwise", "filter_fqns"),
        ('recipe_name = "rowwise_with_gw_hp"', None, "recipe_name: rowwise_with_gw_hp"),
    ],
)
def test_torchtitan_converts_linear_layers_to_fp8(section: str, option: str | None, said_of: str) -> None:
    converters = "    [quantize.linear.float8]\n" + section.replace("\n", "\n    ")
    text = TITAN_TOML.replace('flavor = "8B"', 'flavor = "8B"\n    converters = ["quantize.linear.float8"]')
    text = "\n".join(
        line if line.startswith("    ") or not line else f"    {line}"
        for line in (text + "    " + converters.strip()).splitlines()
    )
    found = read("llama3_8b.toml", text)
    assert found.options.get("fp8") == option
    assert said_of in said(found, "not_modelled")
    assert "float8" not in said(found, "ignored")


@pytest.mark.parametrize(
    ("section", "option", "said_of"),
    [
        ('recipe_name = "mxfp8_cublas_rceil"\n    filter_fqns = []', "mxfp8", ""),
        ('mxfp8_dim1_cast_kernel_choice = "cuda"', "mxfp8", "quantize.linear.mx.filter_fqns"),
        ('recipe_name = "mxfp4_cutlass"', None, "recipe_name: mxfp4_cutlass"),
    ],
)
def test_torchtitan_converts_linear_layers_to_mxfp8(section: str, option: str | None, said_of: str) -> None:
    text = TITAN_TOML.replace('flavor = "8B"', 'flavor = "8B"\n    converters = ["quantize.linear.mx"]')
    found = read("llama3_8b.toml", f"{text.rstrip()}\n    [quantize.linear.mx]\n    {section}\n")
    assert found.options.get("fp8") == option
    assert said_of in said(found, "not_modelled")
    assert "mx" not in said(found, "ignored")


@pytest.mark.parametrize(
    ("checkpointing", "components", "options", "said_of"),
    [
        ("none", '["model"]', {"compile": "layer"}, ""),
        ("full", '["model", "loss"]', {"compile": "layer"}, ""),
        ("selective", '["model", "loss"]', {"compile": "layer"}, ""),
        ("none", '["loss"]', {}, "torch.compile of the loss"),
    ],
)
def test_torchtitan_compiles_each_layer(
    checkpointing: str, components: str, options: dict[str, str], said_of: str
) -> None:
    text = TITAN_TOML.replace('"selective"', f'"{checkpointing}"')
    found = read("llama3_8b.toml", text + f"    components = {components}\n")
    assert {name: value for name, value in found.options.items() if name == "compile"} == options
    assert said_of in said(found, "not_modelled")


def test_torchtitans_memory_budget_is_the_compilers() -> None:
    compiled = TITAN_TOML + '    components = ["model"]\n'
    for words, budget in (('mode = "memory_budget"\n    memory_budget = 0.3', 0.3), ('mode = "memory_budget"', 0.5)):
        found = read("llama3_8b.toml", compiled.replace('mode = "selective"', words))
        assert found.options["memory_budget"] == budget
        assert (found.options["activation_checkpointing"], found.options["compile"]) == ("none", "layer")
        assert "budget" not in said(found, "not_modelled")


def test_torchtitan_functions_are_read() -> None:
    text = dedent(TITAN_PYTHON)
    found = from_texts({"config_registry.py:llama3_8b": text})
    expected = {
        "model": "meta-llama/Llama-3.1-8B",
        "seq_len": 8192,
        "micro_batch_size": 1,
        "precision": "bf16",
        "strategy": "zero3",
        "activation_checkpointing": "selective",
    }
    assert found.options.items() >= expected.items()
    assert "tensor_parallel_degree: 8" in said(found, "not_modelled")
    assert found.options["framework"] == "torchtitan" and "loss" not in found.options
    full = from_texts({"config_registry.py:llama3_70b": text})
    assert (full.options["activation_checkpointing"], full.options["seq_len"]) == ("full", 4096)
    with pytest.raises(UsageError, match="which configuration function") as refused:
        from_texts({"config_registry.py": text})
    assert "llama3_70b, llama3_8b" in refused.value.hint


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("sft.yaml", "{model_name_or_path: a, dataset_name: a, packing: true, packing_strategy: wrapped}", {"packing": "wrapped"}),
        ("sft.yaml", "{model_name_or_path: a, dataset_name: a, padding_free: true, max_length: null}", {"padding_free": True}),
        ("axolotl.yaml", "{base_model: a, batch_flattening: true, attn_implementation: flash_attention_2}", {"padding_free": True}),
        ("axolotl.yaml", "{base_model: a, sample_packing: true, batch_flattening: auto}", {"packing": "bfd"}),
        ("lf.yaml", "{model_name_or_path: a, cutoff_len: 9, packing: true}", {"packing": "wrapped"}),
        ("lf.yaml", "{model_name_or_path: a, cutoff_len: 9, packing: true, neat_packing: true, flash_attn: fa2}", {"packing": "bfd"}),
        ("lf.yaml", "{model_name_or_path: a, cutoff_len: 9, packing: false}", {}),
    ],
)  # fmt: skip
def test_packed_and_padding_free_batches(name: str, text: str, options: dict[str, object]) -> None:
    found = read(name, text)
    assert {k: v for k, v in found.options.items() if k in ("packing", "padding_free")} == options
    assert "pack" not in said(found, "not_modelled")


@pytest.mark.parametrize(
    "text",
    [
        "{base_model: a, sample_packing: true, micro_batch_size: 2}",
        "{model_name_or_path: a, cutoff_len: 9, neat_packing: true}",
    ],
)
def test_packing_that_is_not_modelled_exactly_is_reported(text: str) -> None:
    assert "packing without flash attention" in said(read("a.yaml", text), "not_modelled")


def test_arguments_in_a_python_script() -> None:
    found = read(
        "train.py",
        """
        args = SFTConfig(output_dir="x", per_device_train_batch_size=4, max_length=2048, bf16=True,
                         gradient_checkpointing=False, packing=flags.packing())
        model = AutoModelForCausalLM.from_pretrained("gpt2", dtype=torch.bfloat16)
        """,
    )
    expected = {"micro_batch_size": 4, "seq_len": 2048, "activation_checkpointing": "none", "precision": "bf16"}
    assert found.options.items() >= expected.items()
    assert "arguments that the code computes: packing" in said(found, "not_modelled")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "{", "a.json cannot be parsed: "),
        ("a.yaml", "- 1", "a.yaml has no keys and values"),
        ("a.yaml", "colour: red", "a.yaml is of no known format"),
        ("a.py", "x = (", "a.py is not Python"),
        ("a.py", "x = 1", "no TrainingArguments"),
        ("a.sh", "echo hello", "no command that launches a training"),
        ("a.yaml", "{base_model: m, micro_batch_size: many}", "micro_batch_size is many, not a whole number"),
        ("a.yaml", "a: &a [*a", "a.yaml cannot be parsed"),
    ],
)
def test_unreadable_files_are_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refused:
        from_texts({name: text})
    assert refused.value.hint


def test_a_file_that_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        from_paths([tmp_path / "none.yaml"])
    with pytest.raises(UsageError, match="no configuration in"):
        from_paths([tmp_path])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("dpo.yaml", "model_name_or_path: gpt2\nmax_length: 512\nbeta: 0.2\nprecompute_ref_log_probs: true\n"),
        ("run.sh", "trl dpo --model_name_or_path gpt2 --max_length 512 --precompute_ref_log_probs true\n"),
        ("run.sh", "torchrun --nproc-per-node 4 -m trl.scripts.dpo --model_name_or_path gpt2 --precompute_ref_log_probs True\n"),
        ("train.py", "from trl import DPOConfig\narguments = DPOConfig(precompute_ref_log_probs=True, max_length=512)\n"),
    ],
)  # fmt: skip
def test_the_task_of_trl_is_read(name: str, text: str) -> None:
    found = from_texts({name: text})
    assert (found.options["framework"], found.options["task"]) == ("trl", "dpo")
    assert found.options["precompute_ref_log_probs"] is True
    assert "preference" not in said(found, "not_modelled")


DPO = "model_name_or_path: gpt2\nbeta: 0.2\nmax_length: 512\n"
BY_ACCELERATE = (
    "distributed_type: FSDP\nnum_processes: 4\nfsdp_config: {fsdp_version: 2, fsdp_cpu_ram_efficient_loading: "
)


@pytest.mark.parametrize(
    ("texts", "stops"),
    [
        ({"dpo.yaml": DPO, "fsdp.yaml": BY_ACCELERATE + "false}\n"}, True),
        ({"dpo.yaml": DPO, "fsdp.yaml": BY_ACCELERATE + "true}\n"}, False),
        ({"dpo.yaml": DPO, "fsdp.yaml": BY_ACCELERATE + "null}\n"}, False),
        ({"dpo.yaml": DPO + "use_peft: true\n", "fsdp.yaml": BY_ACCELERATE + "false}\n"}, False),
        ({"dpo.yaml": DPO + "fsdp: true\nfsdp_config: {version: 2}\n"}, True),
        ({"sft.yaml": "model_name_or_path: gpt2\nmax_length: 512\npacking: true\n", "fsdp.yaml": BY_ACCELERATE + "false}\n"}, False),
    ],
)  # fmt: skip
def test_a_reference_model_that_trl_spreads_over_gpus_is_noted(texts: dict[str, str], stops: bool) -> None:
    assert ("tensors are on two devices" in said(from_texts(texts), "not_modelled")) is stops


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("kto.yaml", "model_name_or_path: gpt2\nmax_length: 512\nbeta: 0.2\ndesirable_weight: 1.0\n"),
        ("train.py", "from trl import KTOConfig\narguments = KTOConfig(max_length=512)\n"),
    ],
)
def test_kto_is_read(name: str, text: str) -> None:
    assert from_texts({name: text}).options["task"] == "kto"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("reward.yaml", "model_name_or_path: gpt2\nmax_length: 512\ncenter_rewards_coefficient: 0.01\n"),
        ("run.sh", "trl reward --model_name_or_path gpt2 --use_peft --lora_task_type SEQ_CLS\n"),
        ("train.py", "from trl import RewardConfig\narguments = RewardConfig(max_length=512)\n"),
    ],
)
def test_a_reward_model_is_read(name: str, text: str) -> None:
    found = from_texts({name: text})
    assert found.options["task"] == "reward"
    assert not {"lora_task_type", "center_rewards_coefficient"} & set(said(found, "not_modelled").split())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sft.yaml", "model_name_or_path: gpt2\nmax_length: 512\nrouter_aux_loss_coef: 0.0\n"),
        ("run.sh", "trl dpo --model_name_or_path gpt2 --router_aux_loss_coef 0.0\n"),
        ("train.py", "from trl import SFTConfig\narguments = SFTConfig(router_aux_loss_coef=0.0)\n"),
    ],
)
def test_the_weight_of_the_routers_loss_is_read(name: str, text: str) -> None:
    found = from_texts({name: text})
    assert (found.options["framework"], float(found.options["router_aux_loss_coef"])) == ("trl", 0.0)


@pytest.mark.parametrize(
    "text",
    [
        "{model_name_or_path: a, cutoff_len: 9, moe_aux_loss_coef: 0.01}",
        "{base_model: a, model_config: {output_router_logits: true}}",
    ],
)
def test_a_routers_loss_of_the_model_itself_is_not_modelled(text: str) -> None:
    assert "router" in said(read("a.yaml", text), "not_modelled")


@pytest.mark.parametrize("stage", ["dpo", "kto"])
def test_a_stage_of_llamafactory_is_a_task(stage: str) -> None:
    text = "{model_name_or_path: a, finetuning_type: lora, pref_beta: 0.1, ref_model: other, enable_liger_kernel: true, stage: "
    found = read("lf.yaml", text + stage + "}")
    assert (found.options["framework"], found.options["task"]) == ("llamafactory", stage)
    assert {"ref_model", "enable_liger_kernel"} <= set(re.findall(r"\w+", said(found, "not_modelled")))
    assert "pref_beta" not in said(found, "ignored")


@pytest.mark.parametrize("keys", ["stage: rm", "stage: ppo", "stage: dpo, pref_loss: simpo"])
def test_other_stages_of_llamafactory_are_refused(keys: str) -> None:
    found = read("lf.yaml", f"{{model_name_or_path: a, finetuning_type: lora, {keys}}}")
    with pytest.raises(UsageError, match="pref_loss: simpo" if "pref_loss" in keys else keys):
        complete(found, {})


def test_a_task_that_is_not_modelled_is_reported() -> None:
    found = from_texts({"run.sh": "trl rloo --model_name_or_path gpt2 --max_length 512\n"})
    assert "task" not in found.options
    assert "trl rloo" in said(found, "not_modelled")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("grpo.yaml", "model_name_or_path: gpt2\nnum_generations: 4\nmax_completion_length: 256\n"
            "beta: 0.04\nuse_vllm: true\nvllm_mode: colocate\n"),
        ("run.sh", "trl grpo --model_name_or_path gpt2 --num_generations 4 --max_completion_length 256 --beta 0.04 --use_vllm\n"),
        ("train.py", "from trl import GRPOConfig\n"
            "a = GRPOConfig(num_generations=4, max_completion_length=256, beta=0.04, use_vllm=True)\n"),
    ],
)  # fmt: skip
def test_grpo_is_read(name: str, text: str) -> None:
    found = from_texts({name: text})
    assert {k: str(found.options[k]) for k in ("task", "num_generations", "max_completion_length", "beta", "use_vllm")} == {
        "task": "grpo", "num_generations": "4", "max_completion_length": "256", "beta": "0.04", "use_vllm": "True",
    }  # fmt: skip
    assert "prompts of 512 tokens" in said(found, "assumed")


def test_unused_settings_of_vllm_are_left_aside() -> None:
    text = "model_name_or_path: gpt2\nnum_generations: 4\nvllm_mode: server\nvllm_gpu_memory_utilization: 0.5\n"
    assert "vllm_mode" not in from_texts({"grpo.yaml": text}).options
    assert "vllm_gpu_memory_utilization" not in from_texts({"grpo.yaml": text + "use_vllm: true\n"}).options


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (
            "{model_name_or_path: Qwen/Qwen2.5-VL-7B-Instruct, finetuning_type: lora, image_max_pixels: 262144}",
            "512x512",
        ),
        ("{base_model: Qwen/Qwen2.5-VL-7B-Instruct, micro_batch_size: 1, image_size: [640, 480]}", "640x480"),
        ("{base_model: Qwen/Qwen2.5-VL-7B-Instruct, micro_batch_size: 1, image_size: 448}", "448x448"),
    ],
)
def test_the_size_of_images_is_read_and_their_number_asked_for(text: str, size: str) -> None:
    found = read("job.yaml", text)
    assert found.options["image_size"] == size
    assert "images_per_sample" in said(found, "assumed")


def test_checkpoints_of_fsdp2s_plugin_around_adapters_are_said_to_differ() -> None:
    text = "model_name_or_path: gpt2\ngradient_checkpointing: false\nfsdp: true\nfsdp_config: {activation_checkpointing: true}\n"
    assert "embedding's output" in said(read("sft.yaml", text + "use_peft: true\n"), "not_modelled")
    assert "embedding's output" not in said(read("sft.yaml", text), "not_modelled")


@pytest.mark.parametrize(
    ("version", "offloads", "is_said"), [(2, True, False), (1, None, True)], ids=["fsdp2", "fsdp1 refuses it"]
)
def test_accelerates_checkpoints_in_host_memory(version: int, offloads: bool | None, is_said: bool) -> None:
    found = read(
        "fsdp.yaml",
        f"""
        distributed_type: FSDP
        num_processes: 8
        fsdp_config:
          fsdp_version: {version}
          fsdp_activation_checkpointing: true
          fsdp_activation_checkpointing_offload: true
        """,
    )
    assert found.options["activation_checkpointing"] == "full" and found.options.get("activation_offload") == offloads
    assert ("accelerate refuses it" in said(found, "not_modelled")) == is_said


TASKS = ("rl: ipo", "stage: rm", "trl orpo")


@pytest.mark.parametrize(
    ("name", "text", "said_of"),
    [
        ("a.yaml", "base_model: gpt2\ntensor_parallel_size: 2\n", "tensor_parallel_size: 2"),
        ("a.yaml", "base_model: gpt2\ncontext_parallel_size: '2'\n", "context_parallel_size: 2"),
        ("a.yaml", "base_model: gpt2\nrl: ipo\n", "rl: ipo"),
        ("a.yaml", "distributed_type: FSDP\nparallelism_config: {parallelism_config_tp_size: 2}\n", "tp_size: 2"),
        ("ds.json", '{"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 4}}', "tensor_parallel: "),
        ("l.yaml", "model_name_or_path: gpt2\nstage: rm\nfinetuning_type: full\ncutoff_len: 64\n", "stage: rm"),
        ("t.sh", "torchrun -m torchtitan.train --parallelism.tensor_parallel_degree 2", "parallelism.tensor_parallel_degree: 2"),
        ("t.toml", "[model]\n[training]\nseq_len=64\n[parallelism]\npipeline_parallel_degree=2", "pipeline_parallel_degree: 2"),
        ("train.sh", "trl orpo --model_name_or_path gpt2", "trl orpo"),
    ],
)  # fmt: skip
def test_a_file_of_a_job_that_is_not_modelled_is_refused_as_the_option_is(name: str, text: str, said_of: str) -> None:
    with pytest.raises(UsageError, match=f"{re.escape(name)}: .*{re.escape(said_of)}.*is not modelled yet") as refused:
        complete(from_texts({name: text}), {"gpus": 8})
    possible = "--task has dpo, kto, reward and grpo, with --framework trl" if said_of in TASKS else "data parallelism"
    assert possible in (refused.value.hint or "")


def test_unused_parallelism_is_not_refused() -> None:
    plan = "tensor_parallel_dim: 1\ntensor_parallel_plan: {_component_: torchtune.models.llama3.base_llama_tp_plan}\n"
    model = "model: {_component_: torchtune.models.llama3_1.llama3_1_8b}\n"
    assert complete(from_texts({"tune.yaml": model + plan}), {"gpus": 8}).options["model"]
    axolotl = "base_model: gpt2\ntensor_parallel_size: 1\ncontext_parallel_size: 1\nrl:\n"
    assert complete(from_texts({"a.yaml": axolotl}), {"gpus": 8}).options["model"] == "gpt2"


def test_compiled_layers_of_torchtitan_with_some_checkpointed_are_refused_by_their_keys() -> None:
    text = "[model]\nname='llama3'\nflavor='8B'\n[training]\nseq_len=64\n"
    text += "[activation_checkpoint]\nmode='selective'\n[compile]\nenable=true\n"
    found = from_texts({"t.toml": text})
    with pytest.raises(
        UsageError, match=r"t.toml: compile.enable is not modelled with activation_checkpoint.mode selective"
    ):
        complete(found, {"gpus": 8})
    for given in ({"activation_checkpointing": "full"}, {"compile": "none"}):
        assert complete(found, {"gpus": 8, **given}).options["model"] == "meta-llama/Llama-3.1-8B"
    kept = complete(
        from_texts({"t.toml": text.replace("[compile]", "selective_ac_option='op'\n[compile]")}), {"gpus": 8}
    )
    assert (kept.options["activation_checkpointing"], kept.options["compile"]) == ("selective", "layer")


CHECKPOINTED = FSDP2.replace("{fsdp_version", "{fsdp_activation_checkpointing: true, fsdp_version")


@pytest.mark.parametrize(
    "files",
    [
        {"accelerate.yaml": CHECKPOINTED, "train.yaml": TRAINERS + "gradient_checkpointing: true"},
        {"accelerate.yaml": CHECKPOINTED, "train.yaml": TRAINERS + "use_peft: false"},
        {"axolotl.yaml": dedent(AXOLOTL.replace("fsdp_offload_params", "activation_checkpointing"))},
    ],
    ids=["Trainer", "TRL by default", "axolotl"],
)
def test_checkpointing_by_fsdp_and_the_trainer_is_refused_as_the_trainer_does(files: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="can't both be set to True"):
        from_texts(files)


def test_checkpointing_by_fsdp_stays_if_the_trainer_does_not_checkpoint() -> None:
    found = from_texts({"accelerate.yaml": CHECKPOINTED, "train.yaml": TRAINERS + "gradient_checkpointing: false"})
    assert found.options["activation_checkpointing"] == "full"


@pytest.mark.parametrize(
    ("named", "model"), [("LamaDecoderLayer", "meta-llama/Llama-3.1-8B"), ("LlamaDecoderLayer", "gpt2")]
)
def test_a_layer_class_that_the_model_lacks_is_refused(named: str, model: str, tmp_path: Path) -> None:
    section = f"{{fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_transformer_layer_cls_to_wrap: {named}}}"
    file = tmp_path / "fsdp.yaml"
    file.write_text(f"distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {section}\n")
    with pytest.raises(UsageError, match=f"no class {named}.*Could not find") as caught:
        estimate(model=model, gpu="H100-80GB", config_file=file)
    assert ("LlamaDecoderLayer" if "Llama" in model else "GPT2Block") in str(caught.value.hint)


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("val_set_size: 0.05\nevals_per_epoch: 4\neval_batch_size: 16", ("steps", 16)),
        ("val_set_size: 1\neval_strategy: epoch", ("epoch", 2)),
        ("test_datasets: [{path: a/b}]\neval_steps: 10", ("steps", 2)),
        ("val_set_size: 0\nevals_per_epoch: 4\neval_batch_size: 16", (None, None)),
        ("val_set_size: 0.05\neval_batch_size: 16", (None, None)),
    ],
)
def test_axolotl_evaluates_a_set_at_the_times_that_the_file_names(
    text: str, options: tuple[str | None, int | None]
) -> None:
    found = read("axolotl.yaml", dedent(AXOLOTL) + text)
    assert (found.options.get("eval_strategy"), found.options.get("per_device_eval_batch_size")) == options
    assert "eval" not in said(found, "ignored")


def test_a_quantized_base_of_trl_is_an_assumption() -> None:
    found = read("sft.yaml", TRAINERS + "use_peft: true\nload_in_4bit: true\n")
    assert "adapters on the quantized base in bf16" in said(found, "assumed")
    assert "quantized base" not in said(found, "not_modelled")


@pytest.mark.parametrize(
    ("name", "text", "unknown"),
    [
        ("fsdp.yaml", FSDP2 + "fsdp_ofload_params: false\ntpu_env: []\n", "fsdp_ofload_params (did you mean fsdp_offload_params?)"),
        ("train.yaml", TRAINERS + "lora_enable: true\nlogging_steps: 5\n", "lora_enable"),
        ("axolotl.yaml", dedent(AXOLOTL) + "wandb_projct: x\n", "wandb_projct (did you mean wandb_project?)"),
        (
            "ds.json",
            '{"train_micro_batch_size_per_gpu": 1, "steps_per_prnt": 5, "wall_clock_breakdown": false}',
            "steps_per_prnt (did you mean steps_per_print?)",
        ),
    ],
)  # fmt: skip
def test_unknown_keys_are_not_among_those_without_effect(name: str, text: str, unknown: str) -> None:
    found = read(name, text)
    assert said(found, "unknown") == unknown
    assert unknown.split(" ")[0] not in said(found, "ignored").split()


def test_arguments_of_trls_grpo_script_are_known() -> None:
    found = read("grpo.yaml", TRAINERS + "num_generations: 8\nreward_funcs: [think_format_reward]\n")
    assert said(found, "unknown") == ""


def test_checkpointing_that_llamafactory_switches_off_is_no_assumption() -> None:
    text = "{finetuning_type: full, cutoff_len: 9, disable_gradient_checkpointing: true}"
    found = read("lf.yaml", text)
    assert found.options["activation_checkpointing"] == "none"
    assert "gradient checkpointing" not in said(found, "assumed")


def test_axolotls_former_names_of_keys_are_known() -> None:
    former = {"model_type": "LlamaForCausalLM", "model_kwargs": "{}", "model_config": "{}", "model_revision": "main"}
    found = read("axolotl.yaml", dedent(AXOLOTL) + "".join(f"{key}: {value}\n" for key, value in former.items()))
    assert said(found, "unknown") == ""
    assert set(former) <= set(said(found, "ignored").replace(",", " ").split())


def test_short_options_of_accelerates_launcher_are_known() -> None:
    found = from_texts(
        {"run.sh": "accelerate launch -q --num_processes 4 -m trl.scripts.dpo --model_name_or_path gpt2 --bf16"}
    )
    assert said(found, "unknown") == "" and (found.options["gpus"], found.options["task"]) == (4, "dpo")


def test_a_check_names_unknown_keys(tmp_path: Path) -> None:
    file = tmp_path / "train.yaml"
    file.write_text(TRAINERS + "lora_enable: true\n")
    found = check_result(estimate(model="gpt2", gpu="H100-80GB", strategy="ddp", config_file=file))
    assert "unknown keys: lora_enable" in found["line"] and found["unknown"] == ["lora_enable"]


def test_known_keys_are_those_of_the_libraries() -> None:
    assert {field.name for field in dataclasses.fields(TrainingArguments)} <= known_keys("Trainer arguments")
    actions = launch_command_parser()._actions
    assert {action.dest for action in actions} <= known_keys("accelerate")
    options = {option.lstrip("-").replace("-", "_") for action in actions for option in action.option_strings}
    assert options <= known_keys("accelerate command")


class Asked(dict[str, Any]):
    """A configuration that notes the keys that its reader asks for."""

    def __init__(self, keys: dict[str, Any]) -> None:
        super().__init__(keys)
        self.asked: set[str] = set()

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def keys(self) -> Any:
        return self

    def __deepcopy__(self, memo: object) -> Asked:
        return self


def test_known_keys_of_deepspeed_are_those_that_it_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    config = pytest.importorskip("deepspeed.runtime.config")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    keys = Asked({"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1})
    config.DeepSpeedConfig(keys)
    assert {"optimizer", "zero_optimization", "steps_per_print"} <= keys.asked <= known_keys("DeepSpeed")


@pytest.mark.parametrize(
    ("keys", "frozen"),
    [
        ("finetuning_type: full\nfreeze_vision_tower: true\nfreeze_multi_modal_projector: true", ("visual",)),
        ("finetuning_type: full", ("visual",)),
        ("finetuning_type: full\nfreeze_vision_tower: false\nfreeze_multi_modal_projector: false", None),
        ("finetuning_type: lora\nfreeze_vision_tower: true", None),
    ],
)
def test_llamafactory_freezes_the_tower_of_a_whole_model(keys: str, frozen: tuple[str, ...] | None) -> None:
    found = read("l.yaml", f"model_name_or_path: Qwen/Qwen2.5-VL-7B-Instruct\ncutoff_len: 64\n{keys}\n")
    assert found.options.get("freeze") == frozen
    assert "with freeze" not in said(found, "not_modelled")  # adapters already freeze the base


@pytest.mark.parametrize(
    ("model", "keys", "adapters"),
    [
        ("Qwen/Qwen2.5-VL-3B-Instruct", "lora_target: all", {"language_model"}),
        ("Qwen/Qwen2.5-VL-3B-Instruct", "freeze_multi_modal_projector: false", {"language_model"}),
        ("Qwen/Qwen2.5-VL-3B-Instruct", "freeze_vision_tower: false", {"language_model", "blocks"}),
        ("Qwen/Qwen3-VL-2B-Instruct", "freeze_vision_tower: false\nfreeze_multi_modal_projector: false",
         {"language_model", "blocks", "merger", "deepstack_merger_list"}),
        ("llava-hf/llava-1.5-7b-hf", "lora_target: q_proj,v_proj", {"language_model"}),
        ("llava-hf/llava-1.5-7b-hf", "lora_target: q_proj,v_proj\nfreeze_vision_tower: false\nfreeze_language_model: true",
         {"vision_tower"}),
    ],
)  # fmt: skip
def test_llamafactory_makes_adapters_only_in_parts_that_it_trains(model: str, keys: str, adapters: set[str]) -> None:
    """As LLaMA-Factory's own find_all_linear_modules and patch_target_modules choose the modules."""
    found = read("l.yaml", f"model_name_or_path: {model}\ncutoff_len: 64\nfinetuning_type: lora\n{keys}\n")
    config = json.loads(found.options["peft_config"])
    profile = catalog.profile(catalog.find(model))  # type: ignore[arg-type]
    layers = [f"{stack.path}.0.{p.name}" for stack in profile.stacks for p in stack.units[0].parameters]
    names = [*layers, *(parameter.name for parameter in profile.root.parameters)]
    linear = {name.removesuffix(".weight") for name in names if re.search(r"(proj|qkv|fc\d|mlp\.\d)\.weight$", name)}
    targets = config["target_modules"]
    chosen = linear if targets == "all-linear" else {name for name in linear if name.endswith(tuple(targets))}
    chosen = {name for name in chosen if not re.fullmatch(config["exclude_modules"], name)}
    assert {part for name in chosen for part in adapters if f"{part}." in name} == adapters
    assert all(any(f"{part}." in name for part in adapters) for name in chosen)
    assert not said(found, "not_modelled")


def test_llamafactory_with_an_unknown_multimodal_model_says_that_the_tower_is_counted() -> None:
    found = read(
        "l.yaml", "model_name_or_path: ./my-vlm\ncutoff_len: 64\nfinetuning_type: lora\nfreeze_vision_tower: true\n"
    )
    assert "makes no adapters in the vision tower" in said(found, "not_modelled")


@pytest.mark.parametrize(("given", "is_assumed"), [({}, True), ({"gpus": 16}, False)])
def test_an_assumption_about_an_option_that_is_given_is_not_reported(
    given: dict[str, Any], *, is_assumed: bool
) -> None:
    text = '{"train_batch_size": 128, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}'
    (reading,) = complete(read("ds.json", text), given).readings
    assert any("16 GPUs" in sentence for sentence in reading.assumed) is is_assumed


@pytest.mark.parametrize(
    ("sharding", "backend", "strategy", "note"),
    [
        ("NO_SHARD", "ddp", "ddp", "the estimate is of DDP"),
        ("_HYBRID_SHARD_ZERO2", "fsdp1", "hsdp", None),
        ("HALF_SHARD", "fsdp1", "zero3", "the estimate assumes full sharding"),
    ],
)
def test_a_script_with_fsdp1_has_the_strategy_of_its_sharding(
    sharding: str, backend: str, strategy: str, note: str | None
) -> None:
    text = f'MODEL = "gpt2"\nFullyShardedDataParallel(x, sharding_strategy=ShardingStrategy.{sharding})'
    found = read("train.py", text)
    assert (found.options["backend"], found.options["strategy"]) == (backend, strategy)
    assert (found.options.get("reshard_after_forward") == "false") == (sharding == "_HYBRID_SHARD_ZERO2")
    assert note in said(found, "not_modelled") if note else not said(found, "not_modelled")
