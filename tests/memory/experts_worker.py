"""Loads a small model with experts as it is saved: ``experts_worker.py FOLDER``. Prints the private memory that loading adds."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path

import torch
from checkpoint_worker import Host
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

LARGE = {
    "hidden_size": 1024, "moe_intermediate_size": 1152, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 8,
    "head_dim": 64, "vocab_size": 1000, "num_experts": 16, "num_experts_per_tok": 2,
}  # fmt: skip
TINY = {
    **LARGE, "hidden_size": 32, "moe_intermediate_size": 16, "vocab_size": 100, "num_attention_heads": 2, "num_key_value_heads": 2,
}  # fmt: skip


def main(folder: Path) -> None:
    for name, sizes in (("tiny", TINY), ("large", LARGE)):
        model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes), dtype=torch.bfloat16)
        model.save_pretrained(folder / name)
        del model
        gc.collect()
        with Host() as host:
            model = AutoModelForCausalLM.from_pretrained(folder / name)
        del model
    print(json.dumps({"high_bytes": host.high_bytes, "left_bytes": host.left_bytes}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
