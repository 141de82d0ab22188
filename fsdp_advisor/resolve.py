"""From what a user calls a model to its profile: a catalogued id, a config.json on disk or on the hub, a parameter count.

Configurations are hostile until shown otherwise: they are bounded and checked here, before torch is imported to build the
model. Code that a repository brings along is never run.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import stat
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from urllib.parse import urlsplit

from fsdp_advisor.errors import (
    AdvisorError,
    HubError,
    MissingExtra,
    NotRecordable,
    UnknownModel,
    UnreadableConfig,
    UsageError,
)
from fsdp_advisor.models import cache, catalog
from fsdp_advisor.models.profile import Profile, Tape, Variant
from fsdp_advisor.units import parse_count

if TYPE_CHECKING:
    from fsdp_advisor.tracing import Recorder

Config = dict[str, Any]

MAX_CONFIG_BYTES = 2**20
MAX_DEPTH = 32
MAX_INTEGER = 10**12
MAX_MODULES = 200_000
MIN_COUNT, MAX_COUNT = 1000, 10**15
HUB_TIMEOUT_SECONDS = 10

_CONFIG_HINT = "a model is described by the config.json that transformers saves with it"
_NAMES_HINT = (
    "a model is an id listed by `fsdp-advisor models`, a hub id, a config.json or its directory, or a count such as 7B"
)
_REPO_PART = r"[A-Za-z0-9_](?:[\w.-]{0,94}[A-Za-z0-9_])?"
_REPO_ID = re.compile(rf"(?:{_REPO_PART}/)?{_REPO_PART}", re.ASCII)
_NUMBER_SHAPED = re.compile(r"[-+]?\.?\d[\d.,_]*(?:e[-+]?\d*)?\s*[kmbt]?", re.IGNORECASE | re.ASCII)
_PATH_SHAPED = re.compile(r"[./~]|.*\.json$|.*\\|.*/.*/", re.DOTALL)


@dataclass(frozen=True)
class Resolved:
    """A model found. `profile` is None for a bare parameter count, which says nothing else about the model."""

    name: str
    source: Literal["catalog", "config", "hub", "count"]
    profile: Profile | None
    parameters: int
    trainable_parameters: int
    notes: tuple[str, ...] = ()

    def tape(self, variant: Variant) -> Tape:
        """The tape of a variant: shipped or kept from before, else recorded now (needs torch) and kept."""
        if self.profile is None:
            raise UsageError(f"{self.name} is a bare parameter count: it has no layers", hint="name a model")
        tapes = self.profile.tapes
        if variant.key not in tapes:
            with _RECORDING:
                if variant.key not in tapes:
                    tapes[variant.key] = self._kept(variant) or self._recorded(variant)
        return tapes[variant.key]

    @property
    def _task(self) -> str | None:
        return self.profile.task if self.profile and self.source == "catalog" else None  # others' task is derived

    def _kept(self, variant: Variant) -> Tape | None:
        assert self.profile is not None
        kept = cache.fetch(self.profile.config, self._task)
        return kept.tapes.get(variant.key) if kept and _same_inventory(kept, self.profile) else None

    def _recorded(self, variant: Variant) -> Tape:
        assert self.profile is not None
        where = "catalog" if self.source == "catalog" else "cache"
        what = f"{self.name}: {_described(variant)} is not in the {where}"
        recorder = _recorder_of(self.profile.config, self.name, self._task, what)
        if not _same_inventory(recorder.profile, self.profile):
            raise NotRecordable(
                f"{what}, and {_versions(recorder.profile)} build the model otherwise than {_versions(self.profile)}",
                hint=f"pip install transformers=={self.profile.versions.get('transformers')}",
            )
        tape = recorder.tape(variant)
        recorder.profile.tapes[variant.key] = tape
        cache.keep(recorder.profile, self._task)
        return tape


def resolve(name: str, *, allow_hub: bool = True, allow_paths: bool = True) -> Resolved:
    """The model that `name` means.

    In order: a catalogued id or alias; a file or directory on disk (if `allow_paths`); a bare parameter count; the hub (if
    `allow_hub`). Raises UnknownModel, UsageError, UnreadableConfig, HubError or MissingExtra, each with a hint.
    """
    wanted = name.strip()
    if not wanted or len(wanted) > 1000 or not wanted.isprintable():
        raise UnknownModel(wanted[:80], hint=_NAMES_HINT)
    if (entry := catalog.find(wanted)) is not None:
        return _catalogued(entry, wanted)
    if allow_paths and (path := _config_path(wanted)) is not None:
        return _configured(_read_file(path, wanted), wanted, "config")
    if _NUMBER_SHAPED.fullmatch(wanted) or parse_count(wanted) is not None:
        return _counted(wanted)
    if allow_paths and _PATH_SHAPED.match(wanted):
        raise UnknownModel(wanted[:200], hint="there is no such file or directory")
    if not allow_hub or not _can_be_repo_id(wanted):
        raise UnknownModel(wanted[:200], hint=_did_you_mean(wanted) or _NAMES_HINT)
    data, notes = _download(wanted)
    return _configured(data, wanted, "hub", notes)


def _catalogued(entry: catalog.Entry, wanted: str) -> Resolved:
    profile = catalog.profile(entry)
    notes: tuple[str, ...] = ()
    if "/" in wanted and wanted.lower() != entry.id.lower():
        notes = (f"{wanted} has the shapes of {entry.id}, whose profile is used",)
    return Resolved(entry.id, "catalog", profile, profile.parameters, profile.trainable_parameters, notes)


def _counted(wanted: str) -> Resolved:
    count = parse_count(wanted)
    if count is None or not MIN_COUNT <= count <= MAX_COUNT:
        raise UsageError(
            f"a model cannot have {wanted[:80]} parameters",
            hint="from 1000 to 1e15, such as 7e9, 7B or 350M",
        )
    return Resolved(wanted, "count", None, count, count)


def _configured(data: bytes, name: str, source: Literal["config", "hub"], notes: tuple[str, ...] = ()) -> Resolved:
    """The model that a config.json describes: kept from before, or its inventory recorded now."""
    config, more = trained_part(parse_config(data, name), name)
    notes += more
    kept = cache.fetch(config, None)
    if kept is not None:
        profile = replace(kept, name=name)
        if cache.installed_versions() is None:
            notes += (f"recorded earlier, with {_versions(profile)}",)
    else:
        with _RECORDING:
            own_code = "auto_map" in json.loads(data)
            profile = _recorder_of(config, name, None, f"{name} is not in the catalog", own_code=own_code).profile
        if not cache.writable():
            notes += (
                f"the cache folder {cache.folder()} cannot be written: the model will be recorded again each time",
            )
    return Resolved(name, source, profile, profile.parameters, profile.trainable_parameters, notes)


# Recording

_RECORDING = threading.RLock()
"""One recording at a time: the recorder halts the garbage collector and installs a global mode."""


def _recorder_of(config: Config, name: str, task: str | None, what: str, *, own_code: bool = False) -> Recorder:
    """A recorder of the configuration. `what` begins the sentence that says why one is needed."""
    if cache.installed_versions() is None:
        raise MissingExtra(f"{what}, and recording it needs torch and transformers")
    try:
        return _recorder(json.dumps(config, sort_keys=True), name, task)
    except ImportError as error:
        raise MissingExtra(f"{what}, and torch or transformers cannot be imported: {_line(error)}") from error
    except UnreadableConfig as error:
        if "Unrecognized model identifier" not in error.message:
            raise
        raise UnreadableConfig(
            f"{name}: the installed transformers has no model of type {config['model_type']!r}",
            hint="code that a repository brings along (auto_map) is never run"
            if own_code
            else "a newer transformers may have it",
        ) from error
    except AdvisorError:
        raise
    except Exception as error:
        raise NotRecordable(
            f"{name} could not be built to record it: {type(error).__name__}: {_line(error)}",
            hint="check the configuration's model_type and its sizes",
        ) from error


@lru_cache(maxsize=4)
def _recorder(config: str, name: str, task: str | None) -> Recorder:
    import huggingface_hub.constants  # noqa: F401  # reads HF_HUB_OFFLINE before the recorder sets it for transformers

    from fsdp_advisor.tracing import Recorder, TransformersSource

    return Recorder(TransformersSource(json.loads(config), name=name, task=task))


def _same_inventory(one: Profile, other: Profile) -> bool:
    """Whether tapes of one fit the other."""
    return (one.root, one.stacks) == (other.root, other.stacks)


def _described(variant: Variant) -> str:
    batch = "micro-batch 1" if variant.single else "micro-batch 2 and more"
    checkpointing = f"activation checkpointing {variant.checkpointing}"
    return f"the variant {variant.engine}, {variant.precision}, {variant.attention}, {checkpointing}, {batch}"


def _versions(profile: Profile) -> str:
    return " and ".join(f"{k} {v}" for k, v in profile.versions.items())


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


# Configurations

_LAYERS = re.compile(r"n_layers?|num_(hidden_|encoder_|decoder_)?layers|(encoder|decoder)_layers")
_EXPERTS = re.compile(r"num_experts|num_local_experts|n_routed_experts|moe_num_experts")
_STRICT = (  # key, lowest, highest, whether a list will do: null, or an integer between them
    (_LAYERS, 1, 1024, False),
    (re.compile(r"hidden_size|n_embd|d_model"), 1, 10**6, False),
    (re.compile(r"hidden_dim|embed_dim|dim"), 1, 10**6, True),
    (re.compile(r"vocab_size"), 1, 10**8, False),
    (re.compile(r"(num|n|encoder|decoder)_(attention_|key_value_|kv_)?heads?"), 1, 10**5, True),
    (_EXPERTS, 0, 4096, False),
)
_LOOSE = (  # key, highest, if it is an integer: of what is made one by one when the model is built
    (re.compile(r".*(param|token|step|position|ctx).*"), MAX_INTEGER),
    (re.compile(r".*layers"), 1024),
    (re.compile(r".*experts"), 4096),
    (re.compile(r"(num|n)_.*"), 10**6),
)
_TOKEN = re.compile(r'"(?:[^"\\]+|\\.)*"?|[\[\]{}]', re.DOTALL)
_SHOWN_KEY = re.compile(r"[\w.-]{1,64}", re.ASCII)
_NOT_SHAPES = (
    "_name_or_path", "auto_map", "quantization_config", "transformers_version", "torch_dtype", "dtype", "use_cache",
)  # fmt: skip


def parse_config(data: bytes, name: str) -> Config:
    """The JSON object in `data`, with nothing in it that could hurt. Raises UnreadableConfig, naming the key."""

    def refuse(what: str, hint: str = _CONFIG_HINT) -> NoReturn:
        raise UnreadableConfig(f"{name}: {what}", hint=hint)

    if len(data) > MAX_CONFIG_BYTES:
        refuse("larger than 1 MiB, so no config.json")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        refuse(f"not UTF-8 text (byte {error.start})")
    depth = 0
    for token in _TOKEN.finditer(text):
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token[0], 0)
        if depth > MAX_DEPTH:
            refuse(f"nested deeper than {MAX_DEPTH} levels")
    try:
        config = json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 20 else math.inf)
    except (ValueError, RecursionError) as error:
        where = f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        refuse(f"not valid JSON{where}", "is the file whole? " + _CONFIG_HINT)
    if not isinstance(config, dict):
        refuse(f"{_json_type(config)}, not an object")
    for keys, problem in _problems(config, ()):
        refuse(f"{'.'.join(map(_shown, keys))} {problem}")
    return config


def trained_part(config: Config, name: str) -> tuple[Config, tuple[str, ...]]:
    """What of a checked configuration is built and trained, and notes on what is left out."""
    notes: tuple[str, ...] = ()
    quantized = config.get("quantization_config")
    inner = config.get("text_config")
    if isinstance(inner, dict) and inner:
        outer_type = config.get("model_type")
        guessed = f"{outer_type}_text" if isinstance(outer_type, str) else None
        tied = {k: config[k] for k in ("tie_word_embeddings",) if k in config}
        config = {**tied, "model_type": guessed, **inner}
        quantized = quantized or config.get("quantization_config")
        notes += (f"only the text part ({_shown(str(config['model_type']))}) of a multimodal model is estimated",)
    if quantized:
        notes += ("the configuration's quantization is left out: training keeps whole weights",)
    config = {k: v for k, v in config.items() if k not in _NOT_SHAPES}
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not _SHOWN_KEY.fullmatch(model_type):
        missing = "no model_type" if model_type is None else "a model_type that is no name"
        raise UnreadableConfig(f"{name}: the configuration has {missing}", hint=_CONFIG_HINT)
    architectures = config.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(a, str) for a in architectures)
    ):
        raise UnreadableConfig(f"{name}: architectures must be a list of names", hint=_CONFIG_HINT)
    layers = max([1, *(v for k, v in config.items() if type(v) is int and _LAYERS.fullmatch(k))])
    experts = max([1, *(v for k, v in config.items() if type(v) is int and _EXPERTS.fullmatch(k))])
    if layers * experts > MAX_MODULES:
        raise UnreadableConfig(
            f"{name}: {layers} layers x {experts} experts = {layers * experts}, more than {MAX_MODULES}",
            hint=_CONFIG_HINT,
        )
    return config, notes


def _problems(value: Config | list[Any], keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Every value that cannot be, with the keys that lead to it."""
    for key, item in value.items() if isinstance(value, dict) else ((None, item) for item in value):
        here = keys if key is None else (*keys, key)
        if isinstance(item, (dict, list)):
            bounds = _bounds(key or "")
            if bounds is not None and not (bounds[2] and isinstance(item, list)):
                yield here, f"must be an integer, not {_json_type(item)}"
            yield from _problems(item, here)
        elif problem := _problem(here[-1] if here else "", item):
            yield here, problem


