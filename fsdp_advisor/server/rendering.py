"""The page's templates, which escape every value, and its static files."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from fsdp_advisor import __version__
from fsdp_advisor.server.page_words import words
from fsdp_advisor.units import format_bytes, format_count, format_gib

HTML = "text/html; charset=utf-8"
_PACKAGE = Path(__file__).parents[1]


def _web_dir() -> Path:
    """`fsdp_advisor/web` of an installed wheel, `web` of a checkout."""
    installed = _PACKAGE / "web"
    return installed if installed.is_dir() else _PACKAGE.parent / "web"


def static_dir() -> Path:
    """The folder of style sheets, scripts and icons."""
    return _web_dir() / "static"


def render(template: str, root: str, here: str, **values: Any) -> bytes:
    """A page as HTML. `root` is the prefix under which a proxy serves the site, `here` the page's path after it."""
    return _templates().get_template(template).render(root=root, here=here, **values).encode()


@lru_cache(maxsize=1)
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_web_dir() / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {"gib": format_gib, "bytes": format_bytes, "count": format_count, "words": words}
    environment.globals |= {"version": __version__, "stamp": _static_digest()}
    return environment


def _static_digest() -> str:
    """Part of every static file's address, so that browsers load a changed file anew."""
    digest = hashlib.blake2b(digest_size=5)
    for path in sorted(static_dir().iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()
