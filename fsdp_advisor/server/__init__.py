"""The REST API and the page: a thin face on `estimate`, safe to put on the internet."""

from __future__ import annotations

from fsdp_advisor.server.app import create_app
from fsdp_advisor.server.settings import Settings

__all__ = ["Settings", "create_app"]
