"""litgpt's own command on a checkpoint without weights: `python litgpt_lora.py MODEL WORD...` is `litgpt finetune_lora MODEL WORD...`.

litgpt loads the weights that a checkpoint has. Without weights, parameters keep their initial values, on the GPU.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from litgpt.__main__ import main
from litgpt.config import Config
from litgpt.utils import save_config

from fsdp_advisor.rehearsal.inside.tokenizers import write_tokenizer

WORDS = 4000
"""Words in the tokenizer: enough for the random data."""

if __name__ == "__main__":
    name, *words = sys.argv[1:]
    folder = Path(name)
    folder.mkdir()
    save_config(Config.from_name(name), folder)
    write_tokenizer(folder, {"vocab_size": WORDS})
    torch.save({}, folder / "lit_model.pth")
    sys.argv = ["litgpt", "finetune_lora", str(folder), *words]
    main()
