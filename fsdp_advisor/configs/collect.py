"""Collects the settings of one configuration file: each key is read, ignored or not modelled."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from reprlib import Repr
from typing import Any, Literal

from fsdp_advisor.configs.known_keys import is_unknown, known_keys
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.config_reading import ConfigReading
from fsdp_advisor.job.unknown_options import DATA_PARALLEL, topic_of

INACTIVE: tuple[Any, ...] = (None, False, "", "none", "None", "no", "false", "auto", "default", 0, 1, [], {})
"""Values with which a key switches nothing on. 1 is the degree of an unused parallelism."""

MISSPELT = 0.92
"""The least similarity (difflib's ratio) with which an unread key is taken for a misspelling of a key that a reader knows."""

LIKE = 0.85
"""The least similarity of an unknown key to a key of the consumer for which the report suggests a misspelling."""

UNRESOLVED = re.compile(r"\$[\w{@*]")
"""Matches the beginning of a variable with unknown value, in a shell script or in YAML."""


class Collector:
    """The settings of one file, by key, from which a reader collects options.

    A reader takes each key that it knows and sets options of a request. `defaults` apply to options that no file sets, and `guesses` to
    options for which no file has a default either. `mixed` and `dtype` are two options that together are a request's precision.
    `checkpoints`: who checkpoints activations, FSDP's plugin or the Trainer. `loads_on_rank_0`: whether rank 0 loads the weights for
    all ranks of FSDP; None without FSDP. `layer_classes`: the classes that a setting makes FSDP units.
    `references` are other configuration files that a setting names, by key. The prefix `optional_prefix` of keys may be left out, as the
    consumer allows; reports name keys with it.
    """

    def __init__(self, file: str, format: str, keys: Mapping[str, Any], optional_prefix: str = "") -> None:
        self.file, self.format = file, format
        whole = [str(key) for key in keys if optional_prefix and str(key).startswith(optional_prefix)]
        self._whole = {key.removeprefix(optional_prefix): key for key in whole}
        self._pending = {str(key).removeprefix(optional_prefix): value for key, value in keys.items()}
        self._given = set(self._pending)
        self._asked: set[str] = set()
        self.options: dict[str, Any] = {}
        self.defaults: dict[str, tuple[Any, str]] = {}
        self.guesses: dict[str, tuple[Any, str]] = {}
        self.checkpoints: set[Literal["FSDP", "Trainer"]] = set()
        self.loads_on_rank_0: bool | None = None
        self.layer_classes: list[str] = []
        self.references: list[str] = []
        self.missing: list[str] = []
        self._read: list[str] = []
        self._ignored: list[str] = []
        self._unknown: list[str] = []
        self._not_modelled: list[str] = []
        self._refused: dict[str, str] = {}  # sentence -> hint
        self._assumed: list[str] = []

    def __contains__(self, key: str) -> bool:
        return key in self._pending

    def _written(self, key: str) -> str:
        """The key as the file spells it."""
        return self._whole.get(key, key)

    def peek(self, key: str) -> Any:
        """The value of a key, without counting it as read; None if there is none, or if it is a variable of unknown value."""
        self._asked.add(key)
        return None if self.is_unknown(key) else self._pending.get(key)

    def is_unknown(self, key: str) -> bool:
        """Whether the value of a key is a variable of unknown value. The reading reports such a variable if a reader asked for its key."""
        value = self._pending.get(key)
        return isinstance(value, str) and UNRESOLVED.search(value) is not None

    def take(self, key: str, shown: str | None = None) -> Any:
        """The value of a key, which then counts as read; None if the file has none, or if its value is not known."""
        self._asked.add(key)
        if key not in self._pending or self.is_unknown(key):
            return None
        value = self._pending.pop(key)
        self._read.append(f"{shown or self._written(key)}: {brief(value)}")
        return value

    def peek_number(self, key: str) -> int | None:
        """The whole number of a key, without counting it as read; None for a missing key, null or "auto".

        Raises UsageError for any other value.
        """
        value = self.peek(key)
        if value is None or value == "auto":
            return None
        try:
            found = int(float(value)) if not isinstance(value, bool) else None
        except (TypeError, ValueError, OverflowError):
            found = None
        if found is None or found != float(value):
            raise UsageError(f"{self.file}: {key} is {brief(value)}, not a whole number", hint="correct the file")
        return found

    def number(self, key: str, option: str | None = None) -> int | None:
        """The number at `key`, as `peek_number` returns it. The key counts as read. The number is set as `option` if that is given."""
        found = self.peek_number(key)
        if found is not None:
            self.take(key)
        if found is not None and option is not None:
            self.options[option] = found
        return found

    def peek_names(self, key: str) -> list[str]:
        """The names that a key lists, with commas between them if it is text, without counting it as read; empty for a missing key.

        Raises UsageError for any other value.
        """
        value = self.peek(key) or []
        if not isinstance(value, str | list | tuple):
            raise UsageError(f"{self.file}: {key} is {brief(value)}, not a list of names", hint="correct the file")
        return value.split(",") if isinstance(value, str) else [str(name) for name in value]

    def text(self, key: str) -> str:
        """The text of a key that the file must have. Raises UsageError for another kind of value."""
        value = self.take(key)
        if not isinstance(value, str) or not value:
            raise UsageError(f"{self.file}: {key} is {brief(value)}, not a name", hint="correct the file")
        return value

    def flag(self, key: str) -> bool | None:
        """Whether a key is true; None if the file does not have it."""
        value = self.peek(key)
        if value is None:
            return None
        self.take(key)
        return truth(value)

    def replace(self, key: str, value: Any) -> None:
        """Give a key another value."""
        self._pending[key] = value

    def section(self, key: str, optional_prefix: str = "") -> dict[str, Any]:
        """The keys of a section, which are then also keys of the file as `section.key`; empty if there is no such section.

        `optional_prefix`: a prefix that keys of the section may have, and that the consumer ignores.
        """
        value = self.peek(key)
        if not isinstance(value, Mapping):
            return {}
        del self._pending[key]
        short = {name: f"{key}.{str(name).removeprefix(optional_prefix)}" for name in value}
        self._whole |= {short[name]: f"{key}.{name}" for name in value}
        inner = {short[name]: item for name, item in value.items()}
        self._pending |= inner
        self._given |= set(inner)
        return inner

    def default(self, option: str, value: Any, why: str = "") -> None:
        """Assume a value for an option that no file sets. `why` is reported, unless it is empty."""
        self.defaults.setdefault(option, (value, why))

    def guess(self, option: str, value: Any, why: str) -> None:
        """Assume a value for an option that no file sets and for which no reader has a default."""
        self.guesses.setdefault(option, (value, why))

    def omits_key(self, key: str, what: str) -> None:
        """Report a key as not modelled if the file has it. `what` names the key's subject in the message."""
        if key in self._pending:
            value = self._pending.pop(key)
            text = f"{self._written(key)}: {brief(value)} ({what})"
            self._not_modelled.append(text)
            if "parallelism" in what and has_degree(value):
                self._refused[text] = DATA_PARALLEL

    def refuses(self, sentence: str, hint: str) -> None:
        """Report a setting with which the job is another one than any that is modelled. `hint`: what is possible."""
        self._not_modelled.append(sentence)
        self._refused[sentence] = hint

    def omits_active(self, what: str, *keys: str) -> None:
        """Report those of the keys as not modelled that the file switches on. `what` names their subject in the message."""
        for key in keys:
            if key in self._pending and active(self._pending[key]):
                self.omits_key(key, what)

    def reads(self, text: str) -> None:
        """Report something that was read and is no key with a value, such as a call in Python code."""
        self._read.append(text)

    def omits(self, sentence: str) -> None:
        """Report an effect that is not modelled, whichever key causes it."""
        self._not_modelled.append(sentence)

    def assume(self, sentence: str) -> None:
        """Report an assumption."""
        self._assumed.append(sentence)

    def refer(self, key: str) -> None:
        """Note the file that a key names, to be read too."""
        name = self.take(key)
        if isinstance(name, str) and name:
            self.references.append(name)

    def reading(self) -> ConfigReading:
        """The result of the reading. Keys that were not read are reported as not modelled if `topic_of` knows them, as unknown if the
        consumer does not have them, else as ignored.
        """
        for key, value in self._pending.items():
            if key in self._asked and self.is_unknown(key):
                self._not_modelled.append(f"{self._written(key)}: {brief(value)} (a variable whose value is not known)")
                continue
            topic = topic_of(key.rsplit(".", 1)[-1])
            near = difflib.get_close_matches(key, self._asked - self._given, n=1, cutoff=MISSPELT)
            if near and active(value):
                self._not_modelled.append(f"{self._written(key)}: {brief(value)} (did you mean {near[0]}?)")
            elif topic is not None and active(value):
                self._not_modelled.append(f"{self._written(key)}: {brief(value)} ({topic})")
                if "parallelism" in topic and has_degree(value):
                    self._refused[self._not_modelled[-1]] = DATA_PARALLEL
            elif is_unknown(self.format, key):
                like = near or difflib.get_close_matches(key, self._asked | known_keys(self.format), n=1, cutoff=LIKE)
                self._unknown.append(self._written(key) + (f" (did you mean {like[0]}?)" if like else ""))
            else:
                self._ignored.append(self._written(key))
        self._pending = {}
        return ConfigReading(
            file=self.file,
            format=self.format,
            read=tuple(self._read),
            ignored=tuple(self._ignored),
            unknown=tuple(self._unknown),
            not_modelled=tuple(dict.fromkeys(self._not_modelled)),
            refused=tuple(self._refused.items()),
            assumed=tuple(self._assumed),
            missing=tuple(self.missing),
            layer_classes=tuple(self.layer_classes),
        )


def active(value: Any) -> bool:
    """Whether a value switches something on."""
    return value is True or not any(value is no or (type(value) is type(no) and value == no) for no in INACTIVE)


def has_degree(value: Any) -> bool:
    """Whether a value, or one in a section, is a number above 1: the degree of a parallelism that is used.

    >>> has_degree("2"), has_degree({"autotp_size": 4}), has_degree(1), has_degree(True)
    (True, True, False, False)
    """
    if isinstance(value, Mapping):
        return any(map(has_degree, value.values()))
    return str(value).strip().isdecimal() and int(value) > 1


def truth(value: Any) -> bool:
    """A value of YAML, JSON or a command line as true or false.

    >>> truth("True"), truth("no"), truth(0)
    (True, False, False)
    """
    return value.strip().lower() in ("true", "yes", "on", "1") if isinstance(value, str) else bool(value)


_BRIEF = Repr()
_BRIEF.maxlevel, _BRIEF.maxstring, _BRIEF.maxother = 3, 100, 100


def brief(value: Any) -> str:
    """A value as text of at most 60 characters. It avoids writing whole containers, because aliases in YAML can make them exponentially
    long.
    """
    whole = str(value) if isinstance(value, str | int | float | bool) or value is None else _BRIEF.repr(value)
    text = "".join(c if c.isprintable() else "?" for c in whole[:100])
    return text if len(text) <= 60 else text[:57] + "..."
