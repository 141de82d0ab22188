"""Random data sets: `datasets.load_dataset` returns random texts in the columns that the script uses if a data set is not on this
machine.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fsdp_advisor.rehearsal.inside.import_hooks import after_import
from fsdp_advisor.rehearsal.inside.tokenizers import word

ROWS = 512
WORDS = int(os.environ.get("REHEARSAL_DATA_WORDS") or 4096)
"""Words of a text: enough to fill the usual maximum sequence lengths. For longer sequences set the variable."""
TURNS = 4
MARK = "random data of a rehearsal"
SPLITS = ("train", "validation", "test")
_WORDS_FROM, _WORDS_TO = 10, 1000
_DISTINCT = 16
COLUMNS = {
    "alpaca": ("instruction", "input", "output", "text"), "dolly": ("instruction", "context", "response", "category"),
    "ultrachat": ("prompt", "prompt_id", "messages"), "capybara": ("messages",), "openhermes": ("conversations",),
    "sharegpt": ("conversations",), "slimorca": ("conversations",), "ultrafeedback": ("prompt", "chosen", "rejected"),
    "hh-rlhf": ("chosen", "rejected"), "gsm8k": ("question", "answer"), "imdb": ("text", "label"), "tldr": ("prompt", "completion"),
    "squad": ("id", "title", "context", "question", "answers"), "mrpc": ("sentence1", "sentence2", "label", "idx"),
    "metamathqa": ("type", "query", "original_question", "response"), "sst2": ("sentence", "label", "idx"),
    "samsum": ("id", "dialogue", "summary"), "code_alpaca": ("prompt", "completion"),
}  # fmt: skip
"""The columns of well-known data sets, by a part of their names. Other data sets begin with the column `text`.

Source: the data sets' pages on the hub.
"""


def use_random_data() -> None:
    """Replace data sets of the hub by random ones, if the rehearsal's settings say so."""
    if os.environ.get("REHEARSAL_RANDOM_DATA") == "1":
        after_import("datasets", _answer_datasets)


def _answer_datasets(datasets: Any) -> None:
    original, from_disk = datasets.load_dataset, datasets.load_from_disk

    def load_dataset(path: str, name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        if Path(path).exists() or kwargs.get("data_files"):
            return original(path, name, *args, **kwargs)
        return _splits(datasets, f"{path} {name or ''}", kwargs.get("split"), bool(kwargs.get("streaming")))

    def load_from_disk(dataset_path: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(dataset_path).exists():
            return from_disk(dataset_path, *args, **kwargs)
        return _splits(datasets, str(dataset_path), None, False)

    for module in (datasets, datasets.load):
        module.load_dataset, module.load_from_disk = load_dataset, load_from_disk
    _add_missing_columns(datasets.Dataset)


def _splits(datasets: Any, name: str, split: Any, streaming: bool) -> Any:
    if split is None:
        kind = datasets.IterableDatasetDict if streaming else datasets.DatasetDict
        return kind({each: _splits(datasets, name, each, streaming) for each in SPLITS})
    if isinstance(split, (list, tuple)):
        return [_splits(datasets, name, each, streaming) for each in split]
    columns = next((columns for part, columns in COLUMNS.items() if part in name.lower()), ("text",))
    made = datasets.Dataset.from_dict({column: column_values(column, ROWS) for column in columns})
    made.info.description = MARK
    return made.to_iterable_dataset() if streaming else made


def column_values(column: str, rows: int) -> list[Any]:
    """Values for a column, by its name: texts, conversations, token ids, labels or numbers."""
    draw = random.Random(column)
    kinds = [_value(column, draw) for _ in range(min(rows, _DISTINCT))]
    return [kinds[i % len(kinds)] for i in range(rows)]


def _value(column: str, draw: random.Random) -> Any:
    if column in ("messages", "conversation", "conversations"):
        roles = ("user", "assistant")
        keys = ("from", "value") if column == "conversations" else ("role", "content")
        return [dict(zip(keys, (roles[i % 2], _text(draw, WORDS // TURNS)), strict=True)) for i in range(TURNS)]
    if column in ("input_ids", "labels", "token_ids", "tokens"):
        return [draw.randrange(_WORDS_FROM, _WORDS_TO) for _ in range(WORDS)]
    if column in ("attention_mask", "loss_mask"):
        return [1] * WORDS
    if column in ("label", "idx", "prompt_id", "id", "index"):
        return draw.randrange(2)
    if "score" in column or column in ("reward", "weight"):
        return draw.random()
    return _text(draw, WORDS if column in ("text", "content", "chosen", "rejected") else WORDS // 2)


def _text(draw: random.Random, words: int) -> str:
    """Random words, each followed by a space, so that texts that a script joins still consist of separate words."""
    return "".join(f"{word(i)} " for i in draw.choices(range(_WORDS_FROM, _WORDS_TO), k=words))


class _Probe(dict[str, Any]):
    """A row, or a batch of one row, that notes the columns that a function reads from it."""

    def __init__(self, row: dict[str, Any], batched: bool) -> None:
        super().__init__(row)
        self.batched = batched
        self.missing: list[str] = []

    def __missing__(self, column: str) -> Any:
        self.missing.append(column)
        self[column] = column_values(column, 1) if self.batched else column_values(column, 1)[0]
        return self[column]


def _add_missing_columns(dataset: Any) -> None:
    """Patch the data set's methods that name columns, so that they add columns that the random data set lacks."""
    columns_of: dict[str, Callable[..., Iterable[str]]] = {
        "map": _columns_of_function, "filter": _columns_of_function,
        "remove_columns": _named, "select_columns": _named,
        "rename_column": lambda _, original_column_name, *args, **kwargs: [original_column_name],
        "rename_columns": lambda _, column_mapping, *args, **kwargs: list(column_mapping),
        "__getitem__": lambda _, key: [key] if isinstance(key, str) else [],
    }  # fmt: skip
    for method, columns in columns_of.items():
        setattr(dataset, method, _with_columns(getattr(dataset, method), columns))


def _with_columns(method: Callable[..., Any], columns: Callable[..., Iterable[str]]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.info.description == MARK:
            for column in dict.fromkeys(columns(self, *args, **kwargs)):
                if column not in self.column_names:
                    self = self.add_column(column, column_values(column, len(self)))
        return method(self, *args, **kwargs)

    call.__doc__ = method.__doc__
    return call


def _named(self: Any, column_names: Any = (), *args: Any, **kwargs: Any) -> list[str]:
    return [column_names] if isinstance(column_names, str) else list(column_names)


def _columns_of_function(
    self: Any, function: Any = None, with_indices: bool = False, *args: Any, batched: bool = False, **kwargs: Any
) -> list[str]:
    named = [*_named(self, kwargs.get("input_columns") or ()), *_named(self, kwargs.get("remove_columns") or ())]
    if function is None or kwargs.get("input_columns") or not len(self):
        return named
    row = self[:1] if batched else self[0]
    if not isinstance(row, dict):  # the script has already converted the data set to Arrow's or NumPy's format
        return named
    probe = _Probe(row, batched)
    first = [[0] if batched else 0] if with_indices else []
    try:
        function(probe, *first, **(kwargs.get("fn_kwargs") or {}))
    except Exception:  # the real call will raise it again
        return [*named, *probe.missing]
    return [*named, *probe.missing]
