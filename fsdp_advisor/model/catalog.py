"""The shipped profiles: well-known models, recorded from their published architecture numbers.

`catalog.zip` holds `index.json` (one row per model) and one stored profile per model; `recording.catalog` builds it from
`architectures.yaml`.
"""

from __future__ import annotations

import json
import re
import zipfile
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path

from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.store import load
from fsdp_advisor.model.tasks import task_of

PATH = Path(__file__).with_name("catalog.zip")
INDEX = "index.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """One model of the catalog."""

    id: str
    aliases: tuple[str, ...]
    task: str
    parameters: int
    max_seq_len: int | None
    model_type: str
    source: str
    member: str
    experts: int | None

    def as_row(self) -> dict[str, object]:
        """What lists show."""
        return {key: value for key, value in asdict(self).items() if key != "member"}


@lru_cache(maxsize=1)
def entries() -> tuple[Entry, ...]:
    """All models, in the order of `architectures.yaml`."""
    with zipfile.ZipFile(PATH) as archive:
        rows = json.loads(archive.read(INDEX))
    return tuple(Entry(aliases=tuple(row.pop("aliases")), **row) for row in rows)


@lru_cache(maxsize=1)
def _by_name() -> dict[str, Entry]:
    names = {name.lower(): e for e in entries() for name in e.aliases}
    return names | {e.id.lower(): e for e in entries()}


def find(name: str) -> Entry | None:
    """The model of this hub id or alias, without regard to case."""
    return _by_name().get(name.strip().lower())


def nearest(name: str) -> list[str]:
    """Up to three ids that look like `name`."""
    import difflib

    known = {e.id.lower(): e.id for e in entries()} | {a.lower(): a for e in entries() for a in e.aliases}
    wanted = name.strip().lower()
    found = difflib.get_close_matches(wanted, known, n=3, cutoff=0.6)
    if not found:  # the owner may be missing or wrong
        tails = {k.rpartition("/")[2]: k for k in reversed(known)}
        found = [tails[t] for t in difflib.get_close_matches(wanted.rpartition("/")[2], tails, n=3, cutoff=0.6)]
    return [known[f] for f in found]


def search(pattern: str | None = None) -> list[Entry]:
    """Models that every word of `pattern` is said of: in an id, an alias, a type or what such models are called.

    Case and dashes make no difference, and numbers are whole: `llama3` is said of Llama-3.1 and not of CodeLlama-34b, `7b` of
    Mixtral-8x7B and not of gemma-2-27b.
    """
    words = [_said(word) for word in (pattern or "").split()]
    return [e for e in entries() if all(any(word.search(name) for name in _names(e)) for word in words)]


def _said(word: str) -> re.Pattern[str]:
    parts = re.findall(r"\d[\d.]*|[^\W\d_]+|[^\w-]+", word)
    whole = r"[\s_-]*".join(map(re.escape, parts))
    begins, ends = word[:1].isdigit(), word[-1:].isdigit()
    return re.compile((r"(?<![\d.])" if begins else "") + whole + (r"(?!\d)" if ends else ""), re.IGNORECASE)


def _names(entry: Entry) -> tuple[str, ...]:
    """All that a model may be searched by."""
    experts = ("moe", "mixture-of-experts") if entry.experts else ()
    return (entry.id, *entry.aliases, entry.model_type, entry.task, *task_of(entry.task).words, *experts)


@cache  # one copy of each: what is computed of a profile holds it, so that a forgotten one would be there twice
def profile(entry: Entry) -> Profile:
    """The shipped profile of a model."""
    with zipfile.ZipFile(PATH) as archive:
        return load(archive.read(entry.member))
