"""The text that a visitor pastes: a model's config.json, or another tool's configuration or training script."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from fsdp_advisor.configs import complete, from_texts
from fsdp_advisor.job.config_reading import check_nothing_missing
from fsdp_advisor.job.fields import as_query, fields_of, read_fields
from fsdp_advisor.job.search_request import RecommendRequest

_OF_A_MODEL = ("model_type", "architectures")
_PYTHON = re.compile(r"^(?:import|from|def|class) +\w", re.MULTILINE)
_LAUNCHER = re.compile(
    r"^(?! *#| *[\w.-]+:(?: |$))(?:.*[ /])?(?:torchrun|accelerate launch|deepspeed|trl|swift|tune|axolotl|llamafactory-cli|python3?) ",
    re.MULTILINE,
)
"""A command that trains; not in a comment, nor in a value of YAML."""


def file_name(text: str) -> str | None:
    """The name that a pasted text gets, by its format; None for a model's config.json, and for text that may be meant as one.

    >>> file_name('{"model_type": "llama"}'), file_name('{"zero_optimization": {"stage": 3}}'), file_name("base_model: gpt2")
    (None, 'pasted.json', 'pasted.yaml')
    >>> file_name("import torch"), file_name("torchrun --nproc-per-node 8 train.py")
    ('pasted.py', 'pasted.sh')
    >>> file_name("# accelerate launch -m axolotl.cli.train this.yaml\\nbase_model: gpt2")
    'pasted.yaml'
    """
    if text.lstrip().startswith("{"):
        try:
            keys = json.loads(text)
        except ValueError:
            return None
        return None if any(key in keys for key in _OF_A_MODEL) else "pasted.json"
    if _PYTHON.search(text):
        return "pasted.py"
    return "pasted.sh" if text.startswith("#!") or _LAUNCHER.search(text) else "pasted.yaml"


def with_pasted_file(options: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    """(the options of a form, with those of a configuration or script pasted in place of a config.json; lines about what was read).

    The file's settings win, but not what it leaves open and is assumed. Raises UsageError for a file that cannot be read.
    """
    text = options.get("config", "")
    name = file_name(text) if text else None
    if name is None:
        return dict(options), ()
    found = from_texts({name: text})
    check_nothing_missing(found.readings)
    form = {key: value for key, value in options.items() if key != "config"}
    known = fields_of(RecommendRequest)
    given = read_fields({key: value for key, value in form.items() if key in found.assumed}, known)
    kept = complete(found, given, RecommendRequest.SEARCHED)
    read = as_query({key: value for key, value in kept.options.items() if key in known})
    lines = tuple(line.strip() for reading in kept.readings for line in reading.lines)
    return form | read, lines
