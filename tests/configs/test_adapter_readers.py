"""Adapters and quantized bases in the files of every consumer."""

from __future__ import annotations

import json
from textwrap import dedent
from typing import Any

import pytest

from fsdp_advisor.configs import from_texts
from fsdp_advisor.configs.adapters import METHODS
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.parsing import make_request

LORA = {"peft_type": "LORA", "r": 8}
QUERY_AND_VALUE = {**LORA, "target_modules": ["q_proj", "v_proj"]}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16"}


def adapted(name: str, text: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """PEFT's and bitsandbytes' keywords of the job in a file, and the dtype of its weights."""
    found = from_texts({name: dedent(text)})
    request = make_request({"model": "gpt2", **found.options})
    adaptation = adaptation_of(request)
    return dict(adaptation.peft), dict(adaptation.quantization), request.dtype


@pytest.mark.parametrize(
    ("name", "text", "peft", "dtype"),
    [
        (
            "trl.yaml",
            "{use_peft: true, lora_r: 8, lora_target_modules: [q_proj, v_proj], dtype: bfloat16, output_dir: out}",
            {**QUERY_AND_VALUE, "lora_dropout": 0.05},
            "bfloat16",
        ),
        ("trl.yaml", "{use_peft: false, lora_r: 8, output_dir: out}", {}, "auto"),
        (
            "run.sh",
            "trl sft --model_name_or_path gpt2 --use_peft --lora_r 8 --lora_target_modules v_proj q_proj --lora_dropout 0",
            QUERY_AND_VALUE,
            "auto",
        ),
        (
            "axolotl.yaml",
            "{base_model: gpt2, adapter: lora, lora_r: 8, lora_target_modules: [q_proj, v_proj], lora_modules_to_save: [lm_head], "
            "peft_use_dora: true, bf16: true}",
            {**QUERY_AND_VALUE, "modules_to_save": ["lm_head"], "use_dora": True},
            "bfloat16",
        ),
        (
            "axolotl.yaml",
            "{base_model: gpt2, adapter: lora, lora_r: 8, lora_target_modules: 'layers.*q_proj', bf16: true}",
            {**LORA, "target_modules": "layers.*q_proj", "lora_dropout": 0.0},
            "bfloat16",
        ),
        (
            "axolotl.yaml",
            "{base_model: gpt2, adapter: lora, lora_r: 8, lora_target_linear: true, peft_layers_to_transform: [0, 1], bf16: false, "
            "fp16: false}",
            {**LORA, "target_modules": "all-linear", "layers_to_transform": [0, 1], "lora_dropout": 0.0},
            "auto",
        ),
        (
            "factory.yaml",
            "{finetuning_type: lora, lora_target: 'q_proj,v_proj', additional_target: 'embed_tokens,lm_head', bf16: true}",
            {**QUERY_AND_VALUE, "modules_to_save": ["embed_tokens", "lm_head"]},
            "bfloat16",
        ),
        ("factory.yaml", "{template: llama3, bf16: true}", {**LORA, "target_modules": "all-linear"}, "bfloat16"),
        ("factory.yaml", "{finetuning_type: full, lora_rank: 4}", {}, "auto"),
        (
            "tune.yaml",
            "{model: {_component_: torchtune.models.llama3.lora_llama3_8b, lora_attn_modules: [q_proj, output_proj], "
            "apply_lora_to_mlp: true, lora_rank: 8}}",
            {**LORA, "target_modules": ["down_proj", "gate_proj", "o_proj", "q_proj", "up_proj"]},
            "auto",
        ),
        (
            "train.py",
            """
            model = AutoModelForCausalLM.from_pretrained("gpt2", dtype=torch.bfloat16)
            model = get_peft_model(model, LoraConfig(task_type=TaskType.CAUSAL_LM, target_modules=["q_proj", "v_proj"]))
            arguments = TrainingArguments(output_dir="out", bf16=True)
            """,
            QUERY_AND_VALUE,
            "bfloat16",
        ),
        (
            "train.py",
            """
            model = AutoModelForCausalLM.from_pretrained("gpt2")
            SFTTrainer(model=model, args=SFTConfig(bf16=True), peft_config=LoraConfig(target_modules=["q_proj", "v_proj"]))
            """,
            QUERY_AND_VALUE,
            "bfloat16",  # transformers loads the checkpoint's dtype
        ),
        (
            "train.py",
            "SFTTrainer(model='gpt2', args=SFTConfig(bf16=True), peft_config=LoraConfig(target_modules=['q_proj', 'v_proj']))",
            QUERY_AND_VALUE,
            "auto",  # TRL loads fp32
        ),
        (
            "trl.yaml",
            "{use_peft: true, lora_r: 8, bf16: true, dtype: auto, output_dir: out}",
            {**LORA, "lora_dropout": 0.05},
            "bfloat16",
        ),
        (
            "trl.yaml",
            "{use_peft: true, lora_r: 8, bf16: true, dtype: float32, output_dir: out}",
            {**LORA, "lora_dropout": 0.05},
            "float32",
        ),
        (
            "train.py",
            "peft.IA3Config(target_modules=['v_proj'], feedforward_modules=[]); TrainingArguments()",
            {"peft_type": "IA3", "target_modules": ["v_proj"], "feedforward_modules": []},
            "auto",
        ),
    ],
)
def test_the_adapter_of_a_file_is_peft_s_configuration(name: str, text: str, peft: dict[str, Any], dtype: str) -> None:
    assert adapted(name, text) == (peft, {}, dtype)


@pytest.mark.parametrize(
    ("name", "text", "quantization"),
    [
        (
            "trl.yaml",
            "{use_peft: true, load_in_4bit: true, use_bnb_nested_quant: true, output_dir: out}",
            {**NF4, "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": "uint8"},
        ),
        ("trl.yaml", "{use_peft: true, load_in_8bit: true, output_dir: out}", {"load_in_8bit": True}),
        (
            "axolotl.yaml",
            "{base_model: gpt2, adapter: qlora, lora_r: 8, load_in_4bit: true, bnb_config_kwargs: {bnb_4bit_quant_type: fp4}}",
            {
                **NF4,
                "bnb_4bit_quant_type": "fp4",
                "bnb_4bit_use_double_quant": True,
                "bnb_4bit_quant_storage": "bfloat16",
            },
        ),
        ("axolotl.yaml", "{base_model: gpt2, adapter: lora, lora_r: 8, load_in_8bit: true}", {"load_in_8bit": True}),
        (
            "factory.yaml",
            "{template: llama3, quantization_bit: 4, double_quantization: false, bf16: true}",
            {**NF4, "bnb_4bit_use_double_quant": False, "bnb_4bit_quant_storage": "bfloat16"},
        ),
        (
            "train.py",
            """
            BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_quant_storage=torch.bfloat16)
            SFTConfig(), LoraConfig(r=8)
            """,
            {**NF4, "bnb_4bit_use_double_quant": False, "bnb_4bit_quant_storage": "bfloat16"},
        ),
    ],
)
def test_the_quantized_base_of_a_file_is_bitsandbytes_configuration(
    name: str, text: str, quantization: dict[str, Any]
) -> None:
    assert adapted(name, text)[1] == quantization


def test_an_adapter_config_completes_another_file() -> None:
    adapter = json.dumps(
        {**LORA, "target_modules": ["v_proj"], "base_model_name_or_path": "/home/me/base", "bias": "none"}
    )
    files = {"args.yaml": "{per_device_train_batch_size: 2, bf16: true}", "adapter_config.json": adapter}
    found = from_texts(files)
    request = make_request({"model": "gpt2", **found.options})
    assert adaptation_of(request).peft == {**LORA, "target_modules": ["v_proj"], "bias": "none"}
    assert (request.micro_batch_size, request.precision) == (2, "bf16-mixed")


def test_keys_of_an_adapter_are_read_not_reported() -> None:
    keys = {"base_model": "gpt2", "adapter": "qlora", "lora_r": 8, "lora_alpha": 16, "load_in_4bit": True}
    (reading,) = from_texts({"axolotl.yaml": json.dumps({**keys, "lora_mlp_kernel": False})}).readings
    assert not reading.not_modelled and not reading.ignored
    assert {"adapter: qlora", "lora_r: 8", "load_in_4bit: True"} <= set(reading.read)


@pytest.mark.parametrize(
    ("keys", "kernels"),
    [
        ({}, "auto"),
        ({"lora_mlp_kernel": None}, "auto"),
        ({"lora_mlp_kernel": False}, "none"),
        ({"lora_o_kernel": True, "lora_mlp_kernel": True, "lora_qkv_kernel": False}, "mlp,o"),
        ({"trust_remote_code": True}, "none"),
    ],
)
def test_axolotls_kernels_are_those_of_the_file_or_axolotls_choice(keys: dict[str, Any], kernels: str) -> None:
    found = from_texts({"axolotl.yaml": json.dumps({"base_model": "gpt2", "adapter": "lora", "lora_r": 8, **keys})})
    assert make_request({"model": "gpt2", **found.options}).lora_kernels == kernels
    assert not [told for told in found.readings[0].not_modelled if "kernel" in told]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("peft_autocast_adapter_dtype: false", "adapters in the base's dtype; the estimate has them in fp32"),
        ("peft_autocast_adapter_dtype: true", None),
        ("fp32_norms: true", "norms in fp32, which are FSDP2 units of their own"),
        ("fp32_norms: false", None),
    ],
)
def test_axolotls_dtypes_of_adapters_and_norms_are_reported(text: str, message: str | None) -> None:
    lora = "base_model: gpt2, adapter: lora, lora_r: 8, lora_mlp_kernel: false"
    (reading,) = from_texts({"axolotl.yaml": f"{{{lora}, {text}}}"}).readings
    assert [message in note for note in reading.not_modelled if message] == [True] * bool(message)


