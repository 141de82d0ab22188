"""Runs command lines within the test process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from fsdp_advisor.cli import main


@dataclass(frozen=True)
class Ran:
    status: int
    out: str
    err: str


Cli = Callable[..., Ran]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command line in this process, at a fixed width and with no network; returns its status and what it wrote."""
    for name in ("NO_COLOR", "FORCE_COLOR", "FSDP_ADVISOR_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def run(*arguments: str, columns: int = 120) -> Ran:
        monkeypatch.setenv("COLUMNS", str(columns))
        status = main(arguments)
        out, err = capsys.readouterr()
        return Ran(status, out, err)

    return run
