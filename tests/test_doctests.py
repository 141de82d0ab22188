"""Every example in a docstring of the installed package is run."""

from __future__ import annotations

import doctest
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

import fsdp_advisor

STAND_IN = "fsdp_advisor.rehearsal.inside.stand_ins.flash_attn"
"""A package that a rehearsal imports under the name of the package in whose place it stands."""
MODULES = [
    m.name
    for m in pkgutil.walk_packages(fsdp_advisor.__path__, "fsdp_advisor.")
    if not m.name.endswith("__main__") and not f"{m.name}.".startswith(f"{STAND_IN}.")
]
EXAMPLE = re.compile(r"^ *>>> ", re.MULTILINE)


def _has_examples(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None and bool(EXAMPLE.search(Path(spec.origin).read_text()))


@pytest.mark.parametrize("name", filter(_has_examples, ["fsdp_advisor", *MODULES]))
def test_every_example_is_run_and_prints_what_it_shows(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    written = len(EXAMPLE.findall(Path(module.__file__).read_text()))
    assert doctest.testmod(module) == doctest.TestResults(failed=0, attempted=written)


def test_there_are_examples() -> None:
    folder = Path(*fsdp_advisor.__path__)
    assert sum(len(EXAMPLE.findall(path.read_text())) for path in folder.rglob("*.py")) >= 25