def test_axolotls_other_keys_of_lora_are_pefts() -> None:
    lora = "base_model: gpt2, adapter: lora, lora_r: 8, bf16: true"
    more = "peft_layer_replication: [[0, 2], [1, 3]], peft_ensure_weight_tying: true, lora_alpha_pattern: {q_proj: 4}"
    peft, _, _ = adapted("axolotl.yaml", f"{{{lora}, {more}, peft_init_lora_weights: pissa}}")
    layers = {"layer_replication": [[0, 2], [1, 3]], "ensure_weight_tying": True}
    assert peft == {"peft_type": "LORA", "r": 8, "lora_dropout": 0.0, **layers}


def test_layers_that_llama_factory_freezes_are_not_modelled() -> None:
    (reading,) = from_texts({"a.yaml": "{finetuning_type: freeze, freeze_trainable_layers: 2}"}).readings
    assert {item.partition(":")[0] for item in reading.not_modelled} >= {"finetuning_type", "freeze_trainable_layers"}


@pytest.mark.parametrize(
    ("quantization", "prepared"), [("", True), (", load_in_4bit: true", False), (", load_in_8bit: true", False)]
)
def test_axolotl_keeps_bf16_around_a_quantized_base_and_fp32_in_adapters(quantization: str, prepared: bool) -> None:
    text = f"{{base_model: gpt2, adapter: lora, lora_r: 8, bf16: true{quantization}}}"
    found = adaptation_of(make_request({**from_texts({"axolotl.yaml": text}).options, "gpu": "A100"}))
    assert (found.prepared, found.fp32_adapters) == (prepared, not prepared)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("experts_implementation: scattermoe", "the estimate assumes grouped_mm"),
        ("use_scattermoe: true", "the estimate assumes transformers' grouped_mm"),
        ("adapter: lora, load_in_8bit: true, quantize_moe_experts: true", "the estimate assumes 16 bits"),
        (
            "adapter: qlora, load_in_4bit: true, quantize_moe_experts: true, lora_target_parameters: [mlp.experts.down_proj]",
            "the estimate assumes 16 bits",
        ),
        ("experts_implementation: eager", None),
    ],
)
def test_axolotls_experts_are_read_or_reported(text: str, message: str | None) -> None:
    found = from_texts({"axolotl.yaml": f"{{base_model: mistralai/Mixtral-8x7B-v0.1, bf16: true, {text}}}"})
    (reading,) = found.readings
    assert not reading.ignored and [message in note for note in reading.not_modelled if message] == [True] * bool(
        message
    )
    assert found.options.get("experts_implementation", "grouped_mm") == ("grouped_mm" if message else "eager")


