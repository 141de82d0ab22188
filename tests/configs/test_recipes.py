"""Configuration files and Python scripts as users write them: what files say together, and what the consumers' defaults are."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from fsdp_advisor.configs import complete, from_texts
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.model import catalog


def read(**files: str) -> tuple[dict[str, Any], str]:
    """The options of files, and everything that the readings report. `a__yaml` is the file a.yaml."""
    found = from_texts({name.replace("__", "."): dedent(text) for name, text in files.items()})
    said = [item for reading in found.readings for item in (*reading.not_modelled, *reading.assumed)]
    return dict(found.options), "\n".join(said)


FSDP2 = """
    distributed_type: FSDP
    mixed_precision: {}
    num_processes: 8
    fsdp_config: {{fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_reshard_after_forward: true}}
"""


@pytest.mark.parametrize(
    ("launcher", "arguments", "precision"),
    [
        ("bf16", "", "bf16-mixed"),
        ("bf16", "--bf16 false", "bf16-mixed"),  # the Trainer begins with the launcher's
        ("bf16", "--fp16", "fp16-mixed"),
        ("'no'", "--bf16", "bf16-mixed"),
        ("'no'", "", "fp32"),
        ("fp16", "", "fp16-mixed"),
        ("'no'", "--dataset_name x --max_length 1024", "bf16-mixed"),  # TRL's default
        ("'no'", "--dataset_name x --max_length 1024 --bf16 false", "fp32"),
    ],
)
def test_the_trainer_s_mixed_precision_begins_with_the_launcher_s(
    launcher: str, arguments: str, precision: str
) -> None:
    command = f"accelerate launch --config_file a.yaml train.py --model_name_or_path gpt2 {arguments}"
    options, _ = read(a__yaml=FSDP2.format(launcher), run__sh=command)
    assert (options["precision"], options["strategy"], options["backend"]) == (precision, "zero3", "fsdp2")


@pytest.mark.parametrize(
    ("keys", "options", "reported"),
    [
        ("fsdp_version: 1", {"backward_prefetch": "none", "wrap": "none", "strategy": "zero3", "backend": "fsdp1"}, "one unit with all"),
        ("fsdp_version: 2", {"wrap": "none", "strategy": "zero3", "backend": "fsdp2"}, "full sharding, the default"),
        ("fsdp_backward_prefetch: BACKWARD_PRE, fsdp_sharding_strategy: SHARD_GRAD_OP, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            {"backward_prefetch": "pre", "strategy": "zero2", "wrap": "layer"}, ""),
        ("fsdp_version: 1, fsdp_reshard_after_forward: SHARD_GRAD_OP, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
            {"strategy": "zero3"}, "with FSDP1 it has no effect: full_shard decides"),
        ("fsdp_version: 2, fsdp_sharding_strategy: SHARD_GRAD_OP", {"strategy": "zero3"}, "FSDP2 follows reshard_after_forward instead"),
        ("fsdp_version: 2, fsdp_reshard_after_forward: FULL_SHARD", {"strategy": "zero3"}, "with FSDP2 it must be true or false"),
    ],
)  # fmt: skip
def test_defaults_of_accelerate_s_fsdp(keys: str, options: dict[str, Any], reported: str) -> None:
    found, said = read(a__yaml=f"{{distributed_type: FSDP, num_processes: 8, fsdp_config: {{{keys}}}}}")
    assert found.items() >= options.items() and reported in said


@pytest.mark.parametrize(
    ("keys", "options", "reported"),
    [
        ("fsdp: hybrid_shard_zero2", {"strategy": "zero3", "backend": "fsdp2"}, "hybrid_shard_zero2, which the Trainer refuses with FSDP2"),
        ("fsdp: [hybrid_shard, auto_wrap]", {"strategy": "zero3", "backend": "fsdp2"}, "hybrid_shard, which the Trainer refuses"),
        ("fsdp: shard_grad_op auto_wrap", {"strategy": "zero2", "backend": "fsdp2"}, ""),
        ("fsdp: shard_grad_op, fsdp_config: {reshard_after_forward: true}", {"strategy": "zero3"}, ""),
        ("fsdp: hybrid_shard, fsdp_config: {version: 1}", {"strategy": "zero3", "backward_prefetch": "none"}, "shards fully, as estimated"),
        ("fsdp: true", {"strategy": "zero3", "backend": "fsdp2"}, ""),
    ],
)  # fmt: skip
def test_words_of_the_trainer_s_fsdp(keys: str, options: dict[str, Any], reported: str) -> None:
    found, said = read(args__yaml=f"{{model_name_or_path: gpt2, bf16: true, {keys}}}")
    assert found.items() >= options.items() and reported in said
    assert bool(reported) is ("fsdp: " in said)
    make_request(found)


@pytest.mark.parametrize(
    ("version", "strategy", "reported"),
    [(2, "zero2", ""), (1, "zero3", "fsdp: shard_grad_op; with FSDP1 the Trainer shards fully")],
)
def test_words_of_axolotl_s_fsdp(version: int, strategy: str, reported: str) -> None:
    found, said = read(
        ax__yaml=f"{{base_model: gpt2, fsdp_version: {version}, fsdp: [shard_grad_op, auto_wrap], bf16: true}}"
    )
    assert found["strategy"] == strategy and reported in said


def test_the_trainer_s_fsdp_in_a_file_of_its_own() -> None:
    section = '{"fsdp_transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"], "version": 1, "backward_prefetch": "backward_pre"}'
    command = 'torchrun --nproc_per_node 8 train.py --bf16 --fsdp "full_shard auto_wrap" --fsdp_config fsdp.json'
    found, _ = read(run__sh=command, fsdp__json=section)
    assert (
        found.items() >= {"strategy": "zero3", "backend": "fsdp1", "backward_prefetch": "pre", "wrap": "layer"}.items()
    )


@pytest.mark.parametrize(
    "files",
    [
        {"a__yaml": "{distributed_type: DEEPSPEED, mixed_precision: bf16, num_processes: 4, deepspeed_config:"
            " {zero_stage: 0, offload_optimizer_device: cpu}}"},
        {"ds__json": '{"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 0}}'},
        {"ds__json": '{"bf16": {"enabled": true}, "train_micro_batch_size_per_gpu": 2}'},
        {"args__yaml": "{per_device_train_batch_size: 2, bf16: true, deepspeed: {zero_optimization: {stage: 0}}}"},
    ],
)  # fmt: skip
def test_stage_0_of_deepspeed_keeps_everything_on_each_rank(files: dict[str, str]) -> None:
    _, said = read(**files)
    options = complete(
        from_texts({n.replace("__", "."): t for n, t in files.items()}), {"model": "gpt2", "gpus": 4}
    ).options
    (plan,) = plans(make_request(options), seq_len=512)
    assert (plan.strategy, plan.backend, plan.offload, plan.precision) == ("ddp", "ddp", "none", "bf16-mixed")
    assert "ZeRO stage 0: the estimate is of DDP" in said


TITAN = """
    def llama3_8b():
        return Trainer.Config({}
            hf_assets_path="./assets/hf/Llama-3.1-8B", training=TrainingConfig(local_batch_size=1, seq_len=8192),
        )
