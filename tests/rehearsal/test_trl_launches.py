"""TRL's own scripts train with exported configurations of an 8B model on 8 H100s. A small model stands in for it, with short texts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml
from matrix import with_all_cases
from transformers import LlamaConfig, LlamaForCausalLM

from fsdp_advisor.cli import main
from fsdp_advisor.rehearsal.rehearse import Settings, rehearse

pytestmark = pytest.mark.slow

OPTIONS = [
    "--model=meta-llama/Llama-3.1-8B", "--gpu=H100-80GB", "--gpus=8", "--framework=trl", "--strategy=zero3", "--backend=fsdp2",
    "--micro-batch-size=1", "--seq-len=2048", "--activation-checkpointing=full",
]  # fmt: skip
PAIR = {"prompt": "a b", "chosen": " c d", "rejected": " e f"}
PROMPT = {"prompt": [{"role": "user", "content": "a b"}]}


@pytest.fixture(scope="module")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.insert(0, str(Path(__file__).parent / "scripts"))
    from training import tokenizer

    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=1000)).save_pretrained(folder)
    words = tokenizer()
    words.chat_template = "{% for m in messages %}{{ m['role'] }} {{ m['content'] }} {% endfor %}"
    words.save_pretrained(folder)
    return folder


@with_all_cases
@pytest.mark.parametrize(
    ("task", "example", "changed"),
    [
        ("dpo", PAIR, {}),
        ("grpo", PROMPT, {"reward_funcs": ["think_format_reward"], "max_completion_length": 16}),
    ],
)
def test_exported_configurations_train_on_eight_ranks(
    task: str,
    example: dict[str, object],
    changed: dict[str, object],
    small_model: Path,
    rehearsal_python: Path,
    tmp_path: Path,
) -> None:
    exported, data = tmp_path / "trl.yaml", tmp_path / "data"
    assert main(["export", "trl", *OPTIONS, f"--task={task}", "-o", str(exported)]) == 0
    data.mkdir()
    (data / "train.jsonl").write_text("".join(f"{json.dumps(example)}\n" for _ in range(64)))
    settings = yaml.safe_load(exported.read_text()) | {
        "model_name_or_path": str(small_model),
        "dataset_name": str(data),
    }
    ended = {"max_steps": 2, "report_to": "none", "save_strategy": "no"}
    exported.write_text(yaml.safe_dump(settings | changed | ended))
    torchrun = [str(rehearsal_python.with_name("torchrun")), "--standalone", "--nproc-per-node", "8"]
    found = rehearse(
        [*torchrun, "-m", f"trl.scripts.{task}", "--config", str(exported)],
        Settings(gpu="H100-80GB", gpus=8, steps=2, quiet=True),
    )
    assert found.outcome == "completed" and len(found.ranks) == 8
