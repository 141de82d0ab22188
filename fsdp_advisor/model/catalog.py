"""The catalog: profiles of well-known models, recorded from their published configurations and shipped with the package.

`catalog.zip` holds `index.json` (one row per model), `configs.json` (their configurations) and one stored profile per model;
`recording.catalog` builds it from `architectures.yaml`.
"""

from __future__ import annotations

import difflib
import json
import re
import zipfile
from dataclasses import asdict, dataclass, replace
from functools import cache, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import cast

from fsdp_advisor.model.checkpoint_dtypes import dtype_of
from fsdp_advisor.model.lacking import LACKING, Lacking
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.store import load
from fsdp_advisor.model.tape_key import KeptTapes
from fsdp_advisor.model.tasks import task_of

PATH = Path(__file__).with_name("catalog.zip")
INDEX = "index.json"
CONFIGS = "configs.json"


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
    tapes: KeptTapes
    """Which of the model's tapes the catalog has (`architectures.yaml`)."""
    recording: int
    """The version of the recorder that made the tapes (`store.RECORDING`)."""

    @property
    def has_tapes(self) -> bool:
        return self.tapes != "none"

    def as_row(self) -> dict[str, object]:
        """The fields that `models` and its REST route show."""
        return {key: value for key, value in asdict(self).items() if key not in ("member", "tapes", "recording")}


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


def by_short_name(name: str) -> list[Entry]:
    """The models whose name without owner equals `name`, ignoring case, separators, formats of the weights and endings such as -hf.

    A name with an owner must be that of a copy: with a format at its end, or by an owner who publishes others' models under their names.

    >>> [entry.id for entry in by_short_name("llama-3-8b")]
    ['meta-llama/Meta-Llama-3-8B']
    >>> [entry.id for entry in by_short_name("unsloth/Qwen3.5-9B-GGUF:Q4_K_M")], by_short_name("someone/Qwen3.5-9B")
    (['Qwen/Qwen3.5-9B'], [])
    """
    owner = name.strip().lower().rpartition("/")[0]
    is_copy = owner in _COPIERS or without_format(name) != name
    return [] if owner and not is_copy else list(entries_by_short_name().get(_short(name), ()))


def without_format(name: str) -> str:
    """The name of a checkpoint without the end that says only how it stores the weights.

    GPTQ and AWQ are not left out: adapters are trained on their packed weights, whose layout is in the checkpoint's config.json.

    >>> without_format("Qwen3-8B-FP8"), without_format("Llama-3.1-8B-unsloth-bnb-4bit"), without_format("Qwen3-8B-AWQ")
    ('Qwen3-8B', 'Llama-3.1-8B', 'Qwen3-8B-AWQ')
    """
    return _FORMATS.sub("", name)


def unpacked(name: str) -> Entry | None:
    """The model whose weights a GPTQ or AWQ checkpoint of this name packs; None for other names.

    >>> [entry and entry.id for entry in map(unpacked, ("TheBloke/Llama-2-7B-GPTQ", "Qwen3-8B-AWQ", "Qwen3-8B"))]
    ['meta-llama/Llama-2-7b-hf', 'Qwen/Qwen3-8B', None]
    """
    found = re.fullmatch(r"(?:.*/)?(.+?)[\s._-](?:gptq|awq)\b.*", name.strip(), re.IGNORECASE)
    return next(iter(by_short_name(found[1])), None) if found else None


@lru_cache(maxsize=1)
def entries_by_short_name() -> dict[str, tuple[Entry, ...]]:
    """The entries by their short names (`_short`), which several may share."""
    found: dict[str, dict[str, Entry]] = {}
    for entry in entries():
        for name in (entry.id, *entry.aliases):
            for short in (_short(name), _short(name.replace("/", "_"))):  # copies may have the owner in their name
                found.setdefault(short, {})[entry.id] = entry
    return {name: tuple(named.values()) for name, named in found.items()}


