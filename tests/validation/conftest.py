"""Fixtures of the validation tests."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator

import pytest
from tiny_model import CONFIG


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tiny model's configuration."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return str(folder)


@pytest.fixture
def ctrl_c_raises() -> Iterator[None]:
    """SIGINT raises KeyboardInterrupt in this process, also if pytest was started in the background, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
