"""Recorded profiles on disk, so that a configuration that is not in the catalog is recorded only once.

There is one file per configuration and package versions, `<configuration>-<versions>.profile`, with all tapes recorded so
far. Files are written atomically, and a file that cannot be read is deleted. This module does not import torch, so a recorded
configuration can be estimated without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import metadata, util
from pathlib import Path

from platformdirs import user_cache_dir

from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.store import FORMAT, RECORDING, dump, load


def folder() -> Path | None:
    """The folder of everything that is cached: FSDP_ADVISOR_CACHE, or `fsdp-advisor` in the user's cache folder.

    None if the user has no home directory. On Linux the user's cache folder is $XDG_CACHE_HOME or ~/.cache.
    """
    if chosen := os.environ.get("FSDP_ADVISOR_CACHE"):
        return Path(chosen)
    cache = Path(user_cache_dir("fsdp-advisor", appauthor=False))
    return cache if cache.is_absolute() else None


def profile_folder() -> Path | None:
    """The folder of the profiles; None if the user has no home directory."""
    cache = folder()
    return None if cache is None else cache / "profiles"


@lru_cache(maxsize=1)
def installed_versions() -> dict[str, str] | None:
    """The versions of torch and transformers, found without importing them; None if either is not installed."""
    try:
        if util.find_spec("torch") is None or util.find_spec("transformers") is None:
            return None
        return {"torch": metadata.version("torch").split("+")[0], "transformers": metadata.version("transformers")}
    except ImportError:  # PackageNotFoundError is one
        return None


def fetch(config: Mapping[str, object], task: str | None) -> Profile | None:
    """The cached profile of this configuration; None if there is none.

    If torch and transformers are installed, the profile must have been recorded with the installed versions. If not, the newest profile of
    any versions is returned.
    """
    target = profile_folder()
    if target is None:
        return None
    if (versions := installed_versions()) is not None:
        return _read(target / _file_name(config, task, versions), config)
    for path in sorted(target.glob(f"{_digest([config, task, RECORDING, FORMAT])}-*.profile"), key=_age):
        if (found := _read(path, config)) is not None:
            return found
    return None


def keep(profile: Profile, task: str | None) -> bool:
    """Add the tapes and refusals of the profile to its file. Returns whether the file could be written.

    Those in the file stay if its model is equal, else they are replaced. `task`: a part of the file's name.
    """
    target = profile_folder()
    if target is None:
        return False
    path = target / _file_name(profile.config, task, profile.versions)
    before = _read(path, profile.config)
    if before is not None and (before.root, before.stacks) == (profile.root, profile.stacks):
        profile = replace(
            profile,
            tapes={**before.tapes, **profile.tapes},
            refusals={**before.refusals, **profile.refusals},
        )
    return _write(path, dump(profile))


def writable() -> bool:
    """Whether `keep` is expected to succeed. Writes nothing."""
    place = profile_folder()
    while place is not None and not place.exists():
        if place == place.parent:
            return False
        place = place.parent
    return place is not None and place.is_dir() and os.access(place, os.W_OK | os.X_OK)


def _file_name(config: Mapping[str, object], task: str | None, versions: Mapping[str, str]) -> str:
    return f"{_digest([config, task, RECORDING, FORMAT])}-{_digest(versions)[:16]}.profile"


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except OSError:
        return 0.0


def _read(path: Path, config: Mapping[str, object]) -> Profile | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    try:
        profile = load(data)
        if _digest(profile.config) == _digest(config):
            return profile
    except Exception:  # the profile is recorded again, whatever is wrong with the file
        pass
    with contextlib.suppress(OSError):
        path.unlink()
    return None


def _write(path: Path, data: bytes) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".partial")
    except OSError:
        return False
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(partial).replace(path)
    except OSError:
        return False
    finally:
        Path(partial).unlink(missing_ok=True)
    return True
