"""A model of the catalog whose code refuses one tape."""

from __future__ import annotations

from dataclasses import replace

from fsdp_advisor.errors import NotRecordable, to_payload
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.model.tape_key import TapeKey

MIXTRAL = "mistralai/Mixtral-8x7B-v0.1"
AUTOCAST = TapeKey("plain", "bf16-mixed", "sdpa", "none", True)


def refusing_autocast(name: str = MIXTRAL) -> Resolved:
    """The model without the tape that DDP uses at micro-batch 1, as if its code failed there."""
    model = resolve(name, allow_recording=False)
    assert model.profile is not None
    error = NotRecordable(f"{name} could not be run to record it: RuntimeError: expected BF16.", hint="")
    tapes = {key: tape for key, tape in model.profile.tapes.items() if key != AUTOCAST.name}
    return replace(model, profile=replace(model.profile, tapes=tapes, refusals={AUTOCAST.name: to_payload(error)}))
