"""From what a user calls a model to its profile: a catalogued id, a config.json on disk or on the hub, a parameter count.

Code that a repository brings along is never run.
"""

from __future__ import annotations

import json
import re
import threading
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from fsdp_advisor.errors import (
    AdvisorError,
    MissingExtra,
    NotRecordable,
    UnknownModel,
    UnreadableConfig,
    UsageError,
    from_payload,
    to_payload,
)
from fsdp_advisor.model import catalog
from fsdp_advisor.model.profile import Profile, Tape
from fsdp_advisor.model.tape_key import TapeKey
from fsdp_advisor.units import parse_count

if TYPE_CHECKING:
    from fsdp_advisor.model.config import Config
    from fsdp_advisor.recording import Recorder

# The cache, the hub and the reading of configurations are imported where they are needed: a catalogued model needs none of them.

MIN_COUNT, MAX_COUNT = 1000, 10**15

NAMES_HINT = (
    "a model is an id listed by `fsdp-advisor models`, a hub id, a config.json or its directory, or a count such as 7B"
)
PASTING_HINT = "a model is an id listed by `fsdp-advisor models`, or a count such as 7B; of any other its config.json can be pasted"
"""Where no paths are taken: on a server."""
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
    may_record: bool = True
    recorded_here: bool = False
    """Of a catalogued model: its profile is of the installed versions and none of the catalog's."""

    @property
    def shipped(self) -> bool:
        """Whether the profile is the catalog's, which has what a GPU runs beside what fake tensors do."""
        return self.source == "catalog" and not self.recorded_here

    def tape(self, key: TapeKey) -> Tape:
        """The tape of a key: shipped or kept from before, else recorded now (needs torch) and kept.

        So is what cannot be recorded: the refusal is raised again, until other versions of torch or transformers are there.
        """
        if self.profile is None:
            raise UsageError(f"{self.name} is a bare parameter count: it has no layers", hint="name a model")
        tapes = self.profile.tapes
        if key.name not in tapes and self._is_refused(key):
            raise from_payload(self.profile.refusals[key.name])
        if key.name not in tapes and not self.may_record:
            raise NotRecordable(f"{self.name}: {_described(key)} is not in the catalog", hint="ask for another")
        if key.name not in tapes:
            with _RECORDING:
                if key.name not in tapes:
                    tapes[key.name] = self._kept(key) or self._recorded(key)
        return tapes[key.name]

    def _is_refused(self, key: TapeKey) -> bool:
        """Whether it is known that the tape cannot be recorded here."""
        from fsdp_advisor.model import cache

        assert self.profile is not None
        return key.name in self.profile.refusals and (
            not self.may_record or cache.installed_versions() in (None, self.profile.versions)
        )

    @property
    def _task(self) -> str | None:
        return self.profile.task if self.profile and self.source == "catalog" else None  # others' task is derived

    def _kept(self, key: TapeKey) -> Tape | None:
        from fsdp_advisor.model import cache

        assert self.profile is not None
        kept = cache.fetch(self.profile.config, self._task)
        if kept is None or not _same_inventory(kept, self.profile):
            return None
        if key.name in kept.refusals:
            raise from_payload(kept.refusals[key.name])
        return kept.tapes.get(key.name)

    def _recorded(self, key: TapeKey) -> Tape:
        from fsdp_advisor.model import cache

        assert self.profile is not None
        where = "catalog" if self.source == "catalog" else "cache"
        what = f"{self.name}: {_described(key)} is not in the {where}"
        recorder = _recorder_of(self.profile.config, self.name, self._task, what)
        if not _same_inventory(recorder.profile, self.profile):
            raise NotRecordable(
                f"{what}, and {_versions(recorder.profile)} build the model otherwise than {_versions(self.profile)}",
                hint=f"pip install transformers=={self.profile.versions.get('transformers')}",
            )
        try:
            tape = recorder.profile.tapes[key.name] = recorder.tape(key)
        except NotRecordable as error:
            if not isinstance(error.__cause__, (MemoryError, OSError)):  # those are this machine's, and may pass
                recorder.profile.refusals[key.name] = self.profile.refusals[key.name] = to_payload(error)
                cache.keep(recorder.profile, self._task)
            raise
        cache.keep(recorder.profile, self._task)
        return tape