def test_axolotls_packed_experts_are_read_and_written() -> None:
    text = (
        "{base_model: mistralai/Mixtral-8x7B-v0.1, bf16: true, adapter: qlora, lora_r: 8, lora_target_modules: [q_proj, v_proj], "
        "load_in_4bit: true, quantize_moe_experts: true}"
    )
    found = from_texts({"axolotl.yaml": text})
    assert found.options["quantize_moe_experts"] and not any(
        "expert" in note for note in found.readings[0].not_modelled
    )
    request = make_request({**found.options, "gpu": "A100-80GB", "strategy": "ddp"})
    assert adaptation_of(request).quantization["quantize_moe_experts"]


def test_a_script_that_keeps_adapters_in_the_bases_dtype_is_reported() -> None:
    text = """
    model = get_peft_model(AutoModelForCausalLM.from_pretrained("gpt2"), LoraConfig(r=8), autocast_adapter_dtype=False)
    arguments = TrainingArguments(output_dir="out", bf16=True)
    """
    (reading,) = from_texts({"train.py": dedent(text)}).readings
    assert [note for note in reading.not_modelled if "autocast_adapter_dtype=False" in note]


def test_every_method_of_peft_is_known() -> None:
    mapping = pytest.importorskip("peft.mapping")
    assert {kind.__name__: str(method.value) for method, kind in mapping.PEFT_TYPE_TO_CONFIG_MAPPING.items()} == METHODS


