"""The catalog: profiles of well-known models, recorded from their published configurations and shipped with the package.

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
        """The fields that `models` and its REST route show."""
        return {key: value for key, value in asdict(self).items() if key != "member"}


@lru_cache(maxsize=1)
def entries() -> tuple[Entry, ...]:
    """All models, in the order of `architectures.yaml`."""
    with zipfile.ZipFile(PATH) as archive:
        rows = json.loads(archive.read(INDEX))
    return tuple(Entry(aliases=tuple(row.pop("aliases")), **row) for row in rows)


@lru_cache(maxsize=1)
def entries_by_name() -> dict[str, Entry]:
    """Every model by its lower-case id and aliases."""
    names = {name.lower(): e for e in entries() for name in e.aliases}
    return names | {e.id.lower(): e for e in entries()}


def find(name: str) -> Entry | None:
    """The model with this hub id or alias, ignoring case; None if there is none."""
    return entries_by_name().get(name.strip().lower())


def nearest(name: str) -> list[str]:
    """Up to three ids or aliases that are similar to `name`, most similar first."""
    import difflib

    known = {e.id.lower(): e.id for e in entries()} | {a.lower(): a for e in entries() for a in e.aliases}
    wanted = name.strip().lower()
    found = difflib.get_close_matches(wanted, known, n=3, cutoff=0.6)
    if not found:  # the repository's owner may be missing or wrong
        tails = {k.rpartition("/")[2]: k for k in reversed(known)}
        found = [tails[t] for t in difflib.get_close_matches(wanted.rpartition("/")[2], tails, n=3, cutoff=0.6)]
    return [known[f] for f in found]


def search(pattern: str | None = None) -> list[Entry]:
    """The models that match every word of `pattern` by id, alias, model type, task or a word for their task.

    The search ignores case and dashes. Numbers must match as a whole: `llama3` finds Llama-3.1 but not CodeLlama-34b, and `7b`
    finds Mixtral-8x7B but not gemma-2-27b.
    """
    words = [_word_pattern(word) for word in (pattern or "").split()]
    return [e for e in entries() if all(any(word.search(name) for name in _names(e)) for word in words)]


def _word_pattern(word: str) -> re.Pattern[str]:
    parts = re.findall(r"\d[\d.]*|[^\W\d_]+|[^\w-]+", word)
    whole = r"[\s_-]*".join(map(re.escape, parts))
    begins, ends = word[:1].isdigit(), word[-1:].isdigit()
    return re.compile((r"(?<![\d.])" if begins else "") + whole + (r"(?!\d)" if ends else ""), re.IGNORECASE)


def _names(entry: Entry) -> tuple[str, ...]:
    """The texts in which a search looks for a model."""
    experts = ("moe", "mixture-of-experts") if entry.experts else ()
    return (entry.id, *entry.aliases, entry.model_type, entry.task, *task_of(entry.task).words, *experts)


@cache  # other caches keep profiles alive; an evicted profile would be loaded a second time
def profile(entry: Entry) -> Profile:
    """The profile of a model of the catalog."""
    with zipfile.ZipFile(PATH) as archive:
        return load(archive.read(entry.member))
