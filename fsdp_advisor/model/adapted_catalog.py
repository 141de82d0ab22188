"""Recordings of usual adapters on well-known models, shipped with the package.

`adapted.zip` has one compressed ZIP archive for each model, with an uncompressed stored profile for each adaptation: the profiles of a
model repeat each other. `recording.adapted_catalog` builds it. Other adaptations are recorded when they are first asked for.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from functools import lru_cache
from pathlib import Path

from fsdp_advisor.job.adaptation import Adaptation
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.store import load

PATH = Path(__file__).with_name("adapted.zip")


def member(model_id: str) -> str:
    """The name of the archive's member for a model of the catalog."""
    return f"{model_id.replace('/', '--')}.zip"


def profile_name(adaptation: Adaptation) -> str:
    """The name of an adaptation's profile in the member of a model."""
    text = json.dumps(adaptation.as_dict(), sort_keys=True)
    return f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.profile"


def members() -> list[str]:
    """The names of all members of the archive."""
    with zipfile.ZipFile(PATH) as archive:
        return archive.namelist()


@lru_cache(maxsize=2)
def profiles_of(member: str) -> dict[str, bytes]:
    """The stored profiles of a model by their names; none if the archive lacks the model."""
    with zipfile.ZipFile(PATH) as archive:
        if member not in archive.namelist():
            return {}
        with zipfile.ZipFile(io.BytesIO(archive.read(member))) as profiles:
            return {name: profiles.read(name) for name in profiles.namelist()}


def adapted_profile(model_id: str, adaptation: Adaptation) -> Profile | None:
    """The profile of an adapted model with its tapes; None if it is not shipped."""
    return _loaded(member(model_id), profile_name(adaptation))


@lru_cache(maxsize=64)  # one object per profile, because tapes recorded later are added to it
def _loaded(member: str, name: str) -> Profile | None:
    found = profiles_of(member).get(name)
    return None if found is None else load(found)