"""


@pytest.mark.parametrize(
    ("arguments", "checkpointing", "loss"),
    [
        ("loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()),", "selective", "torchtitan"),
        ("loss=CrossEntropyLoss.Config(), activation_checkpoint=FullAC.Config(),", "full", "full"),
        ("loss=ChunkedLossWrapper.Config(), activation_checkpoint=None,", "none", "torchtitan"),
    ],
)
def test_arguments_of_a_torchtitan_function_set_loss_and_checkpointing(
    arguments: str, checkpointing: str, loss: str
) -> None:
    found, _ = read(registry__py=TITAN.format(arguments))
    (plan,) = plans(make_request({**found, "gpus": 8}), seq_len=8192)
    assert (plan.framework, plan.activation_checkpointing, plan.loss_code) == ("torchtitan", checkpointing, loss)
    assert (plan.reduce_bytes, plan.facts.splits_root_unit, plan.facts.clips_gradients) == (4, True, True)


@pytest.mark.parametrize(
    ("section", "framework", "checkpointing"),
    [
        ("", "torch", "every-2"),
        ('[activation_checkpoint]\nmode = "full"', "torchtitan", "full"),
        ('[activation_checkpoint]\nmode = "none"', "torchtitan", "none"),
        ('[activation_checkpoint]\nmode = "selective"\nselective_ac_option = "op"', "torchtitan", "selective"),
        (
            '[activation_checkpoint]\nmode = "full"\n[compile]\nenable = true\ncomponents = ["model"]',
            "torchtitan",
            "full",
        ),
    ],
)
def test_sections_of_a_torchtitan_file_set_framework_and_checkpointing(
    section: str, framework: str, checkpointing: str
) -> None:
    text = f'[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 8192\n{section}\n'
    found, said = read(train__toml=text)
    (plan,) = plans(make_request({**found, "gpus": 8}), seq_len=8192)
    assert (plan.framework, plan.activation_checkpointing, plan.loss_code) == (framework, checkpointing, "full")
    assert ("torchtitan 0.2's default" in said) is (not section)


def flavors_of_torchtitan() -> list[tuple[str, str]]:
    """The modules and flavors of the language models in torchtitan's own source."""
    found = find_spec("torchtitan")
    assert found is not None and found.submodule_search_locations is not None
    registries = Path(found.submodule_search_locations[0]).glob("models/*/__init__.py")
    return [
        (registry.parent.name, key.value)
        for registry in registries
        if registry.parent.name != "flux"
        for node in ast.walk(ast.parse(registry.read_text()))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("_configs")
        for key in (node.value.keys if isinstance(node.value, ast.Dict) else ())
        if isinstance(key, ast.Constant) and not key.value.startswith("debug")
    ]


