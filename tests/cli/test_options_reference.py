"""fsdp_advisor/OPTIONS.md has every option, as the fields of the requests declare them.

`pytest tests/cli/test_options_reference.py --update-golden` writes it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from textwrap import wrap

import pytest

from fsdp_advisor.job.fields import Field, dashed, fields_of
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest

OPTIONS = Path(__file__).parents[2] / "fsdp_advisor" / "OPTIONS.md"
HEAD = """\
# Options

The options of `estimate`, `recommend`, `validate` and `export`, made from their declarations in `job/`. The same words,
with underscores, are the fields of the Python functions, of REST and of the JSON answer. Case, blanks, dashes and underscores do
not matter in values that are words. In `recommend`, options that are not given are searched if `--help` says so.
"""
WIDTH = 120


def _default(field: Field) -> str:
    if field.required:
        return "required"
    if field.kind is bool and field.default is True:
        return f"default: yes; `{dashed(f'no_{field.name}')}` switches it off"
    if field.rule.default is not None:
        return f"default: {field.rule.default}"
    if field.kind is bool:
        return "default: no"
    return "" if field.default in (None, ()) else f"default: `{field.default}`"


def _entry(field: Field) -> list[str]:
    names = ", ".join(f"`{dashed(name)}`" for name in (field.name, *field.rule.aliases))
    about = field.rule.about.removeprefix("the ")
    parts = [about[0].upper() + about[1:]]
    if field.choices:
        parts.append("Possible: " + " ".join(f"`{word}`" for word in field.choices))
    parts += [default[0].upper() + default[1:] for default in [_default(field)] if default]
    return wrap(f"- {names}: {'. '.join(parts)}.", WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _groups(fields: Iterable[Field]) -> list[str]:
    shown: dict[str, list[str]] = {}
    for field in fields:
        if not field.rule.hidden:
            shown.setdefault(field.rule.group, []).extend(_entry(field))
    return [line for group, lines in shown.items() for line in ("", f"## {group}", "", *lines)]


def _reference() -> str:
    estimate, recommend = fields_of(EstimateRequest), fields_of(RecommendRequest)
    lines = [*_groups(estimate.values()), *_groups(recommend[name] for name in recommend if name not in estimate)]
    return HEAD + "\n".join(lines) + "\n"


def test_reference_lists_every_option(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        OPTIONS.write_text(_reference())
    assert OPTIONS.read_text() == _reference()
