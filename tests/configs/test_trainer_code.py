"""What Python code does to its model beyond the Trainer's arguments."""

from __future__ import annotations

from textwrap import dedent

import pytest

from fsdp_advisor.configs import Configuration, from_texts
from fsdp_advisor.job.adaptation import adaptation_of
from fsdp_advisor.job.parsing import make_request


def script(code: str, arguments: str = "TrainingArguments('out', bf16=True)") -> Configuration:
    model = "model = AutoModelForCausalLM.from_pretrained('gpt2', quantization_config=bnb)"
    return from_texts({"train.py": f"{model}\n{dedent(code)}\n{arguments}"})


QUANTIZED = "BitsAndBytesConfig(load_in_4bit=True)\n"
PREPARED = "prepare_model_for_kbit_training"


@pytest.mark.parametrize(
    ("code", "policy"),
    [
        ("model.gradient_checkpointing_enable()", "full"),
        ("model.activation_checkpointing_enable(every_n_layers=2)", "every-2"),
        ("model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': True})", "reentrant"),
        (f"{QUANTIZED}{PREPARED}(model)", "reentrant"),
        (f"{QUANTIZED}model.gradient_checkpointing_enable()\n{PREPARED}(model)", "reentrant"),
        (f"{QUANTIZED}{PREPARED}(model, gradient_checkpointing_kwargs={{'use_reentrant': False}})", "full"),
        (f"{QUANTIZED}{PREPARED}(model, use_gradient_checkpointing=False)", None),
        (f"{PREPARED}(model)", None),
        ("if args.gradient_checkpointing:\n    model.gradient_checkpointing_enable()", None),
    ],
)
def test_checkpoints_that_the_code_switches_on_are_read(code: str, policy: str | None) -> None:
    found = script(code)
    assert found.options.get("activation_checkpointing") == policy
    assert any("because the code calls" in note for note in found.readings[0].assumed) == (policy is not None)


def test_checkpoints_of_the_arguments_replace_those_of_the_code() -> None:
    found = script(f"{QUANTIZED}{PREPARED}(model)", "TrainingArguments('out', bf16=True, gradient_checkpointing=True)")
    assert found.options["activation_checkpointing"] == "full"


def test_adapters_are_read_from_variables_and_what_is_computed_is_reported() -> None:
    found = script("alpha, rank = 16, 64\nLoraConfig(r=rank, lora_alpha=alpha, lora_dropout=dropout())")
    assert adaptation_of(make_request({"model": "gpt2", **found.options})).peft["r"] == 64
    assert "arguments of LoraConfig that the code computes: lora_dropout" in found.readings[0].not_modelled
    assert any(note.startswith("LoraConfig: ") for note in found.readings[0].read)


@pytest.mark.parametrize(
    ("code", "length"),
    [
        ("tokenizer(text, truncation=True, max_length=128)", 128),
        ("tokenizer(text, max_length=128)", None),
        ("tokenizer(a, truncation=True, max_length=512), tokenizer(b, truncation=True, max_length=64)", None),
    ],
)
def test_the_length_to_which_the_code_cuts_samples_is_assumed(code: str, length: int | None) -> None:
    assert script(code).options.get("seq_len") == length


def test_another_head_and_kept_logits_are_reported() -> None:
    code = "AutoModelForSequenceClassification.from_pretrained('roberta-large')\nTrainer(compute_metrics=metrics)"
    found = from_texts({"train.py": f"{code}\nTrainingArguments('out', eval_strategy='epoch')"})
    assert {note.partition(":")[0] for note in found.readings[0].not_modelled} == {
        "compute_metrics",
        "AutoModelForSequenceClassification",
    }


def test_a_script_of_unsloth_is_read_and_its_kernels_are_reported() -> None:
    code = """
    model, tokenizer = FastLanguageModel.from_pretrained(model_name="gpt2", max_seq_length=512, load_in_4bit=True)
    model = FastLanguageModel.get_peft_model(model, r=8, target_modules=["c_attn"], use_gradient_checkpointing="unsloth")
    SFTConfig(output_dir="out")
    """
    found = from_texts({"train.py": dedent(code)})
    adaptation = adaptation_of(make_request(found.options))
    assert (found.options["model"], found.options["seq_len"], adaptation.peft["r"]) == ("gpt2", 512, 8)
    assert adaptation.quantization["bnb_4bit_use_double_quant"] is True
    assert "Unsloth's kernels" in found.readings[0].not_modelled[0]


def test_arguments_of_the_loader_are_no_unknown_keys() -> None:
    text = (
        "MODEL = 'gpt2'\nMODEL_ARGUMENTS = {'dtype': 'bfloat16', 'device_map': {'': 'cpu'}}\nTrainingArguments('out')"
    )
    found = from_texts({"train.py": text})
    assert (found.options["model"], found.readings[0].unknown) == ("gpt2", ())


def test_defaults_of_the_scripts_arguments_are_assumed() -> None:
    code = """
    parser.add_argument("--batch-size", type=int, default=3)
    args = parser.parse_args()
    TrainingArguments("out", per_device_train_batch_size=args.batch_size)
    """
    found = from_texts({"train.py": dedent(code)})
    assert found.options["micro_batch_size"] == 3
    assert any("which a command line may change" in note for note in found.readings[0].assumed)


def test_a_trainer_of_trl_with_the_trainers_arguments_is_trls() -> None:
    code = """
    training = TrainingArguments("out", bf16=True, max_grad_norm=0.3)
    SFTTrainer("gpt2", args=training, max_seq_length=512, packing=True)
    """
    found = from_texts({"train.py": dedent(code)})
    expected = {
        "framework": "trl",
        "model": "gpt2",
        "seq_len": 512,
        "packing": "bfd",
        "activation_checkpointing": "none",
    }
    assert found.options.items() >= expected.items()
    assert not any("max_grad_norm" in note for note in found.readings[0].not_modelled)


def test_arguments_that_switch_clipping_off_are_reported() -> None:
    (reading,) = script("", "TrainingArguments('out', max_grad_norm=0)").readings
    assert any(note.startswith("max_grad_norm: 0 (no gradient clipping") for note in reading.not_modelled)


def test_a_dtype_given_by_its_name_is_read() -> None:
    code = "compute = getattr(torch, 'bfloat16')\nBitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=compute)"
    assert not any("bnb_4bit_compute_dtype" in note for note in script(code).readings[0].not_modelled)
