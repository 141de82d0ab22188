"""Fields of a request, or of a command's own options: type, limits and help, declared once in a dataclass.

The command line's parser, the REST API's schema and the page's form are made from these fields. `Field.read` is the only validator, so
every interface refuses a value with the same words. The module needs only the standard library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fsdp_advisor.errors import InvalidOption
from fsdp_advisor.job.unknown_options import unknown_option
from fsdp_advisor.units import exact_size, format_bytes, list_words, parse_bytes

MAX_SHOWN = 80
"""Characters of a refused value that its message repeats."""
_INTEGER = re.compile(r"[+-]?\d{1,25}(\.0*)?", re.ASCII)
_THOUSANDS = re.compile(r"(\d{1,9}) ?[kK]", re.ASCII)
_WORD = re.compile(r"[\w.,:+%/-]{1,80}", re.ASCII)
_BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_TYPES: dict[type, str] = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", Path: "the name of a file",
}  # fmt: skip


@dataclass(frozen=True)
class Rule:
    """Help and limits of a field.

    `about` is the help text and the hint: a noun phrase with "the" or "a", or a verb phrase. `parse` converts text with a unit to a value;
    `word` converts text to its canonical spelling; both return None for text that they cannot read. `example` is a text that they can
    read. `default` is the help's word for a default that is computed. `aliases` are further names. `hidden` fields are accepted but not
    shown; `positional` ones are arguments of a command. `synonyms` maps other words to a choice, and `elsewhere` maps words that belong to
    another field to a hint. `not_modelled` are values of other tools that are refused as "not modelled yet"; `nearest` names the most
    similar choice for some of them. `json`: the text is JSON, and a mapping is accepted instead of its text.
    """

    about: str
    _: KW_ONLY
    group: str = "Output"
    default: str | None = None
    ge: float | None = None
    le: float | None = None
    lt: float | None = None
    min_length: int | None = None
    max_length: int | None = None
    parse: Callable[[str], float | None] | None = None
    word: Callable[[str], str | None] | None = None
    example: str | None = None
    metavar: str | None = None
    aliases: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    not_modelled: tuple[str, ...] = ()
    nearest: Mapping[str, str] = field(default_factory=dict)
    hidden: bool = False
    positional: bool = False
    json: bool = False


def shown(value: Any) -> str:
    """A refused value as text for an error message: unquoted if it is one short word, else quoted and shortened.

    >>> shown("-3"), shown(" "), shown(2.5)
    ('-3', "' '", '2.5')
    """
    if isinstance(value, str):
        text = value if _WORD.fullmatch(value) else repr(value[:MAX_SHOWN])
        return text if len(value) <= MAX_SHOWN else text + "..."
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**MAX_SHOWN else "a huge number"
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


@dataclass(frozen=True, kw_only=True)
class Field:
    """One field. `kind` is the type of its values other than None; `choices` are the possible words, if they are limited.

    `many`: the value is a tuple of values of this kind.
    """

    name: str
    kind: type
    choices: tuple[str, ...]
    optional: bool
    required: bool
    default: Any
    rule: Rule
    many: bool = False

    def read(self, value: Any, show: Callable[[Any], str] = shown) -> Any:
        """The value in the field's type, from text or from a Python value. Raises InvalidOption, which writes the value by `show`.

        Case, blanks, dashes and underscores do not matter in words; other text keeps its case. Text for several values has blanks
        or commas between them, except in the names of files.
        """
        if not self.many:
            return self._read_one(value, show)
        values = value if isinstance(value, list | tuple) else (value,)
        if self.kind is str:
            values = [part for each in values for part in (_parts(each) if isinstance(each, str) else (each,))]
        return tuple(self._read_one(each, show) for each in values)

    def _read_one(self, value: Any, show: Callable[[Any], str]) -> Any:
        if value is None and self.optional:
            return None
        converted = self._converted(value)
        expected = self.expected(converted)
        if expected is not None:
            raise self._refusal(value, expected, show(value))
        return converted

    def expected(self, value: Any) -> str | None:
        """The condition that the value violates, such as "at least 1"; None if the value is allowed."""
        if value is None and self.optional:
            return None
        if not (isinstance(value, Path) if self.kind is Path else type(value) is self.kind):
            return self._expected_type()
        if self.choices:
            return None if value in self.choices else list_words(self.choices)
        if isinstance(value, str):
            if self.rule.word is not None and self.rule.word(value) != value:
                return self.rule.example
            return self._expected_length(len(value))
        return self._expected_range(value)

    def _expected_type(self) -> str:
        if self.choices:
            return list_words(self.choices)
        return _TYPES[self.kind] if self.rule.parse is None else f"a value such as {self.rule.example}"

    def _expected_length(self, length: int) -> str | None:
        if self.rule.min_length is not None and length < self.rule.min_length:
            return f"at least {self.rule.min_length} character long"
        if self.rule.max_length is not None and length > self.rule.max_length:
            return f"at most {self.rule.max_length} characters long"
        return None

    def _expected_range(self, value: Any) -> str | None:
        rule = self.rule
        if rule.ge is not None and not value >= rule.ge:  # NaN is refused too
            return f"at least {self._bound(rule.ge)}"
        if rule.le is not None and not value <= rule.le:
            return f"at most {self._bound(rule.le)}"
        if rule.lt is not None and not value < rule.lt:
            return f"less than {self._bound(rule.lt)}"
        return None

    def _bound(self, limit: float) -> str:
        return format_bytes(int(limit)).replace(".00", "") if self.rule.parse is parse_bytes else f"{limit:.16g}"

    def _converted(self, value: Any) -> Any:
        """The value in the field's type; unchanged if it cannot be read."""
        if isinstance(value, str):
            return self._from_text(value.strip())
        if self.rule.json and isinstance(value, Mapping):
            try:
                return self._from_text(json.dumps(dict(value)))
            except (TypeError, ValueError, RecursionError):
                return value
        if isinstance(value, bool):
            return self.rule.synonyms.get(str(value).lower(), value)
        if isinstance(value, float) and self.kind in (int, str) and value.is_integer():
            value = int(value)
        if isinstance(value, int) and self.kind in (str, float):
            return self._from_text(str(value)) if abs(value) < 10**25 else value
        return value

    def _from_text(self, text: str) -> Any:
        if self.choices:
            meant = {_letters(word): word for word in self.choices}
            meant |= {_letters(word): choice for word, choice in self.rule.synonyms.items()}
            return meant.get(_letters(text), text)
        if self.kind is str:
            return (self.rule.word and self.rule.word(text)) or text
        if self.kind is Path:
            return Path(text) if text else text
        if self.kind is bool:
            return _BOOLEANS.get(text.lower(), text)
        if self.kind is int and _INTEGER.fullmatch(text):
            return int(text.partition(".")[0])  # exact, also beyond 2**53
        if self.rule.parse is not None:
            number = self.rule.parse(text)
            return text if number is None else number
        try:
            return float(text) if self.kind is float else text
        except ValueError:
            return text

    def _refusal(self, value: Any, expected: str, written: str) -> InvalidOption:
        text = value.strip() if isinstance(value, str) else ""
        if self.rule.parse is parse_bytes and (type(value) is int or _INTEGER.fullmatch(text)):
            written += " bytes"
        if self.kind is int and self.rule.parse is None and (thousands := _THOUSANDS.fullmatch(text)):
            hint = f"did you mean {int(thousands[1]) * 1024}?"  # as in the names of models: 128k tokens are 131,072
            return InvalidOption(self.name, f"{self.name} must be {expected}, not {written}", hint=hint)
        if self.choices and isinstance(value, str):
            if _letters(value) in map(_letters, self.rule.not_modelled):
                message = f"{self.name} {written} is not modelled yet"
                near = _found(self.rule.nearest, value)
                possible = f"nearest is {near}" if near else f"possible are {list_words(self.choices)}"
                return InvalidOption(self.name, message, hint=possible)
            elsewhere = _found(self.rule.elsewhere, value)
            if elsewhere is not None:
                return InvalidOption(self.name, f"{self.name} must be {expected}, not {written}", hint=elsewhere)
            close = get_close_matches(value.strip().lower()[:MAX_SHOWN], self.choices, n=1, cutoff=0.7)
            if close:
                return InvalidOption(
                    self.name, f"{self.name} must be {expected}, not {written}", hint=f"did you mean {close[0]}?"
                )
        return InvalidOption(self.name, f"{self.name} must be {expected}, not {written}", hint=self.hint)

    def written(self, value: Any) -> Any:
        """The value as a command line shows it: a size in bytes gets a unit."""
        return exact_size(value) if self.rule.parse is parse_bytes and value is not None else value

    @property
    def hint(self) -> str:
        """The field's help as the hint of an error."""
        return f"it is {self.rule.about}" if self.rule.about.startswith(("the ", "a ")) else self.rule.about


