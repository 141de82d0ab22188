"""Where templates and static files lie: in `web/` of a checkout, in `fsdp_advisor/web` of an installed wheel."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


@lru_cache(maxsize=1)
def web_dir() -> Path:
    """The folder of the page's files."""
    installed = _PACKAGE / "web"
    return installed if installed.is_dir() else _PACKAGE.parent / "web"


def templates_dir() -> Path:
    return web_dir() / "templates"


def static_dir() -> Path:
    return web_dir() / "static"