def test_every_flavor_of_torchtitan_is_a_model_of_the_catalog() -> None:
    files = {
        (module, flavor): f"[model]\nname = '{module}'\nflavor = '{flavor}'\n[training]\nseq_len = 64\n"
        for module, flavor in flavors_of_torchtitan()
    }
    models = {named: read(train__toml=text)[0].get("model") for named, text in files.items()}
    assert {named: model for named, model in models.items() if catalog.find(str(model)) is None} == {}
    assert models["qwen3_5", "4B"] == "Qwen/Qwen3.5-4B" and models["llama3", "1B"] == "meta-llama/Llama-3.2-1B"


@pytest.mark.parametrize(
    ("module", "function", "model"),
    [
        ("qwen3", "qwen3_30b_a3b", "Qwen/Qwen3-30B-A3B"),
        ("qwen3_5", "qwen35_0_8b", "Qwen/Qwen3.5-0.8B"),
        ("deepseek_v3", "deepseek_v3_671b_float8", "deepseek-ai/DeepSeek-V3"),
        ("kimi_k2_7", "kimi_k2_5_debugmodel", None),
    ],
)
def test_functions_of_torchtitan_name_their_model(module: str, function: str, model: str | None) -> None:
    assert read(run__sh=f"NGPU=8 MODULE={module} CONFIG={function} ./run_train.sh")[0].get("model") == model


def test_what_torchtitan_compiles_is_estimated() -> None:
    text = '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nseq_len = 8192\n[activation_checkpoint]\nmode = "selective"\n'
    text += 'selective_ac_option = "op"\n'
    command = "CONFIG_FILE=train.toml NGPU=8 ./run_train.sh --compile.enable --compile.components model"
    found, said = read(train__toml=text, run__sh=command)
    (plan,) = plans(make_request(found), seq_len=8192)
    assert (plan.framework, plan.compile, plan.world_size) == ("torchtitan", "layer", 8)
    assert "the loss is compiled too" in said