def read_fields(
    given: Mapping[str, Any], known: Mapping[str, Field], show: Callable[[Any], str] = shown
) -> dict[str, Any]:
    """The given values converted to the types of their fields. `given` may use aliases. Raises InvalidOption for the first wrong value,
    which it writes by `show`.
    """
    aliases = {alias: field.name for field in known.values() for alias in field.rule.aliases}
    values: dict[str, Any] = {}
    for written, value in given.items():
        name = aliases.get(written, written)
        if name not in known:
            raise unknown_option(written, (field for field in known if not known[field].rule.hidden))
        values[name] = known[name].read(value, show)
    return values


def check_required(given: Mapping[str, Any], known: Mapping[str, Field]) -> None:
    """Raises InvalidOption if a required field is not given."""
    for name, option in known.items():
        if option.required and name not in given:
            raise InvalidOption(name, f"{name} is missing", hint=option.hint)


def dashed(field: str) -> str:
    """The command line's option for a field.

    >>> dashed("micro_batch_size")
    '--micro-batch-size'
    """
    return "--" + field.replace("_", "-")


def as_words(name: str, value: Any) -> list[str]:
    """A field and its value as words of a command line; none for None and an empty tuple.

    >>> as_words("freeze", ("visual", "head")), as_words("use_peft", True), as_words("use_peft", False)
    (['--freeze', 'visual', 'head'], ['--use-peft'], ['--no-use-peft'])
    """
    if value is None or value == ():
        return []
    if isinstance(value, bool):
        return [dashed(name if value else f"no_{name}")]
    return [dashed(name), *(map(str, value) if isinstance(value, list | tuple) else [str(value)])]