def resolve(name: str, *, allow_hub: bool = True, allow_paths: bool = True, allow_recording: bool = True) -> Resolved:
    """The model that `name` means.

    In order: a catalogued id or alias; a file or directory on disk (if `allow_paths`); a bare parameter count; the hub (if
    `allow_hub`). Without `allow_recording` torch is never imported, whatever is asked of a model of the catalog later.
    Raises UnknownModel, UsageError, UnreadableConfig, HubError or MissingExtra, each with a hint.
    """
    wanted = name.strip()
    names_hint = NAMES_HINT if allow_paths else PASTING_HINT
    if not wanted or len(wanted) > 1000 or not wanted.isprintable():
        raise UnknownModel(wanted[:80], hint=names_hint)
    if (entry := catalog.find(wanted)) is not None:
        return _catalogued(entry, wanted, allow_recording)
    from fsdp_advisor.model import hub
    from fsdp_advisor.model.config import config_path, read_config

    if allow_paths and (path := config_path(wanted)) is not None:
        return configured(read_config(path, wanted), wanted, "config")
    if _count_shaped(wanted):
        return _counted(wanted)
    if allow_paths and _PATH_SHAPED.match(wanted):
        raise UnknownModel(wanted[:200], hint="there is no such file or directory")
    if not allow_hub or not hub.can_be_repo_id(wanted):
        raise UnknownModel(wanted[:200], hint=hub.did_you_mean(wanted) or names_hint)
    data, notes = hub.download(wanted)
    return configured(data, wanted, "hub", notes)


def is_count(name: str) -> bool:
    """Whether `resolve` takes it for a bare parameter count."""
    from fsdp_advisor.model.config import config_path

    wanted = name.strip()
    return _count_shaped(wanted) and catalog.find(wanted) is None and config_path(wanted) is None


def _count_shaped(wanted: str) -> bool:
    return _NUMBER_SHAPED.fullmatch(wanted) is not None or parse_count(wanted) is not None


def _catalogued(entry: catalog.Entry, wanted: str, may_record: bool) -> Resolved:
    profile = catalog.profile(entry)
    notes: tuple[str, ...] = ()
    if "/" in wanted and wanted.lower() != entry.id.lower():
        notes = (f"{wanted} has the shapes of {entry.id}, whose profile is used",)
    return Resolved(entry.id, "catalog", profile, profile.parameters, profile.trainable_parameters, notes, may_record)


def _counted(wanted: str) -> Resolved:
    count = parse_count(wanted)
    if count is None or not MIN_COUNT <= count <= MAX_COUNT:
        raise UsageError(
            f"a model cannot have {wanted[:80]} parameters",
            hint="from 1000 to 1e15, such as 7e9, 7B or 350M",
        )
    return Resolved(wanted, "count", None, count, count)


def configured(data: bytes, name: str, source: Literal["config", "hub"], notes: tuple[str, ...] = ()) -> Resolved:
    """The model that a config.json describes: kept from before, or its inventory recorded now."""
    from fsdp_advisor.model import cache
    from fsdp_advisor.model.config import parse_config, trained_part

    config, more = trained_part(parse_config(data, name), name)
    notes += more
    kept = cache.fetch(config, None)
    if kept is not None:
        profile = _renamed(kept, name)
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
    from fsdp_advisor.model import cache

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

    from fsdp_advisor.recording import Recorder, TransformersSource

    return Recorder(TransformersSource(json.loads(config), name=name, task=task))


def _same_inventory(one: Profile, other: Profile) -> bool:
    """Whether tapes of one fit the other."""
    return (one.root, one.stacks) == (other.root, other.stacks)


def _renamed(kept: Profile, name: str) -> Profile:
    """A kept profile under the name that its configuration has now."""
    refusals = {key: {**why, "message": why["message"].replace(kept.name, name)} for key, why in kept.refusals.items()}
    return replace(kept, name=name, refusals=refusals)


def _described(key: TapeKey) -> str:
    batch = "micro-batch 1" if key.batch_is_one else "micro-batch 2 and more"
    checkpointing = f"activation checkpointing {key.checkpointing}"
    where = " on a GPU" if key.device == "gpu" and key.attention != "flash_attention_2" else ""
    return f"the variant {key.engine}, {key.precision}, {key.attention}{where}, {checkpointing}, {batch}"


def _versions(profile: Profile) -> str:
    return " and ".join(f"{k} {v}" for k, v in profile.versions.items())


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]
