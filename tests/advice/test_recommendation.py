"""The recommendation as data: its JSON, the rules of thumb, the cost, and what would fit if nothing does."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from matrix import in_turn, of_today
from searches import GPT2, LLAMA, advise, clock, no_clock

from fsdp_advisor import estimate, recommend
from fsdp_advisor.advice import recommend_resolved
from fsdp_advisor.advice.methods import advice_of_methods
from fsdp_advisor.advice.result import Advice
from fsdp_advisor.errors import NotRecordable, UsageError
from fsdp_advisor.estimator import estimate_resolved
from fsdp_advisor.hardware import Gpu, find_gpu
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model import cache
from fsdp_advisor.model.adapter_targets import NoDefaultTargets
from fsdp_advisor.model.resolve import resolve
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.units import format_gib, format_speed

pytestmark = pytest.mark.slow

JOB: dict[str, Any] = {"model": LLAMA, "gpus": 4, "gpu": "A100-40GB"}


def test_json_is_the_report_with_the_recommendation_filled() -> None:
    document = recommend(**JOB, timer=clock).as_dict()
    plain = estimate(**JOB).as_dict()
    assert json.loads(json.dumps(document)) == document
    assert document["estimates"] == plain["estimates"]
    assert document["request"].items() >= plain["request"].items()
    found = document["recommendation"]
    for key in ("strategy", "backend", "offload", "activation_checkpointing", "micro_batch_size", "gpus", "gpu"):
        assert found[key] is not None
    assert found["runs_in_available"] is (found["needed_bytes"] > found["available_bytes"])
    for step in found["path"]:
        assert {"question", "answer", "because", "needed_bytes", "available_bytes"} <= step.keys()
    assert all(row["because"] for row in found["rejected"])
    assert all({"source", "says", "would_run", "because"} <= rule.keys() for rule in found["rules_of_thumb"])
    ids = {node["id"] for node in found["tree"]["nodes"]}
    assert all({edge["from"], edge["to"]} <= ids for edge in found["tree"]["edges"])


def test_every_alternative_is_rejected_with_its_reason() -> None:
    recommendation = advise(**JOB)
    assert recommendation.winner is not None
    rows = recommendation.as_dict()["rejected"]
    named = [(r["strategy"], r["backend"], r["offload"], r["activation_checkpointing"]) for r in rows]
    assert len(named) == len(set(named)) == 23  # of 24 choices
    reasons = {name: row["because"] for name, row in zip(named, rows, strict=True)}
    assert re.fullmatch(
        r"its tensors alone need 1\d\d\.\d\d GiB at micro-batch 1, and 36\.24 GiB are available",
        reasons["ddp", "ddp", "none", "none"],
    )
    assert any(reason.startswith("it fits, but is ") for reason in reasons.values())


@in_turn(0, of=2)
def test_the_margin_is_left_free() -> None:
    for margin in ("0", 0.08, "25%"):
        recommendation = advise(model=LLAMA, gpus=8, gpu="80GiB", margin=margin)
        share = float(str(margin).rstrip("%")) / (100 if "%" in str(margin) else 1)
        assert recommendation.available_bytes == int(80 * 2**30 * (1 - share))
        assert recommendation.winner is not None and recommendation.winner.needed_bytes is not None
        assert recommendation.winner.needed_bytes <= recommendation.available_bytes


def test_training_cost_follows_from_the_speed() -> None:
    run = advise(**JOB, tokens="10e9", price=2).training
    assert run is not None
    winner = advise(**JOB).winner
    assert winner is not None
    assert winner.tokens_per_second_per_gpu is not None
    seconds = 10e9 / (4 * winner.tokens_per_second_per_gpu)
    assert run.days == pytest.approx(seconds / 86400)
    assert run.gpu_hours == pytest.approx(4 * seconds / 3600)
    assert run.cost == pytest.approx(2 * 4 * seconds / 3600)
    nothing = advise(no_clock, **JOB, tokens="10B").training
    assert nothing is not None
    assert (nothing.tokens, nothing.days, nothing.gpu_hours, nothing.cost) == (10**10, None, None, None)


@in_turn(1, of=6)
def test_remedies_make_the_job_fit() -> None:
    job: dict[str, Any] = {"model": "meta-llama/Llama-2-13b-hf", "gpus": 2, "gpu": "A100-40GB", "offload": "none"}
    recommendation = advise(**job)
    assert recommendation.winner is None
    assert recommendation.fits is False
    assert [list(remedy.options) for remedy in recommendation.remedies] == [["offload"], ["gpus", "nnodes"], ["gpu"]]
    for remedy in recommendation.remedies:
        assert advise(**job | dict(remedy.options)).winner is not None
    document = recommendation.as_dict()
    assert document["strategy"] is None
    assert document["fits"] is False
    assert [r["options"] for r in document["what_would_fit"]] == [dict(r.options) for r in recommendation.remedies]


@in_turn(1, of=2)
def test_fewer_tokens_are_a_remedy_for_large_activations() -> None:
    job: dict[str, Any] = {"model": LLAMA, "gpus": 8, "gpu": "40GiB", "strategy": "zero3", "backend": "fsdp2",
                           "offload": "none", "activation_checkpointing": "none"}  # fmt: skip
    recommendation = advise(**job, seq_len=4096, micro_batch_size=4)
    [tokens] = (r.options["seq_len"] for r in recommendation.remedies if "seq_len" in r.options)
    assert isinstance(tokens, int)
    assert advise(**job, micro_batch_size=4, seq_len=tokens).fits
    assert tokens % 128 == 0
    assert not advise(**job, micro_batch_size=4, seq_len=tokens + 128).fits


LONG: dict[str, Any] = {"model": "meta-llama/Llama-3.1-8B", "gpus": 8, "gpu": "H100", "seq_len": 65536, "strategy": "zero3",
                        "backend": "fsdp2", "offload": "none", "micro_batch_size": 1}  # fmt: skip


@in_turn(2, of=3)
def test_a_loss_without_logits_is_a_remedy() -> None:
    recommendation = advise(**LONG, activation_checkpointing="full")
    [remedy] = (r for r in recommendation.remedies if "loss" in r.options)
    assert dict(remedy.options) == {"loss": "liger"}
    assert "ZeRO-3 (fsdp2), checkpointing needs" in remedy.because


@in_turn(0, of=3)
def test_two_changes_together_are_a_remedy_if_none_alone_is() -> None:
    """Without checkpointing the activations are too large, and with it the logits."""
    recommendation = advise(**LONG, activation_checkpointing="none")
    found = [dict(remedy.options) for remedy in recommendation.remedies]
    assert {"activation_checkpointing": "full", "loss": "liger"} in found
    assert not any(options in ({"activation_checkpointing": "full"}, {"loss": "liger"}) for options in found)


@in_turn(2, of=4)
def test_rules_of_thumb_are_checked() -> None:
    rules = {rule.source: rule for rule in advise(**JOB).rules}
    tree, table = rules["decision tree by size"], rules["scenario table"]
    assert (tree.says, tree.would_run) == ("ZeRO-2", False)  # up to 13B ZeRO-2
    assert (table.says, table.would_run) == ("ZeRO-2", False)  # 1-7B DDP if it fits, else ZeRO-2
    small = {rule.source: rule for rule in advise(model=GPT2, gpus=2, gpu="H100").rules}
    assert {(rule.says, rule.would_run) for rule in small.values()} == {("DDP", True)}
    gap = {rule.source: rule for rule in advise(model="Qwen/Qwen2.5-32B", gpus=8, gpu="H100").rules}["scenario table"]
    assert (gap.says, gap.would_run) == (None, None)


@pytest.mark.parametrize("engine", [{"backend": "deepspeed"}, {"framework": "deepspeed"}], ids=str)
def test_rules_of_thumb_are_checked_with_the_engine_of_the_request(engine: dict[str, str]) -> None:
    job = {"model": LLAMA, "gpus": 4, "gpu": "H100", **engine}
    [row] = estimate(**job, strategy="zero2").estimates
    rules = advise(**job, activation_checkpointing="none").rules
    assert row.plan.backend == "deepspeed" and row.needed_bytes is not None
    assert [(rule.says, rule.would_run) for rule in rules] == [("ZeRO-2", True)] * 2
    assert all(f"needs {format_gib(row.needed_bytes)}" in rule.because for rule in rules)


def test_a_rule_of_thumb_that_the_request_rules_out_does_not_run() -> None:
    rules = advise(model=GPT2, gpus=2, gpu="H100", framework="deepspeed").rules
    assert {(rule.says, rule.would_run, rule.because) for rule in rules} == {
        ("DDP", False, "framework deepspeed has no strategy ddp")
    }


def test_a_rule_of_thumb_is_compared_at_its_best_micro_batch() -> None:
    def sharding_is_fast(model: Resolved, plan: Plan, gpu: Gpu) -> float:
        return clock(model, plan, gpu) * (0.5 if plan.strategy == "zero3" else 1)

    recommendation = advise(sharding_is_fast, model=LLAMA, gpus=8, gpu="H100", offload="none")
    rule = recommendation.rules[0]
    assert (rule.says, rule.would_run) == ("ZeRO-2", True)
    assert recommendation.winner is not None and recommendation.winner.tokens_per_second_per_gpu is not None
    [best] = (r.candidate for r in recommendation.runners_up if r.candidate.label == "ZeRO-2 (fsdp2)")
    assert best.plan.micro_batch_size > 1
    assert best.tokens_per_second_per_gpu is not None
    own, here = (format_speed(c.tokens_per_second_per_gpu or 0) for c in (best, recommendation.winner))
    at = f"at its best micro-batch, {best.plan.micro_batch_size}, it trains {own} per GPU, against {here} here"
    assert rule.because.endswith(at)


@in_turn(3, of=4)
def test_a_rule_of_thumb_has_no_speed_in_a_sweep_over_batches() -> None:
    largest = advise(model=GPT2, gpus=2, gpu="24GiB", seq_len=512, find="batch").rules[0]
    assert "tokens/s" not in largest.because  # the largest batch is not the fastest


@in_turn(1, of=4)
def test_unusual_host_memory_is_warned_of() -> None:
    one_plan = {"strategy": "zero3", "backend": "fsdp2", "activation_checkpointing": "full", "micro_batch_size": 1}
    job: dict[str, Any] = {"model": "Qwen/Qwen2.5-32B", "gpus": 8, "gpu": "T4", "seq_len": 1024, **one_plan}
    recommendation = advise(**job, offload="parameters")
    assert recommendation.winner is not None and recommendation.winner.host_unusual
    usual = find_gpu("T4").host_memory_bytes
    assert usual is not None and recommendation.winner.host_bytes_per_node > usual
    [warning] = recommendation.warnings
    for said in (format_gib(recommendation.winner.host_bytes_per_node), format_gib(usual), "--host-memory"):
        assert said in warning
    assert warning in recommendation.notes
    assert recommendation.as_dict()["warnings"] == [warning]
    assert not advise(**job, host_memory="16TiB").warnings
    unasked = advise(**job)
    assert unasked.winner is None and not unasked.warnings
    assert any("host_memory" in remedy.options for remedy in unasked.remedies)
    assert not advise(**JOB).warnings


@in_turn(3, of=6)
def test_plans_with_an_unusual_host_do_not_fit_unless_asked() -> None:
    """DeepSpeed's offload needs more host memory than FSDP2's. Even if it is faster, it is chosen only if the host is known to
    have that memory."""

    def hasty(model: Resolved, plan: Plan, gpu: Gpu) -> float:
        return clock(model, plan, gpu) * (0.01 if plan.backend == "deepspeed" else 1)

    job: dict[str, Any] = {"model": "Qwen/Qwen2.5-32B", "gpus": 8, "gpu": "MI250X", "micro_batch_size": 1}
    usual = find_gpu("MI250X").host_memory_bytes
    advice = {memory: advise(hasty, **job, host_memory=memory) for memory in (None, "4TiB")}
    assert usual is not None and advice[None].winner is not None and advice["4TiB"].winner is not None
    assert advice["4TiB"].winner.plan.backend == "deepspeed"
    assert advice[None].winner.host_bytes_per_node <= usual
    assert not [r for r in advice[None].runners_up if r.candidate.host_bytes_per_node > usual]
    assert any("of host memory per node, which usually has" in r.reason for r in advice[None].rejected)


@in_turn(2, of=4)
def test_gpt2_on_two_24_gb_gpus_fits_as_published() -> None:
    """GPT-2 Large and XL on 2 x 24 GB, fp32 and AdamW: XL under DDP is out of memory at batch 1, sharded it trains;
    Large trains under both, sharded with the larger batch. Source: huggingface/blog, pytorch-fsdp.md, tables 1 and 2."""
    job: dict[str, Any] = {"gpus": 2, "gpu": "23.65GiB", "precision": "fp32", "seq_len": 128, "margin": 0}
    extra_large = advise(model="openai-community/gpt2-xl", **job)
    [ddp] = (r for r in extra_large.rejected if r.choice.label == "DDP (ddp)")
    assert ddp.micro_batch_size == 1
    assert extra_large.winner is not None
    assert extra_large.winner.plan.strategy != "ddp"
    largest = [
        advise(
            model=GPT2, **job, find="batch", strategy=strategy, backend=backend, activation_checkpointing="none"
        ).sweep
        for strategy, backend in (("ddp", "ddp"), ("zero2", "fsdp1"), ("zero3", "fsdp1"))
    ]
    ddp_size, zero2_size, zero3_size = (found.answer for found in largest if found is not None)
    assert 0 < ddp_size < zero2_size < zero3_size  # type: ignore[operator]  # numbers, all three


def test_open_options_have_the_defaults_of_estimate() -> None:
    request = recommend(**JOB, timer=clock).recommendation.request
    assert request.as_estimate == EstimateRequest(**JOB)


def test_the_error_of_an_empty_search_space_names_options_to_leave_open() -> None:
    request = RecommendRequest(**JOB)
    model = resolve(LLAMA)
    report = estimate_resolved(request.as_estimate, model)
    with pytest.raises(NotRecordable) as error:
        recommend_resolved(report, model, request, allowed=lambda plan: False)
    assert error.value.hint == "leave --strategy, --backend or --offload open"


def test_unsupported_combinations_are_refused() -> None:
    with pytest.raises(UsageError, match="backend fsdp2 has no strategy zero1"):
        advise(**JOB, strategy="zero1", backend="fsdp2")


@in_turn(3, of=4)
def test_whether_the_host_is_large_enough_for_offload_to_nvme_is_unknown() -> None:
    job: dict[str, Any] = {"model": LLAMA, "gpus": 1, "gpu": "24GiB", "host_memory": "60GiB"}
    on_cpu, on_nvme = advise(**job), advise(**job, offload_device="nvme")
    asked = {node.id: node for node in on_cpu.tree.path}
    assert asked["offload_parameters"].answer == "no" and on_cpu.fits is False
    assert "of host memory per node, which has 60.00 GiB" in asked["offload_parameters"].because
    assert on_nvme.fits is None and on_nvme.winner is not None
    assert on_nvme.winner.memory_text.endswith("its host memory is unknown")


@in_turn(2, of=4)
def test_methods_that_need_a_host_of_unknown_memory_come_last() -> None:
    job: dict[str, Any] = {"model": "meta-llama/Llama-3.1-8B", "gpus": 1, "gpu": "rtx4090", "method": "any"}
    unknown = recommend(**job).recommendation
    full = unknown.methods[0].advice
    assert full is not None and full.recommendation.winner is not None
    assert full.recommendation.winner.plan.offload != "none"
    assert unknown.winner is not None and unknown.winner.plan.offload == "none" and unknown.request.use_peft
    on_host = format_gib(full.recommendation.winner.host_peak_bytes_per_node)
    assert unknown.why_method is not None
    assert unknown.why_method.startswith(
        f"LoRA is recommended: full fine-tuning offloads {on_host} to a host whose memory is unknown; QLoRA"
    )
    assert " rounds the weights of the base to 4 bits" in unknown.why_method
    known = recommend(**job, host_memory="256GiB", use_peft=True).recommendation
    assert known.winner is not None and known.winner.plan.offload != "none" and not known.request.use_peft
    assert any("use_peft is an option of LoRA and QLoRA only" in note for note in known.notes)


@in_turn(3, of=4)
def test_of_methods_that_all_need_a_host_of_unknown_memory_the_one_that_needs_least_is_chosen() -> None:
    found = recommend(model="meta-llama/Llama-3.3-70B-Instruct", gpus=2, gpu="rtx3090", method="any").recommendation
    hosts = [m.advice.recommendation.winner.host_bytes_per_node for m in found.methods]  # type: ignore[union-attr]
    assert found.winner is not None and found.winner.plan.offload != "none"
    assert found.winner.host_bytes_per_node == min(hosts) < max(hosts)
    assert found.why_method is not None and found.why_method.count(" to a host whose memory is unknown") == 2


def test_methods_adapt_all_linear_layers_if_peft_has_no_default() -> None:
    answer = recommend(**JOB, timer=clock)

    def advise_with_targets(request: RecommendRequest) -> Advice:
        if request.use_peft and request.lora_target_modules is None:
            raise NoDefaultTargets("--lora-target-modules has to name the modules", hint="all-linear")
        return replace(answer, recommendation=replace(answer.recommendation, request=request))

    found = advice_of_methods(RecommendRequest(**JOB, method="any"), advise_with_targets).recommendation
    targets = [m.advice and m.advice.recommendation.request.lora_target_modules for m in found.methods]
    assert targets == [None, "all-linear", "all-linear"]
    assert found.notes[0].endswith("so LoRA and QLoRA have lora_target_modules all-linear")


RECORDED_BY_BATCH: dict[str, Any] = {"model": "jhu-clsp/ettin-encoder-17m", "gpu": "L4", "strategy": "ddp"}
"""A job of a model whose steps are recorded for one micro-batch and length at a time."""


@in_turn(0, of=2)
def test_a_search_records_the_micro_batches_that_the_catalog_lacks() -> None:
    found = advise(**RECORDED_BY_BATCH, activation_checkpointing="none", offload="none").winner
    assert found is not None and found.plan.micro_batch_size > 1
    plan = {"activation_checkpointing": "none", "micro_batch_size": found.plan.micro_batch_size}
    conf = {"allocator_conf": found.allocator_conf} if found.allocator_conf else {}
    (row,) = estimate(**RECORDED_BY_BATCH, **plan, **conf).estimates
    assert row.needed_bytes == found.needed_bytes


@pytest.mark.parametrize("find", of_today([None, "batch", "gpus"], days=3))
def test_without_torch_a_search_tries_the_recorded_micro_batches_and_says_so(
    monkeypatch: pytest.MonkeyPatch, find: str | None
) -> None:
    monkeypatch.setattr(cache, "installed_versions", lambda: None)
    monkeypatch.setattr(cache, "folder", lambda: None)
    job = {**RECORDED_BY_BATCH, "model": "jhu-clsp/ettin-encoder-32m"}  # no other test records it
    recommendation = recommend(**job, find=find).recommendation
    assert recommendation.winner is not None and recommendation.winner.plan.micro_batch_size == 1
    note = "only micro-batch 1 was searched: others have to be recorded first, with torch and transformers"
    assert note in recommendation.notes


@pytest.mark.parametrize(
    ("gpu", "method", "options"),
    of_today(
        [("24GiB", "LoRA", {"use_peft": True}), ("16GiB", "QLoRA", {"use_peft": True, "load_in_4bit": True})], days=2
    ),
)
def test_adapters_are_a_remedy_where_the_whole_model_cannot_be_trained(
    gpu: str, method: str, options: dict[str, Any]
) -> None:
    job: dict[str, Any] = {"model": "meta-llama/Llama-3.1-8B", "gpus": 1, "gpu": gpu, "offload": "none"}
    remedy = recommend(**job).recommendation.remedies[-1]
    assert dict(remedy.options) == options and remedy.because.startswith(f"{method} fits with plain PyTorch (ddp)")
    assert recommend(**job, **options).recommendation.fits


@in_turn(1, of=4)
def test_the_adapter_remedy_is_the_plan_that_a_search_with_adapters_recommends() -> None:
    job: dict[str, Any] = {"model": "meta-llama/Llama-3.1-8B", "gpus": 1, "gpu": "rtx4090", "host_memory": "32GiB"}
    found = recommend(**job).recommendation
    winner = recommend(**job, use_peft=True).recommendation.winner
    assert winner is not None and winner.label == "plain PyTorch (ddp), checkpointing"
    assert found.remedies[-1].because == f"LoRA fits with {winner.label}: {winner.memory_text}"
    assert found.remedies[-1].command == "--use-peft"
    assert "fixed by the request: --host-memory 32GiB" in found.notes
