"""`serve`: the REST API and the page. The options are the server's settings, which environment variables give as well."""

from __future__ import annotations

import inspect
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.request import dashed

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
"""Of each setting: how its value is written, its default, its help. `server.settings` has them too, but is imported late."""


def register(app: typer.Typer) -> None:
    """Add `serve` to the program."""
    app.command(name="serve", help=_serve.__doc__)(_with_options())


def _serve(**given: Any) -> int:
    """The page and the REST API, until Ctrl-C.

    Each option has a variable: FSDP_ADVISOR_PORT for --port, FSDP_ADVISOR_ALLOW_HUB=1 for --allow-hub. An option wins.
    The address goes to standard output once it answers, log lines to standard error.
    Exit status: 0 stopped by Ctrl-C or SIGTERM, 2 a bad value or an address that cannot be listened on.
    """
    from fsdp_advisor.server.run import run

    run(_settings({name: value for name, value in given.items() if value is not None}), _announce)
    return 0


def _settings(given: dict[str, Any]) -> Settings:
    """Pydantic's first complaint becomes a UsageError that names the option or the variable."""
    from pydantic import ValidationError

    from fsdp_advisor.server.settings import Settings

    try:
        return Settings(**given)
    except ValidationError as error:
        first = error.errors()[0]
    field = str(first["loc"][0]).lower().removeprefix("fsdp_advisor_")
    variable = f"FSDP_ADVISOR_{field.upper()}"
    shown = dashed(field) if field in given else variable if variable in os.environ else field.upper()
    hint = OPTIONS[field][2] if field in OPTIONS else "see fsdp-advisor serve --help"
    raise UsageError(f"{shown}: {first['msg'].removeprefix('Value error, ')}, not {first['input']!r}", hint=hint)


def _announce(url: str) -> None:
    if sys.stdout is not None:
        with suppress(OSError, ValueError):  # nobody reads it
            print(f"fsdp-advisor answers on {url} (Ctrl-C stops it)", flush=True)


def _with_options() -> Any:
    """`_serve` with a parameter per setting. Values stay text until pydantic reads them."""

    def command(**given: Any) -> int:
        return _serve(**given)

    parameters = [_parameter(name, *about) for name, about in OPTIONS.items()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # what typer reads
    command.__annotations__ = {p.name: p.annotation for p in parameters}
    return command


def _parameter(name: str, metavar: str, default: str, text: str) -> inspect.Parameter:
    text = f"{text} [default: {default}]"
    kind: Any = Optional[str]  # noqa: UP045  # a value, not a hint
    if metavar:
        option = typer.Option(dashed(name), metavar=metavar, help=text)
    else:
        kind, option = Optional[bool], typer.Option(f"{dashed(name)}/--no-{dashed(name)[2:]}", help=text)  # noqa: UP045
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind, option])
