"""The commands. Each parses, calls the waist, renders, and returns the exit status."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

from fsdp_advisor.cli import export as exporting
from fsdp_advisor.cli import recommend as advising
from fsdp_advisor.cli import serve as serving
from fsdp_advisor.cli import validate as validation
from fsdp_advisor.cli.estimate import estimate as answer
from fsdp_advisor.cli.options import (
    ForceOption,
    FormatOption,
    JsonOption,
    OutputOption,
    QuietOption,
    takes_request,
)
from fsdp_advisor.cli.output import Destination, Format, as_json, note
from fsdp_advisor.job.request import EstimateRequest

PROGRAM = "fsdp-advisor"

app = typer.Typer(
    name=PROGRAM,
    help="Will it fit, under which strategy, how fast, and what to type: memory estimates for sharded training.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={
        "token_normalize_func": lambda token: token.replace("_", "-"),
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
    },
)

PatternArgument = Annotated[
    Optional[str],  # noqa: UP045  # typer reads this while the module runs
    typer.Argument(
        metavar="[PATTERN]",
        help="Only those that it names or, for models, describes: llama3, moe, vision.",
        show_default=False,
    ),
]


def run(arguments: list[str]) -> int:
    """Parse and run; the exit status. Errors are the caller's."""
    command = typer.main.get_command(app)
    try:
        with command.make_context(PROGRAM, arguments) as context:
            return int(command.invoke(context) or 0)
    except typer.Exit as done:  # --help, --version
        return done.exit_code


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import PackageNotFoundError, version

        try:
            number = version(PROGRAM)
        except PackageNotFoundError:
            number = "(not installed)"
        Destination().write(f"{PROGRAM} {number}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
@takes_request
def estimate(
    request: EstimateRequest,
    *,
    format: FormatOption = Format.text,
    json: JsonOption = False,
    explain: Annotated[
        Optional[str],  # noqa: UP045  # typer reads this while the module runs
        typer.Option(
            metavar="STRATEGY",
            help="Show what is alive at the peak, and the step's timeline: zero3, zero3+optimizer, zero3+parameters ...",
        ),
    ] = None,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate", help="Also run each strategy on the best rung this machine has, and show the error."
        ),
    ] = False,
    output: OutputOption = None,
    force: ForceOption = False,
    quiet: QuietOption = False,
) -> int:
    """Peak memory per GPU under every strategy, what it is made of, host memory, and whether it fits.

    Exit status: 0 at least one strategy shown fits, 1 none does or is known to (a bare parameter count), 2 bad usage, unknown
    model, unreadable config or no network.
    """
    return answer(
        request,
        format=format,
        json=json,
        explain=explain,
        validate=validate,
        output=output,
        force=force,
        quiet=quiet,
    )


@app.command()
def models(
    pattern: PatternArgument = None,
    json: JsonOption = False,
    output: OutputOption = None,
    force: ForceOption = False,
) -> int:
    """The models that are known offline."""
    from fsdp_advisor.model.catalog import search

    destination = Destination(path=output, force=force)
    destination.check()
    found = search(pattern)
    if json:
        destination.write(as_json([entry.as_row() for entry in found]))
        return 0
    from fsdp_advisor.cli.listing import models_table

    return _listed(models_table(found, destination.screen()), pattern, destination)


@app.command()
def gpus(
    pattern: PatternArgument = None,
    json: JsonOption = False,
    output: OutputOption = None,
    force: ForceOption = False,
) -> int:
    """The GPUs that are known, with the memory that the driver really offers."""
    from dataclasses import asdict

    from fsdp_advisor.hardware import list_gpus

    destination = Destination(path=output, force=force)
    destination.check()
    found = list_gpus(pattern)
    if json:
        destination.write(as_json([asdict(gpu) for gpu in found]))
        return 0
    from fsdp_advisor.cli.listing import gpus_table

    return _listed(gpus_table(found, destination.screen()), pattern, destination)


def _listed(table: str, pattern: str | None, destination: Destination) -> int:
    if table:
        destination.write(table)
    else:
        note(f"nothing is called {pattern!r}")
    return 0


advising.register(app)
exporting.register(app)
validation.register(app)
serving.register(app)
