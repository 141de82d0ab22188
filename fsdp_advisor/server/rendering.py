"""Templates: one environment that escapes everything, and what every page is told."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.requests import Request

from fsdp_advisor import __version__
from fsdp_advisor.server.assets import static_dir, templates_dir
from fsdp_advisor.units import format_count, format_gib

HTML = "text/html; charset=utf-8"


@lru_cache(maxsize=1)
def _templates() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(templates_dir()),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {"gib": format_gib, "count": format_count}
    environment.globals |= {"version": __version__, "stamp": _stamp()}
    return environment


def _stamp() -> str:
    """Changes with the static files, so that browsers may keep them for as long as they like."""
    digest = hashlib.blake2b(digest_size=5)
    for path in sorted(static_dir().iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def render(request: Request, template: str, **values: Any) -> bytes:
    """A page, for the path of the request and the prefix under which a proxy serves it."""
    root = str(request.scope.get("root_path", "")).rstrip("/")
    here = request.url.path.removeprefix(root)
    return _templates().get_template(template).render(root=root, here=here, **values).encode()
