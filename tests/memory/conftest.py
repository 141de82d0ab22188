"""A fixture of the tests of loading and saving."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ranks import LOADED, RANKS, RESUMABLE, SAVED, run_ranks


@pytest.fixture(scope="session")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Per rank, the memory that each case of two real processes needs, counted from the case's start; for rank 0 also its files."""
    folder = tmp_path_factory.mktemp("checkpoints")
    run_ranks(Path(__file__).with_name("checkpoint_worker.py"), str(folder), *LOADED, *SAVED, *RESUMABLE)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(RANKS)]
