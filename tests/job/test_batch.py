"""The global batch of an estimate: what is chosen to make it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.batch import divided
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest


@given(
    ranks=st.integers(1, 64),
    whole=st.integers(1, 4096),
    fixed=st.dictionaries(st.sampled_from(["micro_batch_size", "gradient_accumulation_steps"]), st.integers(1, 8)),
)
def test_the_product_is_the_global_batch_and_given_sizes_stay(ranks: int, whole: int, fixed: dict[str, int]) -> None:
    request = make_request({"model": "gpt2", "gpus": ranks, "global_batch_size": whole, **fixed})
    try:
        made = divided(request)
    except UsageError as refused:
        assert str(whole) in refused.message
        return
    assert made.micro_batch_size * made.gradient_accumulation_steps * ranks == whole
    assert {name: getattr(made, name) for name in fixed} == fixed


@pytest.mark.parametrize(
    ("options", "micro_batch", "accumulation"),
    [
        ({}, 1, 8),
        ({"micro_batch_size": 4}, 4, 2),
        ({"gradient_accumulation_steps": 2}, 4, 2),
    ],
)
def test_accumulation_is_chosen_unless_it_is_given(
    options: dict[str, Any], micro_batch: int, accumulation: int
) -> None:
    made = divided(make_request({"model": "gpt2", "gpus": 8, "global_batch_size": 64, **options}))
    assert (made.micro_batch_size, made.gradient_accumulation_steps) == (micro_batch, accumulation)


def test_a_request_constructed_directly_keeps_its_sizes() -> None:
    made = divided(EstimateRequest(model="gpt2", gpus=8, micro_batch_size=2, global_batch_size=64))
    assert (made.micro_batch_size, made.gradient_accumulation_steps) == (2, 4)


def test_an_impossible_global_batch_names_the_nearest() -> None:
    with pytest.raises(UsageError) as refused:
        divided(make_request({"model": "gpt2", "gpus": 8, "global_batch_size": 60}))
    assert refused.value.message == "micro-batch 1 x accumulation 7 x world 8 = 56, not 60"
    assert refused.value.hint == "global_batch_size must be a multiple of 8: 56 or 64"