def _short(name: str) -> str:
    """The name without owner, separators, the format of the weights and endings that do not change a model's shapes.

    >>> _short("meta-llama/Llama-2-7b-chat-hf")
    'llama27b'
    """
    tail = without_format(name.strip().lower().rpartition("/")[2])
    return re.sub(r"[\s_-]", "", re.sub(r"([\s_-](hf|pt|it|chat|instruct))+$", "", tail))


_MEANT = {
    "command a": "CohereLabs/c4ai-command-a-03-2025",
    "nemotron 3 nano": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "qwen 3 235b": "Qwen/Qwen3-235B-A22B",
    "qwen 3 30b": "Qwen/Qwen3-30B-A3B",
}
"""Names that mean one model, though names of others begin with them."""


def by_words(name: str) -> list[Entry]:
    """The models whose names match the words of `name`.

    The models whose names have exactly these words. If there are none, those whose names begin with them. If there are none either and the
    words include a number, those whose names begin with the first word and contain the others in this order. If there is none, the first
    word may be an owner's, or a number may be the model's count of parameters, which its name lacks.

    >>> [entry.id for entry in by_words("llama 4 scout fp8")], len(by_words("qwen3.5")) > 1, by_words("bert cased")
    (['meta-llama/Llama-4-Scout-17B-16E'], True, [])
    >>> [entry.id for entry in by_words("deepseek v3 671b")], by_words("deepseek v3 70b")
    (['deepseek-ai/DeepSeek-V3'], [])
    """
    wanted = _tokens(without_format(name))
    if "/" in name or not wanted or not wanted[0].isalpha():
        return []
    if (meant := find(_MEANT.get(" ".join(wanted), ""))) is not None:
        return [meant]
    named = [(e, _words(one)) for e in entries() for one in (e.id, *e.aliases)]
    whole = {e.id: e for e, tokens in named if tokens == wanted}
    begin = {e.id: e for e, tokens in named if tokens[: len(wanted)] == wanted}
    found = whole or begin or {e.id: e for e, tokens in named if _has_in_order(wanted, tokens)}
    if not found and wanted[0] in _owners() - {tokens[0] for _, tokens in named}:
        return by_words(" ".join(wanted[1:]))
    return list(found.values()) or _by_count(wanted)


def _by_count(wanted: list[str]) -> list[Entry]:
    """The models of the other words whose parameters are the only count of `wanted`, rounded to its digits."""
    counts = [word for word in wanted if re.fullmatch(rf"{_NUMBERS}[bm]", word)]
    if len(counts) != 1:
        return []
    number, unit = counts[0][:-1], {"b": 10**9, "m": 10**6}[counts[0][-1]]
    digits = len(number.partition(".")[2])
    named = by_words(" ".join(word for word in wanted if word != counts[0]))
    return [entry for entry in named if round(entry.parameters / unit, digits) == float(number)]


def _owners() -> set[str]:
    """The first words of owners, such as google and meta."""
    return {_tokens(e.id.partition("/")[0])[0] for e in entries()}


def lacking(name: str) -> Lacking | None:
    """The model of `LACKING` whose name begins with the words of `name`; None if there is none, or the catalog has such a model.

    >>> lacking("devstral 2").names, lacking("devstral small 2")
    (('Devstral-2-123B-Instruct-2512',), None)
    """
    wanted = _words(name)
    if (
        not wanted
        or not wanted[0].isalpha()
        or any(_begins(one, wanted) for e in entries() for one in (e.id, *e.aliases))
    ):
        return None
    return next((model for model in LACKING if any(_begins(one, wanted) for one in model.names)), None)


def _begins(name: str, wanted: list[str]) -> bool:
    """Whether the name without its owner begins with these words and numbers."""
    return _words(name)[: len(wanted)] == wanted


def name_with_words(entry: Entry, words: str) -> str:
    """The entry's id, or its first alias that has all these words and numbers if the id lacks some.

    >>> [name_with_words(entry, "qwen3.6") for entry in by_words("qwen3.6")]
    ['Qwen/Qwen3.6-27B', 'Qwen/Qwen3.6-35B-A3B']
    """
    wanted = set(_tokens(words))
    return next((one for one in (entry.id, *entry.aliases) if wanted <= set(_tokens(one))), entry.id)


