"""fms-hf-tuning's own command on a model without weights: `python fms_sft.py FOLDER WORD...` is `python -m tuning.sft_trainer ...`.

FOLDER has the model's config.json. Its parameters are not initialized, and the texts are random words.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import transformers
from transformers.modeling_utils import no_init_weights

from fsdp_advisor.rehearsal.inside.tokenizers import write_tokenizer

WORDS = 2000
"""The number of different words in the texts."""
TEXTS, LENGTH = 400, 400


def without_weights(name: str, **options: Any) -> Any:
    """A replacement for AutoModelForCausalLM.from_pretrained that builds the model without reading a checkpoint."""
    given = {key: options[key] for key in ("torch_dtype", "attn_implementation") if options.get(key) is not None}
    config = transformers.AutoConfig.from_pretrained(name)
    with no_init_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, **given)
    model.tie_weights()
    return model.eval()


def write_texts(path: Path) -> None:
    chosen = random.Random(0)
    with path.open("w") as file:
        for _ in range(TEXTS):
            words = " ".join(f"w{chosen.randrange(WORDS)}" for _ in range(LENGTH))
            print(json.dumps({"output": words}), file=file)


def main(folder: Path, words: list[str]) -> None:
    rank = os.environ.get("RANK", "0")
    own = folder / f"rank-{rank}"
    own.mkdir()
    config = json.loads((folder / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(config))
    write_tokenizer(own, config)  # the command makes the embedding as large as the tokenizer
    write_texts(own / "texts.jsonl")
    transformers.AutoModelForCausalLM.from_pretrained = without_weights
    sys.argv = [
        "sft_trainer", "--model_name_or_path", str(own), "--training_data_path", str(own / "texts.jsonl"),
        "--dataset_text_field", "output", "--output_dir", str(own / "out"), *words,
    ]  # fmt: skip
    runpy.run_module("tuning.sft_trainer", run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
