"""Recorded profiles kept on disk, so that an uncatalogued configuration is recorded once.

One file per configuration and versions, `<configuration>-<versions>.profile`, holds all tapes recorded so far. Writing is
atomic; a file that cannot be read back is removed, never trusted. Nothing here imports torch: a configuration recorded once
can be estimated afterwards without it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib import metadata, util
from pathlib import Path

from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.store import FORMAT, RECORDING, dump, load


def folder() -> Path | None:
    """Where the files are: `profiles` in FSDP_ADVISOR_CACHE, or in fsdp-advisor in the platform's folder for caches."""
    if chosen := os.environ.get("FSDP_ADVISOR_CACHE"):
        return Path(chosen) / "profiles"
    base: str | Path | None
    try:
        if sys.platform == "win32":
            base = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        elif sys.platform == "darwin":
            base = Path.home() / "Library" / "Caches"
        else:
            base = os.environ.get("XDG_CACHE_HOME")
            if not base or not Path(base).is_absolute():  # as the XDG specification has it
                base = Path.home() / ".cache"
    except RuntimeError:  # nobody's home
        return None
    return Path(base) / "fsdp-advisor" / "profiles"


@lru_cache(maxsize=1)
def installed_versions() -> dict[str, str] | None:
    """What a recording made here would name, without importing it; None where torch or transformers is missing."""
    try:
        if util.find_spec("torch") is None or util.find_spec("transformers") is None:
            return None
        return {"torch": metadata.version("torch").split("+")[0], "transformers": metadata.version("transformers")}
    except ImportError:  # PackageNotFoundError is one
        return None


def fetch(config: Mapping[str, object], task: str | None) -> Profile | None:
    """The profile kept of this configuration, or None.

    One of the installed versions if torch is there to record anew, else the one of any versions written last.
    """
    target = folder()
    if target is None:
        return None
    if (versions := installed_versions()) is not None:
        return _read(target / _file_name(config, task, versions), config)
    for path in sorted(target.glob(f"{_digest([config, task, RECORDING, FORMAT])}-*.profile"), key=_age):
        if (found := _read(path, config)) is not None:
            return found
    return None


def keep(profile: Profile, task: str | None) -> bool:
    """Write the profile with all its tapes and refusals and those already kept; whether that could be done."""
    target = folder()
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
    """Whether `keep` can be expected to succeed. Writes nothing."""
    place = folder()
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
    except Exception:  # whatever is wrong with it, it is recorded again
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
