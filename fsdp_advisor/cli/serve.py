"""`serve`: the REST API and the page. The options are the server's settings, which can also be set by environment variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, make_dataclass
from typing import TYPE_CHECKING, Annotated, Any

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.fields import Rule, dashed, shown

if TYPE_CHECKING:
    from fsdp_advisor.server import Settings

OPTIONS: dict[str, tuple[str, str, str]] = {
    "host": ("ADDRESS", "127.0.0.1", "Address to listen on; 0.0.0.0 for all."),
    "port": ("N", "8000", "Port to listen on; 0 takes any free port. The variable PORT is read too."),
    "workers": ("N", "2", "Processes that compute answers."),
    "allow_hub": ("", "off", "Look up models on the Hugging Face hub: the only outgoing connection."),
    "cors_origins": ("ORIGINS", "none", "Origins whose pages may call the API, separated by commas; * for any."),
    "root_path": ("PATH", "none", "Path under which a proxy serves this, such as /advisor."),
    "log_level": ("[debug|info|warning|error]", "info", "Lowest severity to log, as JSON lines."),
    "max_connections": ("N", "1024", "Open connections; others get status 503."),
    "max_waiting": ("N", "64", "Answers being computed or waiting for a worker; others get status 503."),
    "max_body_bytes": ("BYTES", "262144", "Largest request body."),
    "max_json_depth": ("N", "32", "Deepest nesting of a JSON body."),
    "receive_seconds": ("SECONDS", "30", "Time limit to receive a request's body."),
    "answer_seconds": ("SECONDS", "120", "Time limit to compute one answer."),
    "graceful_seconds": ("SECONDS", "10", "Time for requests to finish at shutdown."),
    "cached_answers": ("N", "1024", "Answers kept in memory."),
    "record_seconds": ("SECONDS", "600", "Time limit to record a pasted configuration and answer."),
    "record_memory_bytes": ("BYTES", "4294967296", "Memory of the recording process."),
    "record_queue": ("N", "4", "Requests that may wait for the recording process."),
}
"""Setting -> (form of its value, default, help). `server.settings` has its type and default; importing that takes long."""


def _rule(metavar: str, default: str, about: str) -> Rule:
    return Rule(about=about.rstrip("."), group="Server", metavar=metavar.strip("[]") or None, default=default)


ServeOptions = make_dataclass(
    "ServeOptions",
    [(name, Annotated[(str if about[0] else bool) | None, _rule(*about)], None) for name, about in OPTIONS.items()],
    frozen=True,
)
"""An option per setting. Values stay text until the server's settings read them."""


def serve(options: Any) -> int:
    """The web page and the REST API, until Ctrl-C.

    Each option has an environment variable, such as FSDP_ADVISOR_PORT for --port and FSDP_ADVISOR_ALLOW_HUB=1 for
    --allow-hub; an option wins over its variable. The address goes to standard output once the server answers, log lines to
    standard error. Exit status: 0 if Ctrl-C or SIGTERM stops the server; 2 for a bad value or an address that is not free.
    """
    from fsdp_advisor.server.run import run

    run(_settings({name: value for name, value in asdict(options).items() if value is not None}), _announce)
    return 0


def _settings(given: Mapping[str, Any]) -> Settings:
    """The settings. Raises UsageError that names the option or the variable."""
    from pydantic import ValidationError

    from fsdp_advisor.server.request_models import expected_by
    from fsdp_advisor.server.settings import Settings

    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
    field = str(first["loc"][0]).lower().removeprefix("fsdp_advisor_")
    variable = f"FSDP_ADVISOR_{field.upper()}"
    written = dashed(field) if field in given else variable if variable in os.environ else field.upper()
    hint = OPTIONS[field][2] if field in OPTIONS else "see fsdp-advisor serve --help"
    raise UsageError(f"{written} must be {expected_by(first)}, not {shown(first['input'])}", hint=hint)


def _announce(url: str) -> None:
    if sys.stdout is not None:
        with suppress(OSError, ValueError):  # standard output is closed
            print(f"fsdp-advisor answers on {url} (Ctrl-C stops it)", flush=True)
