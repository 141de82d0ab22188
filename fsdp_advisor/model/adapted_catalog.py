"""Recordings of usual adapters on well-known models, shipped with the package.

`adapted.zip` has one stored profile for each model and adaptation; `recording.adapted_catalog` builds it. Other adaptations are
recorded when they are first asked for.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from functools import lru_cache
from pathlib import Path

from fsdp_advisor.job.adaptation import Adaptation
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.store import load

PATH = Path(__file__).with_name("adapted.zip")


def member(model_id: str, adaptation: Adaptation) -> str:
    """The name of the archive's member for a model of the catalog and its adaptation."""
    text = json.dumps(adaptation.as_dict(), sort_keys=True)
    return f"{model_id.replace('/', '--')}/{hashlib.sha256(text.encode()).hexdigest()[:16]}.profile"


def adapted_profile(model_id: str, adaptation: Adaptation) -> Profile | None:
    """The profile of an adapted model with its tapes; None if it is not shipped."""
    return _stored(member(model_id, adaptation))


@lru_cache(maxsize=256)  # one object per member, because tapes recorded later are added to it
def _stored(name: str) -> Profile | None:
    with zipfile.ZipFile(PATH) as archive:
        return load(archive.read(name)) if name in archive.namelist() else None