def _problem(key: str, item: object) -> str | None:
    if isinstance(item, float) and not math.isfinite(item):
        return "is not a finite number"
    if isinstance(item, int) and abs(item) > MAX_INTEGER:
        return f"is beyond {MAX_INTEGER:.0e}"
    if len(key) > 64:
        return None
    if (bounds := _bounds(key)) is not None and item is not None:
        low, high, _ = bounds
        if type(item) is not int:
            shown = json.dumps(item)
            return f"must be an integer, not {shown if len(shown) < 40 else _json_type(item)}"
        if not low <= item <= high:
            return f"is {item}, not between {low} and {high}"
    elif type(item) is int and (limit := _limit(key)) is not None and item > limit:
        return f"is {item}, more than {limit}"
    return None


@lru_cache(maxsize=4096)
def _bounds(key: str) -> tuple[int, int, bool] | None:
    return next(((low, high, many) for pattern, low, high, many in _STRICT if pattern.fullmatch(key)), None)


@lru_cache(maxsize=4096)
def _limit(key: str) -> int | None:
    return next((high for pattern, high in _LOOSE if pattern.fullmatch(key)), None)


def _shown(key: str) -> str:
    return key if _SHOWN_KEY.fullmatch(key) else ascii(key[:40])


def _json_type(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


# Files


def _config_path(wanted: str) -> Path | None:
    """The file that `wanted` names on disk, directly or as its directory; None where nothing of that name is there."""
    path = Path(wanted)
    mode = _mode(path, wanted)
    if mode is None:
        return None
    if stat.S_ISDIR(mode):
        inside = path / "config.json"
        if _mode(inside, wanted) is None:
            hint = "save the model's config.json there"
            if (path / "adapter_config.json").is_file():
                hint = "it holds an adapter: name its base model"
            raise UnreadableConfig(f"{wanted}: a directory without a config.json", hint=hint)
        return inside
    if path.suffix.lower() != ".json":
        raise UnreadableConfig(f"{wanted}: neither a directory nor a .json file", hint=_CONFIG_HINT)
    return path


def _mode(path: Path, wanted: str) -> int | None:
    try:
        return path.stat().st_mode
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise _unreadable(wanted, error) from error
        return None
    except ValueError:  # a name that no file can have
        return None


def _read_file(path: Path, wanted: str) -> bytes:
    """At most one byte more than is allowed, of a regular file."""
    try:
        if not path.is_file():
            raise UnreadableConfig(f"{wanted}: not a regular file", hint=_CONFIG_HINT)
        with path.open("rb") as file:
            return file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise _unreadable(wanted, error) from error


def _unreadable(wanted: str, error: OSError) -> UnreadableConfig:
    return UnreadableConfig(f"{wanted}: cannot be read: {error.strerror}", hint="check the file and its permissions")


def _did_you_mean(wanted: str) -> str | None:
    found = catalog.nearest(wanted) if len(wanted) <= 200 else []
    return f"did you mean {found[0]}?" if found else None


# The hub


def _can_be_repo_id(wanted: str) -> bool:
    """As the hub has it; nothing else is ever sent."""
    return (
        bool(_REPO_ID.fullmatch(wanted)) and "--" not in wanted and ".." not in wanted and not wanted.endswith(".git")
    )


def _download(name: str) -> tuple[bytes, tuple[str, ...]]:
    """The config.json of a hub repository, through the Hugging Face cache on disk.

    One request for the headers goes first: unlike hf_hub_download it neither retries nor writes when it fails.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, OfflineModeIsEnabled

    timeout = min(constants.HF_HUB_ETAG_TIMEOUT, HUB_TIMEOUT_SECONDS)
    try:
        with _quiet_hub():
            found = get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=timeout)
            if found.commit_hash is None or found.etag is None:
                raise HubError(
                    f"{_hub()} does not answer as a hub does", hint="check HF_ENDPOINT and the network's proxy"
                )
            if found.size is not None and found.size > MAX_CONFIG_BYTES:
                raise UnreadableConfig(f"{name}: larger than 1 MiB, so no config.json", hint=_CONFIG_HINT)
            return _fetched(name, timeout), ()
    except AdvisorError:
        raise
    except Exception as error:
        explained = _hub_error(name, error)
        here = None if isinstance(error, EntryNotFoundError) else try_to_load_from_cache(name, "config.json")
        if not isinstance(here, str):
            raise explained from error
        why = "HF_HUB_OFFLINE is set" if isinstance(error, OfflineModeIsEnabled) else explained.message
        return _read_file(Path(here), name), (f"config.json is from the local Hugging Face cache: {why}",)


def _fetched(name: str, timeout: float) -> bytes:
    from huggingface_hub import hf_hub_download

    try:
        return _read_file(Path(hf_hub_download(name, "config.json", etag_timeout=timeout)), name)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC):
            raise
    with tempfile.TemporaryDirectory() as folder:  # the Hugging Face cache cannot be written
        path = hf_hub_download(name, "config.json", etag_timeout=timeout, cache_dir=folder)
        return _read_file(Path(path), name)


def _hub_error(name: str, error: Exception) -> AdvisorError:
    """What went wrong, in one line. Never the library's own text: it may quote the token."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    guess = _did_you_mean(name)
    if isinstance(error, OfflineModeIsEnabled):
        if guess:
            return UnknownModel(name, hint=f"{guess} (the hub was not asked: HF_HUB_OFFLINE is set)")
        return HubError(
            f"{name} is not in the catalog, and HF_HUB_OFFLINE forbids to ask the hub",
            hint="unset HF_HUB_OFFLINE, or name a directory that holds the model's config.json",
        )
    if isinstance(error, EntryNotFoundError):
        return UnreadableConfig(
            f"{name}: the hub repository has no config.json",
            hint="is it an adapter or a conversion? name its base model",
        )
    if isinstance(error, GatedRepoError):
        return HubError(f"{name} is gated on the hub", hint=f"accept its licence at {_hub()}/{name}, then set HF_TOKEN")
    if isinstance(error, RepositoryNotFoundError):
        return UnknownModel(name, hint=f"{guess or 'the hub has no such repository'} (if it is private, set HF_TOKEN)")
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        status = error.response.status_code
        if status in (401, 403):
            hint = f"check HF_TOKEN, and that its account may read {_hub()}/{name}"
            return HubError(f"the hub refused {name} (HTTP status {status})", hint=hint)
        return HubError(f"the hub failed to give {name} (HTTP status {status})", hint="try again in a while")
    hint = "check the network and HF_ENDPOINT, or name a directory that holds the model's config.json"
    return HubError(
        f"{name} is not in the catalog, and {_hub()} cannot be reached: {_reason(error)}",
        hint=f"{guess} If not, {hint}" if guess else hint,
    )


def _reason(error: BaseException | None) -> str:
    names = []
    while error is not None:
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        names.append(type(error).__name__)
        error = error.__cause__ or error.__context__
    return "no answer in time" if any("Timeout" in n for n in names) else names[0]


def _hub() -> str:
    """The hub's address, without credentials."""
    from huggingface_hub import constants

    parts = urlsplit(constants.ENDPOINT)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


@contextlib.contextmanager
def _quiet_hub() -> Iterator[None]:
    """No progress bar for a kilobyte, no log lines beside our own, and no request but for the file."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    logger, bars = logging.getLogger("huggingface_hub"), "huggingface_hub.http_get"
    level, telemetry = logger.level, constants.HF_HUB_DISABLE_TELEMETRY
    silence = not are_progress_bars_disabled(bars) and "HF_HUB_DISABLE_PROGRESS_BARS" not in os.environ
    logger.setLevel(logging.CRITICAL)
    constants.HF_HUB_DISABLE_TELEMETRY = True
    if silence:
        disable_progress_bars(bars)
    try:
        yield
    finally:
        logger.setLevel(level)
        constants.HF_HUB_DISABLE_TELEMETRY = telemetry
        if silence:
            enable_progress_bars(bars)
