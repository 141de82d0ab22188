"""The one validator: what it reads, what it refuses, and its words."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsdp_advisor.errors import InvalidOption, UsageError
from fsdp_advisor.job.choices import OptimizerName
from fsdp_advisor.job.fields import Field, fields_of
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.job.unknown_options import topic_of, unknown_option

KINDS = (EstimateRequest, RecommendRequest)
ODD: list[Any] = [
    None, True, False, 0, 1, -1, 1.0, 2.5, float("nan"), float("inf"), "", " ", "0", "-3", "4.0", "1e3", "٣", "nan", "inf",
    "512GiB", "1e999GiB", "1e999", "8%", "10B", "x" * 5000, 10**30, 10**5000, "9" * 25, "9" * 6000, [], {}, b"ddp",
]  # fmt: skip


def any_value(field: Field) -> st.SearchStrategy[Any]:
    """Values that fit the field, as text or not, and values that do not."""
    usual: list[st.SearchStrategy[Any]] = [st.sampled_from(ODD)]
    if field.choices:
        words = st.sampled_from(field.choices)
        usual += [words, words.map(str.upper), words.map(lambda w: f" {w} ")]
    elif field.kind is int:
        small = st.integers(0, 70_000)
        usual += [small, small.map(str)]
    else:
        usual.append(st.text(max_size=12))
    return st.one_of(*usual)


@st.composite
def any_options(draw: st.DrawFn, kind: type[EstimateRequest]) -> dict[str, Any]:
    names = draw(st.sets(st.sampled_from(sorted(fields_of(kind))), max_size=5)) | {"model"}
    return {name: draw(any_value(fields_of(kind)[name])) for name in names}


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_input_gives_a_valid_request_or_one_error_with_a_hint(
    kind: type[EstimateRequest], data: st.DataObject
) -> None:
    options = data.draw(any_options(kind))
    try:
        request = make_request(options, kind)
    except UsageError as error:
        assert error.message and error.hint
        assert len(error.message) < 500 and error.message.isprintable()
        return
    assert request.given == options.keys()
    assert kind(**request.as_dict()) == request


@pytest.mark.parametrize("kind", KINDS)
def test_every_choice_is_accepted_in_any_spelling(kind: type[EstimateRequest]) -> None:
    for field in fields_of(kind).values():
        for word in field.choices:
            for spelled in (word, word.upper(), f" {word} ", word.replace("-", "_"), word.replace("_", "-")):
                assert getattr(make_request({"model": "gpt2", field.name: spelled}, kind), field.name) == word


def test_text_with_units_is_read() -> None:
    request = make_request(
        {"model": " gpt2", "gpus": "16", "nnodes": 2, "strategy": "ZeRO-3", "host_memory": "1TiB", "tokens": "10B",
         "margin": "8%", "price": "2"},
        RecommendRequest,
    )  # fmt: skip
    assert (request.model, request.gpus, request.nnodes, request.strategy) == ("gpt2", 16, 2, "zero3")
    assert (request.host_memory, request.tokens, request.margin, request.price) == (2**40, 10**10, 0.08, 2.0)


def test_a_parameter_count_may_be_a_number() -> None:
    assert make_request({"model": 7e9}).model == make_request({"model": 7_000_000_000}).model == "7000000000"


@pytest.mark.parametrize(
    ("field", "spelled", "choice"),
    [
        ("strategy", "ZeRO-3", "zero3"),
        ("strategy", "fsdp", "zero3"),
        ("strategy", "FULL_SHARD", "zero3"),
        ("strategy", "shard_grad_op", "zero2"),
        ("strategy", 2, "zero2"),
        ("strategy", "HYBRID_SHARD", "hsdp"),
        ("strategy", "NO_SHARD", "ddp"),
        ("backend", "FSDP", "fsdp2"),
        ("precision", "fp16", "fp16-mixed"),
        ("optim", "adamw_8bit", "adamw_bnb_8bit"),
        ("optim", "paged_adamw", "paged_adamw_32bit"),
        ("optim", "lion", "lion_32bit"),
        ("activation_checkpointing", True, "full"),
        ("activation_checkpointing", "false", "none"),
        ("activation_checkpointing", "Every_3", "every-3"),
        ("activation_checkpointing", "every-1", "full"),
        ("offload", "full", "parameters"),
        ("attention", "flash_attention", "flash_attention_2"),
    ],
)
def test_names_that_other_tools_use_are_read(field: str, spelled: Any, choice: str) -> None:
    assert getattr(make_request({"model": "gpt2", field: spelled}), field) == choice


@pytest.mark.parametrize("kind", KINDS)
def test_synonyms_and_nearest_choices_exist(kind: type[EstimateRequest]) -> None:
    for field in fields_of(kind).values():
        assert all(field.expected(meant) is None for meant in field.rule.synonyms.values())
        assert not set(field.rule.synonyms) & set(field.rule.not_modelled)
        for word, near in field.rule.nearest.items():
            assert word in field.rule.not_modelled
            assert near.partition(",")[0] in field.choices


def test_every_optimizer_of_the_trainer_is_modelled_or_refused_with_the_nearest() -> None:
    training_args = pytest.importorskip("transformers.training_args")
    rule = fields_of(EstimateRequest)["optim"].rule
    for name in {member.value for member in training_args.OptimizerNames} - {*get_args(OptimizerName), *rule.synonyms}:
        assert name in rule.not_modelled and name in rule.nearest


def test_an_alias_is_read_as_its_field() -> None:
    assert make_request({"model": "gpt2", "per_device_train_batch_size": 4}).micro_batch_size == 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_of_a_model_alone_has_the_defaults(kind: type[EstimateRequest]) -> None:
    request = make_request({"model": "gpt2"}, kind)
    assert request.changed == {"model": "gpt2"}
    assert request.given == {"model"}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    # options, message, hint
    ({"gpus": 5, "nnodes": 2}, "gpus 5 is not divisible by nnodes 2", "each node has the same number of GPUs"),
    ({"gpus": -1}, "gpus must be at least 1, not -1", "it is the total number of ranks, one per GPU"),
    ({"gpus": "-1"}, "gpus must be at least 1, not -1", "it is the total number of ranks, one per GPU"),
    ({"gpus": "70000"}, "gpus must be at most 65536, not 70000", "it is the total number of ranks, one per GPU"),
    ({"gpus": "many"}, "gpus must be a whole number, not many", "it is the total number of ranks, one per GPU"),
    ({"gpus": 2.5}, "gpus must be a whole number, not 2.5", "it is the total number of ranks, one per GPU"),
    ({"gpus": True}, "gpus must be a whole number, not True", "it is the total number of ranks, one per GPU"),
    ({"gpus": None}, "gpus must be a whole number, not None", "it is the total number of ranks, one per GPU"),
    ({"gpsu": 4}, "no such option: gpsu", "did you mean gpu or gpus?"),
    ({"batch_size": 4}, "no such option: batch_size", "did you mean micro_batch_size?"),
    ({"colour": 4}, "no such option: colour", "see fsdp-advisor estimate --help"),
    ({"lora": True}, "no such option: lora", "did you mean use_peft?"),
    ({"lora_r": 0}, "lora_r must be at least 1, not 0", "it is the rank of the adapters"),
    (
        {"peft_config": "adapter_config.json"},
        "peft_config must be the text of an adapter_config.json, not adapter_config.json",
        "it is a file adapter_config.json of any PEFT method",
    ),
    ({"freeze": [""]}, "freeze must be at least 1 character long, not ''", "it is the parameters that are not trained"),
    ({"tp": 2}, "tp: tensor parallelism is not modelled yet", "possible are data parallelism and its sharding"),
    ({"sample_packing": True}, "no such option: sample_packing", "did you mean packing bfd?"),
    ({"grpo": True}, "no such option: grpo", "did you mean task grpo?"),
    ({"vllm": True}, "no such option: vllm", "did you mean use_vllm?"),
    ({"learning_rate": 1}, "no such option: learning_rate", "it changes neither memory nor speed: leave it out"),
    ({"bf16": True}, "no such option: bf16", "did you mean precision bf16-mixed?"),
    (
        {"strategy": "deepspeed"},
        "strategy must be ddp, zero1, zero2, zero3, hsdp or all, not deepspeed",
        "strategy zero3 with",
    ),
    (
        {"strategy": "model"},
        "strategy must be ddp, zero1, zero2, zero3, hsdp or all, not model",
        "it is the sharding strategy",
    ),
    ({"seq_len": "128k"}, "seq_len must be a whole number, not 128k", "did you mean 131072?"),
    ({"optim": "adamw_anyprecision"}, "optim adamw_anyprecision is not modelled yet", "nearest is adamw_torch"),
    (
        {"strategy": "zero4"},
        "strategy must be ddp, zero1, zero2, zero3, hsdp or all, not zero4",
        "did you mean zero3?",
    ),
    (
        {"activation_checkpointing": "every-0"},
        "activation_checkpointing must be none, full, reentrant, selective or every-N (such as every-2), not every-0",
        "it is the layers that backward recomputes",
    ),
    (
        {"host_memory": "512"},
        "host_memory must be at least 1 GiB, not 512 bytes",
        "it is the host memory that the job may use on one node, with its unit, such as 512GiB",
    ),
    (
        {"host_memory": "lots"},
        "host_memory must be a value such as 512GiB, not lots",
        "it is the host memory that the job may use on one node, with its unit, such as 512GiB",
    ),
    (
        {"model": "x" * 5000},
        "model must be at most 4096 characters long, not '" + "x" * 80 + "'...",
        "it is the name of",
    ),
]


@pytest.mark.parametrize(("options", "message", "hint"), REFUSED, ids=lambda v: str(v)[:40])
def test_refusals_say_what_is_possible(options: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(UsageError) as refused:
        make_request({"model": "gpt2", **options})
    assert refused.value.message == message
    assert refused.value.hint.startswith(hint)


def test_limits_of_a_search_are_checked() -> None:
    for options, message in (
        ({"margin": "1.5"}, "margin must be less than 1, not 1.5"),
        ({"margin": "nan"}, "margin must be at least 0, not nan"),
        ({"margin": "half"}, "margin must be a value such as 0.08 or 8%, not half"),
        ({"price": "inf"}, "price must be at most 1000000, not inf"),
        ({"tiled_mlp": "100000"}, "tiled_mlp must be auto, none or a number from 1 to 1024, not 100000"),
    ):
        with pytest.raises(InvalidOption) as refused:
            make_request({"model": "gpt2", **options}, RecommendRequest)
        assert refused.value.message == message
        assert refused.value.option in options


@pytest.mark.parametrize(("method", "hint"), [("lora", "use_peft, without"), ("QLoRA", "use_peft with load_in_4bit")])
def test_a_method_that_other_options_choose_is_refused_with_these_options(method: str, hint: str) -> None:
    with pytest.raises(InvalidOption, match=f"method must be fixed or any, not {method}") as refused:
        make_request({"model": "gpt2", "method": method}, RecommendRequest)
    assert refused.value.hint.startswith(hint)


def test_a_missing_model_is_named() -> None:
    with pytest.raises(InvalidOption, match="model is missing") as refused:
        make_request({"gpus": 8})
    assert refused.value.option == "model"


def test_the_class_refuses_impossible_values() -> None:
    for options in ({"gpus": 0}, {"gpus": "4"}, {"strategy": "zero4"}, {"gpus": 6, "nnodes": 4}, {"model": ""}):
        with pytest.raises(ValueError, match=next(iter(options))):
            EstimateRequest(**{"model": "gpt2", **options})


def test_changed_fields_count_as_given() -> None:
    request = make_request({"model": "gpt2", "offload": "none"})
    assert request.given == {"model", "offload"}
    assert request.but(gpus=4).given == {"model", "offload", "gpus"}
    assert request.but(gpus=4) == EstimateRequest(model="gpt2", gpus=4)


def test_no_option_is_called_not_modelled() -> None:
    assert not [name for name in fields_of(RecommendRequest) if topic_of(name)]


def test_clipping_names_every_framework_that_clips() -> None:
    hint = "--framework trainer, trl, axolotl, llamafactory or torchtitan clips gradients, the others do not"
    assert unknown_option("max_grad_norm", []).hint == hint
