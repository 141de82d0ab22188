"""The commands of the program, and how the words of a command line reach their functions."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import replace
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple

from fsdp_advisor import __version__
from fsdp_advisor.cli.options import PROGRAM, CommandParser, HelpOptions
from fsdp_advisor.cli.output import Destination
from fsdp_advisor.cli.progress import recordings_shown
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.adapter_fields import with_files_read
from fsdp_advisor.job.fields import fields_of, read_fields
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest

PURPOSE = "Estimate memory and speed of sharded transformer training: will it fit, under which strategy, how fast, and what to type."
JOB = "--model MODEL [--gpus N] [--gpu GPU] [options]"


class Command(NamedTuple):
    """A command: `function` and the dataclass of its `options` are names in `module`, which is imported when it runs.

    The function's last argument is the options. If the command is about a job, its first argument is a `request`; with `partial` it is only
    the given fields, with values as text and perhaps without a model. With `needs_no_model` the help does not require a model, and without
    options of a job the function gets None. With `wraps` it also gets the words after `--`. Its docstring is the command's help.
    """

    summary: str
    module: str
    function: str
    options: str
    usage: str = "[options]"
    request: type[EstimateRequest] | None = None
    partial: bool = False
    wraps: bool = False
    needs_no_model: bool = False

    def run(self, name: str, arguments: Sequence[str]) -> int:
        """Parse the arguments and run the command. Returns the exit status."""
        module = import_module(f"fsdp_advisor.cli.{self.module}")
        function, options_class = getattr(module, self.function), getattr(module, self.options)
        own = fields_of(options_class)
        parser = CommandParser(name, self.usage, *_help_of(function.__doc__ or self.summary))
        if self.request is not None:
            fields = fields_of(self.request).values()
            known = [replace(field, required=False) for field in fields] if self.needs_no_model else fields
            parser.add_fields(known, getattr(self.request, "SEARCHED", ()))
        parser.add_fields((*own.values(), *fields_of(HelpOptions).values()))
        wrapped: tuple[str, ...] = ()
        if self.wraps and "--" in arguments:
            end = list(arguments).index("--")
            arguments, wrapped = arguments[:end], tuple(arguments[end + 1 :])
        try:
            given = parser.parse(arguments)
        except UsageError as error:
            if self.wraps and not wrapped:
                hint = "the command to run comes after --, such as: -- torchrun train.py"
                raise UsageError(error.message, hint=hint) from None
            raise
        if given is None:
            Destination().write(parser.help())
            return 0
        options = options_class(**read_fields({n: given.pop(n) for n in list(given) if n in own}, own))
        if self.wraps:
            return int(function(options, wrapped))
        if self.request is None:
            return int(function(options))
        given = with_files_read(given)
        files = getattr(options, "config_file", ())
        with recordings_shown(getattr(options, "quiet", False)):
            if files:
                from fsdp_advisor.cli.config_files import hints_with_keys, request_of_files

                with hints_with_keys(files):
                    return int(function(request_of_files(files, given, self.request, self.partial, options), options))
            if self.needs_no_model and not given:
                return int(function(None, options))
            return int(function(given if self.partial else make_request(given, self.request), options))


COMMANDS: dict[str, Command] = {
    "estimate": Command(
        "Memory per GPU, speed and fit of a job under every strategy.",
        "estimate", "estimate", "EstimateOptions", JOB, EstimateRequest,
    ),
    "recommend": Command(
        "The fastest configuration that fits, why, and how to launch it.",
        "recommend", "recommend", "RecommendOptions", JOB, RecommendRequest,
    ),
    "export": Command(
        "The file or command that launches a job.",
        "export", "export", "ExportOptions", f"TARGET {JOB}", EstimateRequest, partial=True,
    ),
    "compare": Command(
        "Two jobs side by side: why one fits and the other does not.",
        "compare", "compare", "CompareOptions", "A B [options]", EstimateRequest, partial=True,
    ),
    "check": Command(
        "One line and an exit status: does the job fit?",
        "check", "check", "CheckOptions", "--config-file FILE --gpu GPU [options]", EstimateRequest,
    ),
    "diagnose": Command(
        "Why a GPU ran out of memory, from an error's text or a memory snapshot.",
        "diagnose", "diagnose", "DiagnoseOptions", "FILE [options]", EstimateRequest, needs_no_model=True,
    ),
    "validate": Command(
        "Run a job and compare it with its estimate.",
        "validate", "validate", "ValidateOptions", JOB, EstimateRequest, partial=True,
    ),
    "validate report": Command(
        "Summarize the records of validate.",
        "validate", "report", "RecordsOptions", "FILE [options]",
    ),
    "rehearse": Command(
        "Run a training script unchanged on GPUs that you do not have.",
        "rehearse", "rehearse", "RehearseOptions", "--gpu GPU --gpus N [options] -- COMMAND", wraps=True,
    ),
    "models": Command(
        "The models that need no download.",
        "listing", "models", "ListOptions", "[PATTERN] [options]",
    ),
    "gpus": Command(
        "The GPUs that are known by name.",
        "listing", "gpus", "ListOptions", "[PATTERN] [options]",
    ),
    "serve": Command("The web page and the REST API.", "serve", "serve", "ServeOptions"),
}  # fmt: skip


def run(arguments: list[str]) -> int:
    """Run a command line. Returns the exit status; errors are raised."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        Destination().write(_program_help())
        return 0
    first = arguments[0]
    if first == "--version":
        Destination().write(f"{PROGRAM} {__version__}")
        return 0
    if first.startswith("-"):
        raise UsageError(
            f"no such option: {first.partition('=')[0]}",
            hint=f"options come after the command, as in: {PROGRAM} estimate --model MODEL --gpus N",
        )
    for name in (" ".join(arguments[:2]), first):
        if name in COMMANDS:
            return COMMANDS[name].run(name, arguments[len(name.split()) :])
    near = get_close_matches(first[:40], COMMANDS, n=1)
    raise UsageError(f"no such command: {first}", hint=f"did you mean {near[0]}?" if near else f"see {PROGRAM} --help")


def _program_help() -> str:
    width = max(map(len, COMMANDS))
    lines = [
        f"usage: {PROGRAM} COMMAND [options]",
        "",
        *textwrap.wrap(PURPOSE, 78),
        "",
        "Commands:",
        *(f"  {name:<{width}}  {command.summary}" for name, command in COMMANDS.items()),
        "",
        "Options:",
        f"  {'-h, --help':<{width}}  Show this help, or after a command its options, and exit.",
        f"  {'--version':<{width}}  Show the version and exit.",
        "",
        "Example:",
        f"  {PROGRAM} recommend --model meta-llama/Llama-3.1-8B --gpus 8 --gpu H100",
    ]
    return "\n".join(lines)


def _help_of(docstring: str) -> tuple[str, str]:
    """The first paragraph of a docstring, and the rest, each on one line."""
    first, _, rest = docstring.partition("\n\n")
    return " ".join(first.split()), " ".join(rest.split())
