"""Command lines, Python keywords and query strings that say the same give the same request."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrix import of_today

from fsdp_advisor.assumptions import settled
from fsdp_advisor.cli.estimate import EstimateOptions
from fsdp_advisor.cli.options import CommandParser, HelpOptions, ReportOptions
from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.fields import Field, dashed, fields_of, read_fields
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.server.request_models import model_of

KINDS: tuple[type[EstimateRequest], ...] = (EstimateRequest, RecommendRequest)


def parser_of(kind: type[EstimateRequest]) -> CommandParser:
    parser = CommandParser("test", "[options]", "A command.")
    parser.add_fields(
        (*fields_of(kind).values(), *fields_of(EstimateOptions).values(), *fields_of(HelpOptions).values())
    )
    return parser


ADAPTER = '{"peft_type": "LORA", "r": 8}'
PARSERS = {kind: parser_of(kind) for kind in KINDS}


def parse(arguments: list[str], kind: type[EstimateRequest] = EstimateRequest) -> EstimateRequest:
    """The request of a command line."""
    given = PARSERS[kind].parse(arguments)
    assert given is not None
    return make_request({name: value for name, value in given.items() if name in fields_of(kind)}, kind)


def own_options(*arguments: str) -> ReportOptions:
    given = PARSERS[EstimateRequest].parse(list(arguments))
    assert given is not None
    return EstimateOptions(**read_fields(given, fields_of(EstimateOptions)))


def from_query(query: dict[str, str], kind: type[EstimateRequest]) -> EstimateRequest:
    return model_of(kind).model_validate(query).request(kind)


def valid_values(field: Field) -> st.SearchStrategy[Any]:
    """Values in the field's type, within its limits, other than None."""
    rule = field.rule
    if field.choices:
        return st.sampled_from(field.choices)
    if rule.word is not None:
        words = [
            "layer",
            "none",
            "size:20000",
            "class:A,B_2",
            "every:3",
            "auto",
            "false",
            "8",
            ADAPTER,
            "rank=64",
            "q_proj,v_proj",
            "mlp,qkv,o",
            "448x448",
            "fla,causal-conv1d",
            "reduce_bucket_size=200000000",
        ]
        return st.sampled_from([word for word in words if rule.word(word) == word])
    if field.kind is bool:
        return st.just(True)
    if field.kind is int:
        return st.integers(int(rule.ge or 0), int(rule.le or 0))
    if field.kind is float:
        return st.floats(rule.ge or 0, rule.lt or rule.le or 0, exclude_max=rule.lt is not None, allow_nan=False)
    blank = "" if field.many else " "  # which separates the values of a list
    return st.from_regex(rf"[A-Za-z][A-Za-z0-9/{blank}=_:.-]{{0,20}}[A-Za-z0-9]", fullmatch=True)


@st.composite
def requests(draw: st.DrawFn, kind: type[EstimateRequest]) -> EstimateRequest:
    names = draw(st.sets(st.sampled_from(sorted(fields_of(kind))))) | {"model"}
    values = {name: draw(valid_values(fields_of(kind)[name])) for name in names}
    values["gpus"] = values.get("gpus", 1)
    values["nnodes"] = draw(st.sampled_from([n for n in (1, 2, 4, 8) if values["gpus"] % n == 0]))
    return make_request(values, kind)


def written(value: Any) -> Any:
    """A value as one word of a command line: the only one of a list."""
    return value[0] if isinstance(value, tuple) else value


def as_arguments(request: EstimateRequest, style: str) -> list[str]:
    """The command line of a request. `style` is how an option and its value are written."""
    words: list[str] = []
    for name in sorted(request.given):
        option, value = dashed(name), written(getattr(request, name))
        if value is True:
            words.append(option)
        elif style == "two words":
            words += [option, str(value)]
        elif style == "equals":
            words.append(f"{option}={value}")
        elif style == "underscores":
            words.append(f"--{name}={value}")
        else:
            words.append(f"{name}={value}")
    return words


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data(), style=st.sampled_from(["two words", "equals", "underscores", "bare"]))
def test_parsing_a_written_request_gives_it_back(kind: type[EstimateRequest], data: st.DataObject, style: str) -> None:
    request = data.draw(requests(kind))
    parsed = parse(as_arguments(request, style), kind)
    assert parsed.as_dict() == request.as_dict() and parsed.given == request.given


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_command_line_keywords_and_query_agree(kind: type[EstimateRequest], data: st.DataObject) -> None:
    request = data.draw(requests(kind))
    texts = {name: str(written(getattr(request, name))) for name in request.given}
    for same in (make_request(texts, kind), from_query(texts, kind)):
        assert same == request and same.given == request.given