def as_query(values: Mapping[str, Any]) -> dict[str, str]:
    """Values of fields as texts of a query string, which `Field.read` takes.

    >>> as_query({"gpus": 8, "freeze": ("visual.*", "embed_tokens")})
    {'gpus': '8', 'freeze': 'visual.* embed_tokens'}
    """
    return {name: " ".join(map(str, v)) if isinstance(v, list | tuple) else str(v) for name, v in values.items()}


_FIELDS: dict[type, Mapping[str, Field]] = {}


def fields_of(kind: type) -> Mapping[str, Field]:
    """The fields of a dataclass that are annotated with a Rule, in the order of their declaration."""
    if kind not in _FIELDS:
        _FIELDS[kind] = _read_declaration(kind)
    return _FIELDS[kind]


def _read_declaration(kind: type) -> Mapping[str, Field]:
    hints = get_type_hints(kind, include_extras=True)
    return {f.name: _field(f.name, hints[f.name], f.default) for f in fields(kind) if _rule(hints[f.name]) is not None}


def _rule(annotation: Any) -> Rule | None:
    return next((part for part in getattr(annotation, "__metadata__", ()) if isinstance(part, Rule)), None)


def _field(name: str, annotation: Any, default: Any) -> Field:
    bare = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    many = get_origin(bare) is tuple
    bare = get_args(bare)[0] if many else bare
    parts = get_args(bare) if get_origin(bare) in (Union, UnionType) else (bare,)
    (kind,) = (part for part in parts if part is not type(None))
    words = get_args(kind) if get_origin(kind) is Literal else ()
    rule = _rule(annotation)
    assert rule is not None
    return Field(
        name=name,
        kind=str if words else kind,
        choices=words,
        optional=type(None) in parts,
        required=default is MISSING,
        default=None if default is MISSING else default,
        rule=rule,
        many=many,
    )


def _found(words: Mapping[str, str], text: str) -> str | None:
    """The value of `words` whose key equals `text` apart from case, blanks, dashes and underscores; None if there is none."""
    return {_letters(word): value for word, value in words.items()}.get(_letters(text))


def _parts(text: str) -> list[str]:
    """The values in a text, which blanks or commas separate; the text itself if it contains nothing else."""
    return re.split(r"[\s,]+", text.strip(" ,\t\n")) if text.strip(" ,\t\n") else [text]


def _letters(text: str) -> str:
    """A word in lower case without blanks, dashes and underscores."""
    return re.sub(r"[\s_-]", "", text.lower())