def spelled(entry: Entry, name: str) -> str:
    """`name` as the hub spells it if it is one of the entry's names; else unchanged.

    >>> [spelled(find("gpt2"), name) for name in ("OpenAI-Community/GPT2", "someone/a-copy")]
    ['openai-community/gpt2', 'someone/a-copy']
    """
    return next((one for one in (entry.id, *entry.aliases) if one.lower() == name.lower()), name)


def _has_in_order(wanted: list[str], tokens: list[str]) -> bool:
    """Whether `tokens` begins with the first of `wanted` and contains the others in this order. False if `wanted` has no number,
    because words alone match too many models.
    """
    if all(word.isalpha() for word in wanted):
        return False
    rest = iter(tokens[1:])
    return tokens[:1] == wanted[:1] and all(word in rest for word in wanted[1:])


def _tokens(name: str) -> list[str]:
    """The words and numbers of a name in lower case. A count of parameters keeps its unit; 4.0 becomes 4, 3_5 becomes 3.5, and + plus.

    >>> _tokens("EXAONE-4.0-32B"), _tokens("InternVL3_5-8B"), _tokens("Command R+")
    (['exaone', '4', '32b'], ['internvl', '3.5', '8b'], ['command', 'r', 'plus'])
    """
    tokens = re.findall(_TOKENS, re.sub(r"(?<=\d)_(?=\d)", ".", name.lower().replace("+", " plus")))
    return [re.sub(r"(\.0)+$", "", token) for token in tokens]


def _words(name: str) -> list[str]:
    """The words and numbers of a model's name without its owner, and without a vendor before the model."""
    return _tokens(_VENDORS.sub("", name.rpartition("/")[2]))


def nearest(name: str) -> list[str]:
    """Up to three ids or aliases that are similar to `name`, most similar first.

    They contain all numbers of `name`, and all its words or similar ones: Qwen2.5-7B is not near Qwen2.5-VL-7B.

    >>> nearest("lamma 4 scout")
    ['meta-llama/Llama-4-Scout-17B-16E']
    """
    known = {e.id.lower(): e.id for e in entries()} | {a.lower(): a for e in entries() for a in e.aliases}
    wanted = name.strip().lower()
    tails = {key.rpartition("/")[2]: key for key in reversed(known)}  # the owner may be missing or wrong
    found = difflib.get_close_matches(wanted, known, n=9, cutoff=0.6)
    found += [tails[t] for t in difflib.get_close_matches(wanted.rpartition("/")[2], tails, n=9, cutoff=0.6)]
    near = [key for key in dict.fromkeys(found) if _has_words_of(key.rpartition("/")[2], wanted.rpartition("/")[2])]
    spelled = _spelled(name)
    return [known[key] for key in near[:3]] or [name_with_words(e, spelled) for e in by_words(spelled)[:3]]


def _spelled(name: str) -> str:
    """The words and numbers of `name`, with each word that no name of the catalog has replaced by the most similar one, if there is one."""
    known = {word for e in entries() for one in (e.id, *e.aliases) for word in _words(one) if word.isalpha()}
    words = [
        word
        if word in known or not word.isalpha()
        else next(iter(difflib.get_close_matches(word, known, n=1, cutoff=_SIMILAR)), word)
        for word in _tokens(name)
    ]
    return " ".join(words)