@pytest.mark.parametrize("kind", of_today(KINDS, days=2))
def test_every_option_reaches_its_field(kind: type[EstimateRequest]) -> None:
    for name, field in fields_of(kind).items():
        values: list[Any] = (
            list(field.choices)
            or {int: [2**30], float: [float(field.rule.ge or 0.5)], bool: [True], str: ["text"]}[field.kind]
        )
        if field.rule.word is not None:
            values = [word for word in ("none", "every:3", "false", "8") if field.rule.word(word) == word]
        if field.kind is int and (field.rule.le or 0) < 2**30:
            values = [2]
        for value in values:
            other = {"gpus": 2} if name == "nnodes" else {}
            expected = make_request({"model": "gpt2", **other, name: value}, kind)
            words = ["--model", "gpt2", *(f"--{n}={v}" for n, v in other.items())]
            for spelled in (name, *field.rule.aliases):
                option = dashed(spelled)
                assert parse([*words, *([option] if value is True else [option, str(value)])], kind) == expected
            query = {"model": "gpt2", **{n: str(v) for n, v in other.items()}, name: str(value)}
            assert from_query(query, kind) == expected


INVALID = [
    {"gpus": "-1"}, {"gpus": "many"}, {"strategy": "zero4"}, {"optim": "shampoo"}, {"host_memory": "512"}, {"seq_len": "0"},
    {"gpus": "5", "nnodes": "2"}, {"gpu": "x" * 500}, {"micro_batch_size": "2.5"}, {"reserved": "maybe"},
]  # fmt: skip


@pytest.mark.parametrize("options", INVALID, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_interface_refuses_with_the_same_words(kind: type[EstimateRequest], options: dict[str, str]) -> None:
    said = set()
    for ask in (
        lambda: parse(["--model=gpt2", *(f"{dashed(n)}={v}" for n, v in options.items())], kind),
        lambda: make_request({"model": "gpt2", **options}, kind),
        lambda: from_query({"model": "gpt2", **options}, kind),
    ):
        with pytest.raises(UsageError) as refused:
            ask()
        said.add((refused.value.message, refused.value.hint))
    assert len(said) == 1


def test_flags_are_written_as_transformers_and_trl_write_them() -> None:
    words = ["--model=gpt2", "--framework", "trl", "--max_length", "512", "--attn_implementation", "eager"]
    found = parse(
        [*words, "--activation_offloading", "True", "--use_peft", "false", "--load_in_4bit", "True"], EstimateRequest
    )
    assert found == make_request(
        {
            "model": "gpt2", "framework": "trl", "seq_len": 512, "attention": "eager", "activation_offload": True, "use_peft": False,
            "load_in_4bit": True,
        }
    )  # fmt: skip


def test_flags_take_values_and_can_be_negated() -> None:
    assert own_options("--json").json and own_options("--json=true").json and own_options("json=yes").json
    assert not own_options("--json=false").json and not own_options("--json", "--no-json").json
    assert own_options("-q", "-o", "x.json").output == own_options("--output=x.json").output


def test_a_value_that_looks_like_an_option_with_underscores_is_kept() -> None:
    assert parse(["--model", "gpus=4"]).model == "gpus=4"
    assert parse(["--model", "my_model"]).model == "my_model"
    assert parse(["--model=a=b"]).model == "a=b"


@given(
    st.lists(
        st.one_of(st.text(max_size=8), st.sampled_from(["--model", "--gpus", "--json", "-o", "-", "--", "--=", "="]))
    )
)
def test_any_words_are_parsed_or_refused_with_a_hint(words: list[str]) -> None:
    try:
        PARSERS[EstimateRequest].parse(words)
    except UsageError as error:
        assert error.message and error.hint


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "asked",
    [
        {"gpus": 16, "gpu": "H100"},
        {"gpus": 1, "gpu": "V100"},
        {"framework": "trl"},
        {"framework": "torchtitan", "gpus": 8},
        {"framework": "axolotl", "use_peft": True},
    ],
    ids=str,
)
def test_the_schema_declares_only_defaults_that_change_nothing(
    kind: type[EstimateRequest], asked: dict[str, Any]
) -> None:
    schema = model_of(kind).model_json_schema()["properties"]
    declared = {name: about["default"] for name, about in schema.items() if "default" in about}
    base = {"model": "gpt2", **asked}
    alone, filled = (settled(model_of(kind).model_validate(given).request(kind)) for given in (base, declared | base))
    assert len(declared) > 40
    assert filled == alone
