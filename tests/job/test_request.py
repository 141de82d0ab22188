"""What is read without pydantic is what pydantic reads, and nothing that pydantic refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_advisor.errors import UsageError
from fsdp_advisor.estimator import make_request
from fsdp_advisor.job.parsing import model_of, read
from fsdp_advisor.job.request import EstimateRequest, Option, RecommendRequest, fields_of, plainly

KINDS = (EstimateRequest, RecommendRequest)
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 1.0, 2.5, float("nan"), "", " ", "0", "-3", "4.0", "1e3", "٣", "nan", "inf",
    "512GiB", "1e999GiB", "1e999", "8%", "10B", "x" * 5000, 10**30, "9" * 25, [], {}, b"ddp",
]  # fmt: skip


def values(option: Option) -> st.SearchStrategy[Any]:
    """What fits the field, as text or not, and what does not."""
    usual: list[st.SearchStrategy[Any]] = [st.sampled_from(ODD)]
    if option.choices:
        words = st.sampled_from(option.choices)
        usual += [words, words.map(str.upper), words.map(lambda w: f" {w} ")]
    elif option.kind is int:
        small = st.integers(0, 70_000)
        usual += [small, small.map(str)]
    else:
        usual.append(st.text(max_size=12))
    return st.one_of(*usual)


@st.composite
def given_options(draw: st.DrawFn, kind: type[EstimateRequest]) -> dict[str, Any]:
    names = draw(st.sets(st.sampled_from(sorted(fields_of(kind))), max_size=5)) | {"model"}
    return {name: draw(values(fields_of(kind)[name])) for name in names}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_what_is_read_plainly_is_what_pydantic_reads(kind: type[EstimateRequest], data: st.DataObject) -> None:
    options = data.draw(given_options(kind))
    plain = plainly(options, kind)
    if plain is not None:
        whole = read(options, kind)
        assert plain == whole and plain.given == whole.given


@pytest.mark.parametrize("kind", KINDS)
def test_usual_values_are_read_plainly(kind: type[EstimateRequest]) -> None:
    for option in fields_of(kind).values():
        for word in option.choices:
            assert plainly({"model": "gpt2", option.name: word}, kind) is not None
    usual = {"model": " gpt2", "gpus": "16", "nnodes": 2, "seq_len": "4096", "strategy": "ZeRO3", "host_memory": "1TiB"}
    assert plainly(usual, kind) == read(usual, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_the_same_to_both(kind: type[EstimateRequest]) -> None:
    asked = plainly({"model": "gpt2"}, kind)
    assert asked is not None
    assert asked.as_dict() == model_of(kind)(model="gpt2").model_dump()
    assert asked.changed == {"model": "gpt2"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpus": 5, "nnodes": 2}, "gpus 5 is not divisible by nnodes 2"),
        ({"gpus": "0"}, "gpus: Input should be greater than or equal to 1, not '0'"),
        ({"gpsu": 4}, "gpsu: Extra inputs are not permitted, not 4"),
        ({"strategy": "zero4"}, "strategy: Input should be"),
        ({"host_memory": "1e999GiB"}, "host_memory: Input should be less than or equal to"),
        ({"host_memory": "1KB"}, "host_memory: Input should be greater than or equal to 1073741824"),
    ],
)
def test_what_is_wrong_is_said_by_pydantic(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as refused:
        make_request({"model": "gpt2", **options})
    assert refused.value.message.startswith(said)
    assert refused.value.hint


def test_a_request_holds_no_impossible_value() -> None:
    for options in ({"gpus": 0}, {"gpus": "4"}, {"strategy": "zero4"}, {"gpus": 6, "nnodes": 4}, {"model": ""}):
        with pytest.raises(ValueError, match=next(iter(options))):
            EstimateRequest(**{"model": "gpt2", **options})


def test_what_is_changed_counts_as_given() -> None:
    request = make_request({"model": "gpt2", "offload": "none"})
    assert request.given == {"model", "offload"}
    assert request.but(gpus=4).given == {"model", "offload", "gpus"}
    assert request.but(gpus=4) == EstimateRequest(model="gpt2", gpus=4)
