"""Profiles that are stored and read again have the same tapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fsdp_advisor.model import catalog, store
from fsdp_advisor.model.profile import Profile
from fsdp_advisor.model.tape import Op, Tape


@pytest.fixture
def profile() -> Profile:
    entry = catalog.find("Qwen/Qwen3-0.6B")
    assert entry is not None
    return catalog.profile(entry)


@pytest.mark.parametrize("storages", [10, 70_000])
def test_layer_may_free_any_number_of_storages(profile: Profile, storages: int) -> None:
    name, tape = next(iter(profile.tapes.items()))
    first, *others = tape.segments
    events = [*[(Op.ALLOC, 0, 0)] * storages, *[(Op.FREE, 0, number) for number in range(storages)]]
    longer = Tape(tape.sizes, (replace(first, events=tuple(events)), *others))
    stored = store.load(store.dump(replace(profile, tapes={name: longer}))).tapes[name]
    assert stored.segments[0].events == tuple(events)
    assert [len(s.events) for s in stored.segments] == [len(s.events) for s in longer.segments]
