"""The format of text that has no file name: pasted into the page, or piped into the command line."""

from __future__ import annotations

import json
import re

_OF_A_MODEL = ("model_type", "architectures")
_TOML = re.compile(r"^\[[\w.-]+\]\s*$", re.MULTILINE)
_PYTHON = re.compile(r"^(?:import|from|def|class) +\w", re.MULTILINE)
_LAUNCHER = re.compile(
    r"^(?! *#| *[\w.-]+:(?: |$))(?:.*[ /])?(?:torchrun|accelerate launch|deepspeed|trl|swift|tune|axolotl|llamafactory-cli|python3?) ",
    re.MULTILINE,
)
"""A command that trains; not in a comment, nor in a value of YAML."""


def file_name(text: str, stem: str = "pasted") -> str | None:
    """The name that a text without one gets, by its format; None for a model's config.json, and for text that may be meant as one.

    >>> file_name('{"model_type": "llama"}'), file_name('{"zero_optimization": {"stage": 3}}'), file_name("base_model: gpt2")
    (None, 'pasted.json', 'pasted.yaml')
    >>> file_name("import torch"), file_name("torchrun --nproc-per-node 8 train.py")
    ('pasted.py', 'pasted.sh')
    >>> file_name("# accelerate launch -m axolotl.cli.train this.yaml\\nbase_model: gpt2")
    'pasted.yaml'
    >>> file_name("[training]\\nseq_len = 2048")
    'pasted.toml'
    """
    if text.lstrip().startswith("{"):
        try:
            keys = json.loads(text)
        except ValueError:
            return None
        return None if any(key in keys for key in _OF_A_MODEL) else f"{stem}.json"
    if _PYTHON.search(text):
        return f"{stem}.py"
    if _TOML.search(text):
        return f"{stem}.toml"
    return f"{stem}.sh" if text.startswith("#!") or _LAUNCHER.search(text) else f"{stem}.yaml"
