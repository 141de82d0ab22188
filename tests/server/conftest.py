"""One application in this process for all tests of its routes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from fsdp_advisor.server.app import create_app
from fsdp_advisor.server.settings import Settings


@pytest.fixture(scope="session")
def client() -> Iterator[TestClient]:
    with TestClient(
        create_app(Settings(workers=1, log_level="error", record_seconds=3600, answer_seconds=3600)),
        raise_server_exceptions=False,
    ) as client:
        yield client
