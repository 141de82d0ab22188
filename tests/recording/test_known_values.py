"""Values of small fake tensors, and models whose code reads them."""

from __future__ import annotations

import resource
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode

from fsdp_advisor.errors import NotPolynomial
from fsdp_advisor.job.compatibility import plans
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.model import catalog
from fsdp_advisor.recording.contents import Contents
from fsdp_advisor.recording.on_gpu import additive
from fsdp_advisor.recording.values import KnownValues
from fsdp_advisor.tapes import row_tape


def test_concatenation_keeps_the_values_of_its_known_parts() -> None:
    with FakeTensorMode(), KnownValues() as values:
        unknown, mask = torch.empty(2, 3, 4), torch.ones(2, 3, 1)
        joined = torch.cat([torch.tensor([]), torch.cat([unknown, mask], dim=-1)], dim=1)
        assert values.value_of(joined) is None and values.value_of(joined[..., :4]) is None
        assert joined[..., -1].bool().nonzero().shape == (6, 2)
        joined.add_(unknown.sum())
        assert values.value_of(joined[..., -1]) is None


def test_uninitialized_indices_select_elements_that_exist() -> None:
    with FakeTensorMode(), KnownValues() as values:
        mask = torch.ones(3, 5, dtype=torch.bool)
        indices = mask.new_empty((8, 2), dtype=torch.long)
        assert values.knows(indices)
        rows, columns = indices.unbind(1)
        assert mask[rows, columns].shape == (8,)


def test_equal_masks_are_searched_once() -> None:
    searches = []

    class Watched(Contents):
        def find(self, made_by: Any, find: Any) -> Any:
            return super().find(made_by, lambda: searches.append(made_by) or find())

    contents = Watched()
    for _ in range(2):
        with FakeTensorMode(), KnownValues(contents=contents):
            mask = torch.arange(6).view(2, 3) > 2
            assert mask.nonzero().tolist() == [[1, 0], [1, 1], [1, 2]]
    assert len(searches) == 1
    with FakeTensorMode(), KnownValues(contents=contents):
        mask = torch.arange(6).view(2, 3) > 2
        mask[0, 1] = True
        assert mask.nonzero().shape == (4, 2)
        assert (torch.arange(6).view(2, 3) > 2).nonzero().shape == (3, 2)


def test_a_mask_of_floats_has_no_values() -> None:
    with FakeTensorMode(), KnownValues() as values:
        mask = torch.ones(4, 4, dtype=torch.bool).tril()
        bias = additive(mask, torch.bfloat16)
        assert values.knows(mask) and not values.knows(bias) and bias.shape == (4, 4)


def test_counting_a_mask_takes_no_memory_of_its_own() -> None:
    with FakeTensorMode(), KnownValues():
        rows = torch.ones(100, 1000, 1, dtype=torch.bool).expand(100, 1000, 1000)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        assert torch.empty(100, 1000, 1000)[rows].shape == (100_000_000,)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # in kilobytes


def test_recordings_for_any_length_are_not_tried_again_after_one_failed() -> None:
    entry = catalog.find("moonshotai/Kimi-Linear-48B-A3B-Base")
    assert entry is not None
    refusal = {"kind": NotPolynomial.__name__, "message": "", "hint": ""}
    profile = replace(catalog.profile(entry), refusals={"plain|bf16|gpu|sdpa|default|-|none|1": refusal})
    asked = []
    model: Any = SimpleNamespace(profile=profile, tape=asked.append)
    request = make_request({"model": entry.id, "gpus": 2, "strategy": "zero3"})
    (plan,) = plans(request, seq_len=96)
    row_tape(model, plan)
    assert {(key.device, key.at) for key in asked} == {("gpu", (1, 96))}
