"""The plain command line, read without a library: typer and pydantic take longer to start than most estimates take.

Only `estimate`, with known options and values as they are usually written. Everything else (help, a misspelling, a value that
does not fit) is typer's, which says what is wrong: for what is read here it would have read the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_advisor.cli.output import Format
from fsdp_advisor.job.request import EstimateRequest, dashed, fields_of, plainly

ALIASES: dict[str, tuple[str, ...]] = {"micro_batch_size": ("--per-device-train-batch-size",)}
FLAGS = {"--json": "json", "--force": "force", "--quiet": "quiet", "-q": "quiet"}
VALUES = {"--format": "format", "--output": "output", "-o": "output", "--explain": "explain"}


def estimate_asked(arguments: Sequence[str]) -> tuple[EstimateRequest, dict[str, Any]] | None:
    """The request and the command's own options, if this is `estimate`, plainly; else None.

    >>> request, own = estimate_asked(["estimate", "--model", "gpt2", "--gpus=8", "--json"])
    >>> request.gpus, own
    (8, {'json': True})
    """
    if not arguments or arguments[0] != "estimate":
        return None
    fields = fields_of(EstimateRequest)
    named = {dashed(name): name for name in fields}
    named |= {alias: name for name, aliases in ALIASES.items() for alias in aliases}
    given: dict[str, Any] = {}
    own: dict[str, Any] = {}
    rest = iter(arguments[1:])
    for word in rest:
        option, equals, value = word.partition("=")
        if option.startswith("--"):
            option = option.replace("_", "-")
        name = named.get(option, "")
        flag = option in FLAGS or (name != "" and fields[name].kind is bool)
        if not flag and not equals:
            value = next(rest, "")
        if (flag and equals) or (not flag and (not value or value.startswith("-"))):
            return None
        if name:
            given[name] = True if flag else value
        elif flag:
            own[FLAGS[option]] = True
        elif option in VALUES and not (equals and option == "-o"):
            own[VALUES[option]] = value
        else:
            return None
    if "format" in own:
        if own["format"] not in Format.__members__:
            return None
        own["format"] = Format[own["format"]]
    if "output" in own:
        own["output"] = Path(own["output"])
    request = plainly(given, EstimateRequest)
    return None if request is None else (request, own)