def family(name: str) -> list[str]:
    """Up to four ids or aliases of models whose names begin with as many words and numbers of `name` as possible.

    Those that contain most of its words and numbers come first; among these, the nearest version, then the most similar.

    >>> family("nemotron-h 47b"), family("nothing 7b")
    (['nvidia/Nemotron-H-8B-Base-8K', 'nvidia/Nemotron-H-56B-Base-8K'], [])
    >>> family("llama 5")[:2]
    ['meta-llama/Llama-4-Scout-17B-16E', 'meta-llama/Llama-4-Maverick-17B-128E']
    """
    wanted = _words(name)
    if not wanted or len(wanted[0]) < 3 or not wanted[0].isalpha():
        return []
    shared: dict[int, dict[str, tuple[int, float, float, str]]] = {}
    for entry in entries():
        for one in (entry.id, *entry.aliases):
            tail = _VENDORS.sub("", one.rpartition("/")[2])
            tokens = _tokens(tail)
            count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(wanted, tokens, strict=False)))
            words = len({*wanted} & {*tokens})
            ratio = difflib.SequenceMatcher(None, tail.lower(), name.lower()).ratio()
            likeness = (words, -abs(_version(wanted) - _version(tokens)), ratio, one)
            found = shared.setdefault(count, {})
            found[entry.id] = max(likeness, found.get(entry.id, likeness))
    most = max(shared)
    likest = sorted(shared[most].items(), key=lambda item: item[1], reverse=True)[:4] if most else []
    return [id if _begins(id, wanted[:most]) else alias for id, (*_, alias) in likest]


def _version(tokens: list[str]) -> float:
    """The first number of a name that is no count of parameters, as of 3.1 of Llama-3.1-8B; 0 without one."""
    numbers = (re.match(r"\d+(\.\d+)?$", token) for token in tokens)
    return next((float(number[0]) for number in numbers if number), 0.0)


def _has_words_of(candidate: str, wanted: str) -> bool:
    """Whether the candidate has all numbers of `wanted`, and a similar word for each of its words. 9 and 9B are two numbers."""
    candidate = re.sub(r"(?<=\d)_(?=\d)", ".", candidate)
    numbers, words = (re.findall(pattern, candidate) for pattern in (_COUNTS, _WORDS))
    return all(number in numbers for number in re.findall(_COUNTS, wanted)) and all(
        difflib.get_close_matches(word, words, n=1, cutoff=_SIMILAR) for word in re.findall(_WORDS, wanted)
    )


_NUMBERS, _WORDS = r"\d+(?:\.\d+)*", r"[^\W\d_]+"
_COUNTS = rf"{_NUMBERS}(?:[bm](?![^\W\d_]))?"
_TOKENS = rf"{_COUNTS}|{_WORDS}"
_VENDORS = re.compile(r"^(nvidia|c4ai|meta|ai21)-", re.IGNORECASE)
"""Prefixes of names that repeat the model's vendor."""
_COPIERS = (
    "unsloth", "nousresearch", "mlx-community", "redhatai", "neuralmagic", "llamafactory", "llm-research", "ai-modelscope", "zhipuai",
    "01ai", "paddlepaddle", "tencent-hunyuan", "openai-mirror", "nv-community", "swift", "xorbits", "cohereforai", "thudm",
)  # fmt: skip
"""Owners who publish others' models under the names that these have, ModelScope's among them, and former names of owners."""
_FORMATS = re.compile(
    r"([\s.:_-]+(unsloth|gguf|mlx|bnb|(bnb[\s_-]*)?[3468]bit|bf16|fp16|(nv)?fp[48](-(dynamic|block|hybrid))?|mxfp[48]|nf4|dynamic"
    r"|quantized|unquantized|qat|w[48]a(8|16|fp8)|int[48]|ud|i?q[1-8]_(0|1|k|k_xl|k_[sml]|xxs|xs|s|m|nl)|i1))+$",
    re.IGNORECASE,
)
_SIMILAR = 0.75
"""The ratio of difflib from which a word counts as a misspelling of another: lama and llama have 0.89."""


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


@cache  # unbounded: other caches keep profiles alive, so evicting one would load it twice
def profile(entry: Entry) -> Profile:
    """The profile of a model of the catalog."""
    return replace(load(stored(entry)), checkpoint_dtype=dtype_of(entry.id))


def configurations() -> dict[str, dict[str, dict[str, object]]]:
    """The archive's configurations. `configs`: by model id. `defaults`: the default values of each model type's configuration."""
    with zipfile.ZipFile(PATH) as archive:
        return cast("dict[str, dict[str, dict[str, object]]]", json.loads(archive.read(CONFIGS)))


def stored(entry: Entry) -> bytes:
    """The stored profile of a model of the catalog."""
    with zipfile.ZipFile(PATH) as archive:
        return archive.read(entry.member)
