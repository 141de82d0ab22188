"""Which losses, checkpointing and activation offload a search tries, in which order, and what each saves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from searches import GPT2, LLAMA, clock

from fsdp_advisor.advice import Recommendation, recommend_resolved
from fsdp_advisor.advice.batches import Batches
from fsdp_advisor.advice.evaluator import Evaluator
from fsdp_advisor.advice.open_choices import open_choices
from fsdp_advisor.advice.ranking import choose
from fsdp_advisor.advice.search import Search
from fsdp_advisor.advice.search_space import ActivationChoice, StrategyChoice, base_plan, search_space
from fsdp_advisor.estimator import estimate_resolved, lazy_report
from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.model.tape_key import TapeKey

LIGER, FULL = ActivationChoice(loss_code="liger"), ActivationChoice(activation_checkpointing="full")
OFFLOADED = FULL._replace(activation_offload=True)


def request_of(**options: Any) -> RecommendRequest:
    return make_request({"model": LLAMA, "gpus": 8, "gpu": "H100", "framework": "trainer", **options}, RecommendRequest)


def activations(**options: Any) -> set[ActivationChoice]:
    request = request_of(**options)
    return {choice.activations for choice in search_space(request, gpus=8, nnodes=1)}


def with_tapes_of(model: Resolved, *, loss: bool = False, offload: bool = False) -> Resolved:
    """The model as if Liger's loss, or the offload of checkpointed inputs, were recorded: with the tapes of the usual steps."""
    assert model.profile is not None
    tapes = dict(model.profile.tapes)
    for name in model.profile.tapes:
        key = TapeKey.from_name(name)
        if loss:
            tapes[replace(key, loss="liger").name] = tapes[name]
        if offload and key.checkpointing == "full":
            tapes[replace(key, activation_offload="inputs").name] = tapes[name]
    return replace(model, profile=replace(model.profile, tapes=tapes), recording_allowed=False)


def catalogued() -> Resolved:
    return resolve(LLAMA, allow_recording=False)


def advise(model: Resolved, **options: Any) -> Recommendation:
    request = request_of(**options)
    return recommend_resolved(lazy_report(request.as_estimate, model), model, request, timer=clock)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, {(loss, *rest) for loss in ("full", "liger") for rest in (("none", False), ("full", False), ("full", True))}),
        ({"loss": "full", "activation_checkpointing": "none"}, {("full", "none", False)}),
        ({"loss": "liger", "activation_offload": "false"}, {("liger", "none", False), ("liger", "full", False)}),
        ({"framework": "torch", "activation_offload": "false"}, {("full", p, False) for p in ("none", "selective", "full")}),
        ({"framework": "torchtitan"}, {("torchtitan", p, False) for p in ("none", "selective", "full")}),
        ({"framework": "trl", "loss": "chunked"}, {("trl", p, False) for p in ("none", "selective", "full")} | {("trl", "full", True)}),
    ],
)  # fmt: skip
def test_the_search_space_has_what_the_framework_has_and_the_request_leaves_open(
    options: dict[str, Any], found: set[tuple[str, str, bool]]
) -> None:
    assert activations(**options) == {ActivationChoice(*each) for each in found}  # type: ignore[arg-type]  # of literals


def test_ways_to_save_memory_are_ordered_by_their_cost() -> None:
    ladder = [
        ActivationChoice(), LIGER, ActivationChoice("full", "selective"), ActivationChoice("liger", "selective"), FULL,
        ActivationChoice("liger", "full"), OFFLOADED,
    ]  # fmt: skip
    choices = [StrategyChoice(strategy="zero3", backend="deepspeed", activations=each) for each in ladder]
    choices.append(StrategyChoice(strategy="zero3", backend="deepspeed", offload="optimizer"))
    assert sorted(choices, key=lambda choice: choice.simplicity_rank) == choices


def test_steps_that_the_catalog_lacks_are_left_out_and_named() -> None:
    advice = advise(catalogued())
    choices = {
        c.choice.activations
        for c in (advice.winner, *(other.candidate for other in advice.runners_up))
        if c is not None
    }
    assert choices <= {ActivationChoice(), FULL}
    assert any(
        "not searched" in note and "Liger's loss, activation offload; --thorough" in note for note in advice.notes
    )


def test_liger_s_loss_is_for_the_models_that_liger_patches() -> None:
    request = request_of(model=GPT2)
    base = base_plan(request, gpus=8, nnodes=1, seq_len=512)
    found = open_choices(request, resolve(GPT2, allow_recording=False), base)
    assert all(each.loss_code == "full" for each in (*found.left_out, *(c.activations for c in found.choices)))


def test_a_thorough_search_tries_everything() -> None:
    request = request_of(thorough=True)
    base = base_plan(request, gpus=8, nnodes=1, seq_len=1024)
    found = open_choices(request, catalogued(), base)
    assert {c.activations for c in found.choices} == activations() and found.left_out == ()


def test_each_choice_says_what_it_saves() -> None:
    """The loss is bounded by the logits of its recording, because its own step is not recorded."""
    advice = advise(catalogued(), strategy="zero3", micro_batch_size=8)
    assert advice.winner is not None
    by_choice = {saving.activations: saving for saving in advice.savings}
    assert by_choice[LIGER].is_bound and by_choice[LIGER].saved_bytes > 0
    assert not by_choice[FULL].is_bound and by_choice[FULL].saved_bytes > 0
    assert by_choice[FULL].relative_speed == pytest.approx(3 / 4, rel=0.05)
    assert [saving.as_dict()["activation_checkpointing"] for saving in advice.savings] == ["none", "full"]
    assert "checkpointing" in by_choice[FULL].activations.parts[0]


def test_offloaded_activations_come_before_offloaded_states() -> None:
    """Of plans that use the host less, one that uses it more has to be clearly faster."""
    model = with_tapes_of(catalogued(), offload=True)
    base = base_plan(request_of(), gpus=8, nnodes=1, seq_len=512)
    found = open_choices(request_of(thorough=True), model, base)
    evaluator = Evaluator(model=model, gpu=find_gpu("H100"), margin=0.08, timer=clock)
    search = Search(evaluator=evaluator, base=base, batches=Batches(sizes=(1,)), choices=found.choices)
    by_level = {c.host_level: search.candidate(c, 1) for c in found.choices if c.strategy == "zero3"}
    assert choose([by_level[2], by_level[1]]).winner is by_level[1]
    assert choose([by_level[1], by_level[0]]).winner is by_level[0]
    fast = replace(by_level[2], step_seconds=(by_level[1].step_seconds or 0) / 2)
    assert choose([fast, by_level[1]]).winner is fast


def test_the_recommended_loss_is_an_option_of_the_plan() -> None:
    model = with_tapes_of(catalogued(), loss=True)
    request = request_of(strategy="zero3", activation_checkpointing="none", micro_batch_size=1, thorough=True)
    advice = recommend_resolved(
        estimate_resolved(request.as_estimate, model),
        model,
        request,
        timer=clock,
        allowed=lambda p: p.loss_code == "liger",
    )
    assert advice.winner is not None and advice.winner.as_dict()["loss"] == "liger"
    assert "--loss liger" in " ".join(advice.options)