@pytest.mark.parametrize("config", METHODS)
def test_a_script_gets_the_adapters_of_any_method(config: str) -> None:
    text = f"get_peft_model(AutoModelForCausalLM.from_pretrained('gpt2'), {config}(target_modules=['c_attn']))"
    found = from_texts({"train.py": f"{text}\nTrainingArguments(output_dir='out', bf16=True)"})
    method = adaptation_of(make_request({"model": "gpt2", **found.options})).method
    assert (method, found.readings[0].not_modelled) == (METHODS[config], ())


@pytest.mark.parametrize(
    ("code", "reported"),
    [
        ("get_peft_model(model, NewConfig(r=8))", "get_peft_model(...)"),
        ("FastLanguageModel.get_peft_model(model, r=8)", "FastLanguageModel.get_peft_model(...)"),
        ("PeftModel.from_pretrained(model, 'adapter', is_trainable=True)", "PeftModel.from_pretrained(...)"),
        ("SFTTrainer(model='gpt2', peft_config=NewConfig(r=8))", "peft_config=NewConfig(r=8)"),
        ("SFTTrainer(model='gpt2', peft_config=None)", None),
        ("PeftModel.from_pretrained(model, 'adapter').merge_and_unload()", None),
        ("get_peft_model(model, LoraConfig(r=8))", None),
    ],
)
def test_a_script_with_adapters_of_an_unknown_configuration_is_reported(code: str, reported: str | None) -> None:
    found = from_texts({"train.py": f"{code}\nSFTConfig(output_dir='out')"})
    notes = [note for note in found.readings[0].not_modelled if "no configuration of a known PEFT method" in note]
    assert [note.partition(" (the code")[0] for note in notes] == [reported] * (reported is not None)