def test_selective_checkpoints_in_pytorch_s_own_loop_are_estimated_without_compilation() -> None:
    text = dedent(TITAN.format("compile=CompileConfig(enable=True),"))
    found = complete(from_texts({"registry.py": text}), {"gpus": 1})
    (plan,) = plans(make_request(found.options), seq_len=8192)
    assert (plan.framework, plan.compile, plan.activation_checkpointing) == ("torch", "none", "selective")
    assert any("torch.compile with selective" in said for reading in found.readings for said in reading.not_modelled)


def test_torchtitan_on_one_gpu_is_estimated_as_pytorch_s_own_loop() -> None:
    found = from_texts({"registry.py": dedent(TITAN.format("activation_checkpoint=FullAC.Config(),"))})
    (plan,) = plans(make_request(complete(found, {"gpus": 1}).options), seq_len=8192)
    assert (plan.framework, plan.strategy) == ("torch", "ddp")


def test_the_arguments_of_a_script_are_those_of_the_trainer_and_its_model() -> None:
    found, said = read(
        train__py="""
        tokenizer_options: dict = {"max_length": 128, "bf16": False}
        common = dict(bf16=torch.cuda.is_bf16_supported(), gradient_checkpointing=True)
        model_id = "Qwen/Qwen2.5-7B"
        model = AutoModelForCausalLM.from_pretrained(model_id, attn_implementation="flash_attention_2", dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(model_id, dtype="float32")
        arguments = SFTConfig(max_length=2048, per_device_train_batch_size=options.batch, output_dir=args.out, **common)
        trainer = SFTTrainer(model=model, args=arguments)
    """
    )
    expected = {"model": "Qwen/Qwen2.5-7B", "seq_len": 2048, "attention": "flash_attention_2", "precision": "bf16"}
    assert found.items() >= {**expected, "activation_checkpointing": "full"}.items()
    assert "arguments that the code computes: per_device_train_batch_size, output_dir" in said


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("SFTTrainer(model='Qwen/Qwen3-0.6B', args=SFTConfig(model_init_kwargs={'dtype': 'bfloat16'}, packing=True),"
            " peft_config=LoraConfig(r=32, target_modules='all-linear'))",
            {"model": "Qwen/Qwen3-0.6B", "dtype": "bfloat16", "packing": "bfd", "lora_r": 32, "framework": "trl"}),
        ("m = AutoModelForCausalLM.from_pretrained('meta-llama/Llama-3.2-3B', quantization_config=BitsAndBytesConfig(load_in_4bit=True))\n"
            "a = TrainingArguments(per_device_train_batch_size=4, optim='paged_adamw_8bit', fp16=not torch.cuda.is_bf16_supported(),"
            " bf16=torch.cuda.is_bf16_supported())",
            {"model": "meta-llama/Llama-3.2-3B", "load_in_4bit": True, "optim": "paged_adamw_8bit", "precision": "bf16-mixed"}),
        ("options = {'per_device_train_batch_size': 2, 'fsdp': 'full_shard', 'learning_rate': lr}\n"
            "training_args = TrainingArguments('out', **options)", {"micro_batch_size": 2, "strategy": "zero3", "backend": "fsdp2"}),
    ],
)  # fmt: skip
def test_options_in_a_script_are_read(script: str, options: dict[str, Any]) -> None:
    assert read(train__py=script)[0].items() >= options.items()


def test_fsdp_of_accelerate_wins_over_what_a_recipe_leaves_open() -> None:
    recipe = "{stage: sft, finetuning_type: lora, cutoff_len: 1024, model_name_or_path: gpt2, bf16: true}"
    command = "accelerate launch --config_file fsdp.yaml src/train.py lf.yaml"
    found, _ = read(fsdp__yaml=FSDP2.format("bf16"), lf__yaml=recipe, run__sh=command)
    assert (
        found.items() >= {"strategy": "zero3", "backend": "fsdp2", "gpus": 8, "use_peft": True, "seq_len": 1024}.items()
    )
