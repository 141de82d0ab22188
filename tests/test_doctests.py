"""Every example in a docstring of the installed package is run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import fsdp_advisor

MODULES = [
    m.name for m in pkgutil.walk_packages(fsdp_advisor.__path__, "fsdp_advisor.") if not m.name.endswith("__main__")
]


@pytest.mark.parametrize("name", ["fsdp_advisor", *MODULES])
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_there_are_examples() -> None:
    assert sum(doctest.testmod(importlib.import_module(n)).attempted for n in MODULES) >= 25
