"""Training loops that accelerate prepares, and scripts whose arguments come from the command line."""

from __future__ import annotations

from textwrap import dedent

import pytest

from fsdp_advisor.configs import from_texts
from fsdp_advisor.errors import UsageError

LOOP = """
    parser = argparse.ArgumentParser()
    parser.add_argument("--model_name", "-m", default="gpt2")
    parser.add_argument("--batch-size", type=int, default=4)
    args = parser.parse_args()
    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=use_cpu())
    model = AutoModelForCausalLM.from_pretrained(args.model_name, dtype=torch.float32)
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    evaluation = DataLoader(test, batch_size=64)
    batches = DataLoader(train, batch_size=args.batch_size, shuffle=True)
    tokens = tokenizer(texts, truncation=True, max_length=256)
"""
FSDP = "{compute_environment: LOCAL_MACHINE, distributed_type: FSDP, fsdp_config: {fsdp_version: 2}, num_processes: 4}"


def test_a_loop_with_accelerate_is_read() -> None:
    found = from_texts({"train.py": dedent(LOOP)})
    expected = {
        "framework": "accelerate",
        "model": "gpt2",
        "micro_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "seq_len": 256,
        "optim": "sgd",
        "activation_checkpointing": "full",
        "precision": "bf16-mixed",
        "strategy": "ddp",
    }
    assert found.options.items() >= expected.items()
    (reading,) = found.readings
    assert any("which a command line may change" in note for note in reading.assumed)
    assert reading.not_modelled == ("arguments of Accelerator that the code computes: cpu",)


def test_a_file_of_accelerate_shards_the_loop() -> None:
    found = from_texts({"fsdp.yaml": FSDP, "train.py": dedent(LOOP)})
    assert (found.options["strategy"], found.options["backend"], found.options["gpus"]) == ("zero3", "fsdp2", 4)


def test_a_script_that_takes_its_arguments_from_the_command_line_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="takes its arguments from the command line") as refused:
        from_texts({"train.py": "parser = HfArgumentParser((ModelArguments, TrainingArguments))"})
    assert "the script that launches it" in refused.value.hint
