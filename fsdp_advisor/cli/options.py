"""The argument parser of a command, made from the fields of its request and of its own options."""

from __future__ import annotations

import argparse
import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from typing import Annotated, Any, NoReturn

from fsdp_advisor.cli.output import Destination, Format
from fsdp_advisor.errors import InvalidOption, UsageError
from fsdp_advisor.job.fields import Field, Rule, dashed, fields_of, shown

PROGRAM = "fsdp-advisor"
MAX_HELP_WIDTH = 100
_SHORT = {"output": "-o", "quiet": "-q", "help": "-h"}


@dataclass(frozen=True, kw_only=True)
class HelpOptions:
    """Options of every command."""

    help: Annotated[bool, Rule(about="show this help and exit", group="Help")] = False


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Options of every command that writes an answer."""

    output: Annotated[
        Path | None, Rule(about="the file to write instead of standard output; it must not exist", metavar="FILE")
    ] = None
    force: Annotated[bool, Rule(about="let -o overwrite FILE")] = False

    @property
    def destination(self) -> Destination:
        """Where the answer goes."""
        return Destination(path=self.output, force=self.force)


@dataclass(frozen=True, kw_only=True)
class ListOptions(FileOptions):
    """Options of the commands that list something."""

    pattern: Annotated[str | None, Rule(about="list only what matches this", metavar="PATTERN", positional=True)] = None
    json: Annotated[bool, Rule(about="write JSON")] = False


@dataclass(frozen=True, kw_only=True)
class ReportOptions(FileOptions):
    """Options of the commands that write a report."""

    format: Annotated[Format, Rule(about="the format of the answer")] = "text"
    json: Annotated[bool, Rule(about="the same as --format json")] = False
    quiet: Annotated[bool, Rule(about="no notes and no progress on standard error")] = False

    @property
    def form(self) -> Format:
        """The format that `--format` and `--json` select. Raises UsageError if they contradict each other."""
        if self.json and self.format == "markdown":
            raise UsageError("--json contradicts --format markdown", hint="give one of them")
        return "json" if self.json else self.format


@dataclass(frozen=True, kw_only=True)
class ConfigFileOptions:
    """Options of every command about a job that users may already have configured for another tool."""

    config_file: Annotated[
        tuple[Path, ...],
        Rule(
            about="read the job from files of accelerate, DeepSpeed, Trainer, TRL, axolotl, LLaMA-Factory, ms-swift, torchtune or "
            "torchtitan, from launch scripts, Python scripts (also of Lightning, or with a loop in PyTorch), "
            "a directory, or standard input (-); options on the command line win",
            group="Model",
            metavar="FILE",
        ),
    ] = ()


class CommandParser:
    """The parser of one command's options. `usage` is the part of the usage line after the command's name; the other arguments are help
    texts.
    """

    def __init__(self, command: str, usage: str, description: str, epilog: str = "") -> None:
        self.name = f"{PROGRAM} {command}"
        self._options: dict[str, Field] = {}
        self._parser = _Parser(
            prog=self.name,
            usage=f"{self.name} {usage}",
            description=description,
            epilog=epilog,
            formatter_class=_help_formatter,
            allow_abbrev=False,
            add_help=False,
            argument_default=argparse.SUPPRESS,
        )

    def add_fields(self, fields: Iterable[Field], searched: Sequence[str] = ()) -> None:
        """Add an option or argument for each field, in the groups of their rules. Fields named in `searched` are searched by default."""
        groups: dict[str, Any] = {}
        for field in fields:
            if field.rule.positional:
                self._parser.add_argument(field.name, metavar=field.rule.metavar, nargs="?", help=_help_text(field, ()))
                continue
            if field.rule.group not in groups:
                groups[field.rule.group] = self._parser.add_argument_group(field.rule.group)
            text = argparse.SUPPRESS if field.rule.hidden else _help_text(field, searched).replace("%", "%%")
            names = [dashed(field.name), *map(dashed, field.rule.aliases)]
            names = [_SHORT[field.name], *names] if field.name in _SHORT else names
            self._options |= dict.fromkeys(names, field)
            takes: dict[str, Any] = {"action": "store_true"} if field.kind is bool else {"metavar": _metavar(field)}
            takes |= {"nargs": "+", "action": "extend"} if field.many else {}
            groups[field.rule.group].add_argument(*names, dest=field.name, help=text, **takes)

    def parse(self, arguments: Sequence[str]) -> dict[str, Any] | None:
        """The given values by field name, as text or True; None if the user asked for help. Raises UsageError.

        Underscores work like dashes and `name=value` like `--name=value`; a flag may have a value, as in `--json=false`.
        """
        words, off = self._spelled(arguments)
        given, rest = self._parser.parse_known_args(words)
        unknown = next((word for word in rest if word.startswith("-")), None)
        if unknown is not None:
            raise self._no_such_option(unknown.partition("=")[0])
        values = vars(given) | off
        if values.pop("help", False):
            return None
        if rest:
            takes_model = "--model" in self._options and "model" not in values
            hint = f"did you mean --model {shown(rest[0])}?" if takes_model else f"see {self.name} --help"
            raise UsageError(f"unexpected argument {shown(rest[0])}", hint=hint)
        if values.get("output") == "-":  # standard output, as without the option
            del values["output"]
        return values

    def help(self) -> str:
        """The text of --help, as wide as the terminal and at most MAX_HELP_WIDTH."""
        return self._parser.format_help()

    def _spelled(self, arguments: Sequence[str]) -> tuple[list[str], dict[str, bool]]:
        """(the words of a command line in argparse's spelling, the flags that are switched off)."""
        words: list[str] = []
        off: dict[str, bool] = {}
        is_value = False
        for word in self._with_flags_joined(arguments):
            if is_value and re.match(r"-\d", word):  # a value, which argparse would take for an option
                words[-1] += f"={word}"
                is_value = False
                continue
            option, equals, value = word.partition("=")
            if option.startswith("--"):
                option = option.replace("_", "-")
            elif equals and not is_value and dashed(option) in self._options:
                option = dashed(option)
            field = self._options.get(option)
            negated = self._options.get(option.replace("--no-", "--", 1))
            if field is None and negated is not None and negated.kind is bool:
                off[negated.name] = False
            elif field is not None and field.kind is bool and equals and not field.read(value):
                off[field.name] = False
            else:
                words.append(option if field is not None and field.kind is bool else option + equals + value)
            is_value = field is not None and field.kind is not bool and not equals
        return words, off

    def _with_flags_joined(self, arguments: Sequence[str]) -> Iterator[str]:
        """The words, but `--flag True` as `--flag=True`, as transformers' and TRL's own command lines write flags."""
        rest = deque(arguments)
        while rest:
            word = rest.popleft()
            field = self._options.get(word.replace("_", "-"))
            is_flag = field is not None and field.kind is bool
            yield f"{word}={rest.popleft()}" if is_flag and rest and rest[0].lower() in ("true", "false") else word

    def _no_such_option(self, option: str) -> InvalidOption:
        see = f"see {self.name} --help"
        if not option.startswith("--"):
            return InvalidOption(option, f"no such option: {shown(option)}", hint=see)
        from fsdp_advisor.job.search_request import RecommendRequest
        from fsdp_advisor.job.unknown_options import unknown_option

        if option[2:].replace("-", "_") in fields_of(RecommendRequest):
            return InvalidOption(option, f"no such option: {option}", hint=f"{PROGRAM} recommend has it")
        known = [field.name for field in self._options.values() if not field.rule.hidden]
        return unknown_option(option[2:].replace("-", "_"), dict.fromkeys(known), dashed, see=see)


class _Parser(argparse.ArgumentParser):
    """An argument parser that raises UsageError instead of exiting, and shows help without exiting."""

    def error(self, message: str) -> NoReturn:
        lacks_value = re.match(r"argument (?:-\w/)?([\w-]+).*: expected one argument", message)
        raise UsageError(f"{lacks_value[1]} needs a value" if lacks_value else message, hint=f"see {self.prog} --help")


def _help_text(field: Field, searched: Sequence[str]) -> str:
    """The help text of a field: its description, possible words and default."""
    text = field.rule.about.removeprefix("the ")
    text = text[0].upper() + text[1:]
    if field.choices:
        text += (". Possible: " if ";" in text or ":" in text else ": ") + ", ".join(field.choices)
    if field.required:
        return f"{text} [required]"
    if field.kind is bool and field.default is True:
        return f"{text} [default: yes; {dashed(f'no_{field.name}')} switches it off]"
    default = "searched" if field.name in searched else field.rule.default
    if default is None and field.kind is not bool and field.default not in (None, ()):
        default = str(field.default)
    return text if default is None else f"{text} [default: {default}]"


def _metavar(field: Field) -> str:
    if field.rule.metavar is not None:
        return field.rule.metavar
    return "N" if field.kind in (int, float) else "NAME" if field.choices else "TEXT"


class _HelpFormatter(argparse.HelpFormatter):
    """Wraps help texts at blanks, so that names of options stay whole."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width, break_on_hyphens=False)


def _help_formatter(prog: str) -> argparse.HelpFormatter:
    width = min(get_terminal_size().columns, MAX_HELP_WIDTH)
    return _HelpFormatter(prog, max_help_position=28, width=max(width - 2, 40))
