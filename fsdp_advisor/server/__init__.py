"""The REST API and the web page."""

from __future__ import annotations

from fsdp_advisor.server.app import create_app
from fsdp_advisor.server.settings import Settings

__all__ = ["Settings", "create_app"]
