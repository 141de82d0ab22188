"""One server and one browser for all browser tests. With CI=true a missing browser is a failure, elsewhere the tests are skipped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SHOTS = Path(__file__).parents[2] / ".screenshots"
"""Pictures of the pages as the tests saw them; git ignores the folder."""


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    import page_browser as machinery

    with machinery.server() as url:
        yield url


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    import page_browser as machinery

    if machinery.chromium_path() is None:
        if os.environ.get("CI") == "true":
            pytest.fail("no Chromium is installed: apt-get install chromium")
        pytest.skip("no Chromium is installed")
    with machinery.browser() as running:
        yield running


@pytest.fixture
def open_page(chromium: Any, address: str) -> Iterator[Callable[..., Any]]:
    """A function that opens a path in a new browser context. Console messages and failed loads make the test fail."""
    contexts, complaints = [], []

    def opened(path: str = "/", *, width: int = 1280, height: int = 900, status: int = 200, **options: Any) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(30_000)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("requestfailed", lambda request: complaints.append(f"{request.url}: {request.failure}"))
        reply = page.goto(address + path)
        assert reply.status == status
        if status != 200:
            complaints[:] = [words for words in complaints if f"status of {status}" not in words]
        return page

    opened.complaints = complaints  # type: ignore[attr-defined]
    yield opened
    for context in contexts:
        context.close()
    assert [words for words in complaints if "ERR_ABORTED" not in words] == []


@pytest.fixture(scope="session")
def shots() -> Path:
    SHOTS.mkdir(exist_ok=True)
    return SHOTS
