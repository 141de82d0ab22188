"""The recommendation as data: the contract's JSON, the rules of thumb, the cost, what would fit where nothing does."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
from asked import GPT2, LLAMA, advise, clock, unknown

import fsdp_advisor
from fsdp_advisor import estimate, recommend
from fsdp_advisor.advice.settling import NEAR
from fsdp_advisor.errors import UsageError
from fsdp_advisor.hardware import Gpu, find_gpu
from fsdp_advisor.job.plan import Plan
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.model.resolve import Resolved
from fsdp_advisor.units import format_gib, format_speed

JOB: dict[str, Any] = {"model": LLAMA, "gpus": 4, "gpu": "A100-40GB"}


def test_the_document_is_the_estimates_with_the_recommendation_filled() -> None:
    document = recommend(**JOB, timer=clock).as_dict()
    plain = estimate(**JOB).as_dict()
    assert json.loads(json.dumps(document)) == document
    assert document["estimates"] == plain["estimates"]
    assert document["request"].items() >= plain["request"].items()
    found = document["recommendation"]
    for key in ("strategy", "backend", "offload", "activation_checkpointing", "micro_batch_size", "gpus", "gpu"):
        assert found[key] is not None
    assert found["needed_bytes"] <= found["available_bytes"]
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
    assert len(named) == len(set(named)) == 23  # of 24 families
    whys = {name: row["because"] for name, row in zip(named, rows, strict=True)}
    assert re.fullmatch(r"needs 1\d\d\.\d\d GiB, has 36\.24 GiB, at micro-batch 1", whys["ddp", "ddp", "none", "none"])
    assert whys["zero3", "deepspeed", "parameters", "full"].startswith("it fits, but is ")


def test_options_mean_the_same_plan() -> None:
    for more in ({}, {"global_batch_size": 64}, {"find": "sequence"}, {"offload": "parameters"}):
        recommendation = advise(**JOB, **more)
        assert recommendation.winner is not None
        words = iter(shlex.split(shlex.join(recommendation.options)))
        given = {word[2:].replace("-", "_"): next(words) for word in words}
        [row] = fsdp_advisor.estimate(**given).estimates
        assert row.plan == recommendation.winner.plan
        device = recommendation.winner.walked.device_bytes if recommendation.winner.walked else None
        assert row.needed_bytes == (device if "allocator_conf" in given else recommendation.winner.needed_bytes)


def test_the_margin_is_left_free() -> None:
    for margin in ("0", 0.08, "25%"):
        recommendation = advise(model=LLAMA, gpus=8, gpu="80GiB", margin=margin)
        share = float(str(margin).rstrip("%")) / (100 if "%" in str(margin) else 1)
        assert recommendation.available_bytes == int(80 * 2**30 * (1 - share))
        assert recommendation.winner is not None and recommendation.winner.needed_bytes is not None
        assert recommendation.winner.needed_bytes <= recommendation.available_bytes


def test_days_hours_and_cost() -> None:
    run = advise(**JOB, tokens="10e9", price=2).training
    assert run is not None
    winner = advise(**JOB).winner
    assert winner is not None
    assert winner.tokens_per_second_per_gpu is not None
    seconds = 10e9 / (4 * winner.tokens_per_second_per_gpu)
    assert run.days == pytest.approx(seconds / 86400)
    assert run.gpu_hours == pytest.approx(4 * seconds / 3600)
    assert run.cost == pytest.approx(2 * 4 * seconds / 3600)
    nothing = advise(unknown, **JOB, tokens="10B").training
    assert nothing is not None
    assert (nothing.tokens, nothing.days, nothing.gpu_hours, nothing.cost) == (10**10, None, None, None)


def test_where_nothing_fits_it_says_what_would() -> None:
    recommendation = advise(model="meta-llama/Llama-2-70b-hf", gpus=8, gpu="A100-40GB", offload="none")
    assert recommendation.winner is None
    assert recommendation.fits is False
    assert [list(remedy.options) for remedy in recommendation.remedies] == [["offload"], ["gpus", "nnodes"], ["gpu"]]
    for remedy in recommendation.remedies:  # each, done, helps
        job: dict[str, Any] = {"model": "meta-llama/Llama-2-70b-hf", "gpus": 8, "gpu": "A100-40GB", "offload": "none"}
        assert advise(**job | dict(remedy.options)).winner is not None
    document = recommendation.as_dict()
    assert document["strategy"] is None
    assert document["fits"] is False
    assert [r["options"] for r in document["what_would_fit"]] == [dict(r.options) for r in recommendation.remedies]


def test_fewer_tokens_help_where_the_batch_is_what_is_too_large() -> None:
    job: dict[str, Any] = {"model": LLAMA, "gpus": 8, "gpu": "40GiB", "strategy": "zero3", "backend": "fsdp2",
                           "offload": "none", "activation_checkpointing": "none"}  # fmt: skip
    recommendation = advise(**job, seq_len=4096, micro_batch_size=4)
    [tokens] = (r.options["seq_len"] for r in recommendation.remedies if "seq_len" in r.options)
    assert isinstance(tokens, int)
    assert advise(**job, micro_batch_size=4, seq_len=tokens).fits
    assert not advise(**job, micro_batch_size=4, seq_len=int(tokens * (1 + 1.5 * NEAR))).fits  # no nearer


def test_rules_of_thumb_and_where_they_err() -> None:
    rules = {rule.source: rule for rule in advise(**JOB).rules}
    tree, table = rules["decision tree by size"], rules["scenario table"]
    assert (tree.says, tree.would_run) == ("ZeRO-2", False)  # up to 13B ZeRO-2
    assert (table.says, table.would_run) == ("ZeRO-2", False)  # 1-7B DDP if it fits, else ZeRO-2
    small = {rule.source: rule for rule in advise(model=GPT2, gpus=2, gpu="H100").rules}
    assert {(rule.says, rule.would_run) for rule in small.values()} == {("DDP", True)}
    gap = {rule.source: rule for rule in advise(model="Qwen/Qwen2.5-32B", gpus=8, gpu="H100").rules}["scenario table"]
    assert (gap.says, gap.would_run) == (None, None)


def test_a_rule_of_thumb_is_compared_at_its_own_best_batch() -> None:
    recommendation = advise(model=LLAMA, gpus=8, gpu="H100")
    rule = recommendation.rules[0]
    assert (rule.says, rule.would_run) == ("ZeRO-2", True)
    assert recommendation.winner is not None and recommendation.winner.tokens_per_second_per_gpu is not None
    [like] = (
        c for c in recommendation.rivals
        if (c.plan.strategy, c.plan.backend, c.plan.offload, c.plan.activation_checkpointing) == ("zero2", "fsdp2", "none", "none")
    )  # fmt: skip
    assert like.plan.micro_batch_size > 1
    assert like.tokens_per_second_per_gpu is not None
    own, here = (format_speed(c.tokens_per_second_per_gpu or 0) for c in (like, recommendation.winner))
    at = f"at its best, micro-batch {like.plan.micro_batch_size}, it trains {own} per GPU, against {here} here"
    assert rule.because.endswith(at)
    largest = advise(model=LLAMA, gpus=8, gpu="H100", find="batch").rules[0]
    assert "tokens/s" not in largest.because  # the largest batch is not the fastest


def test_a_host_larger_than_its_nodes_are_sold_with_is_warned_of() -> None:
    job: dict[str, Any] = {"model": "meta-llama/Llama-3.1-405B", "gpus": 8, "gpu": "H100"}
    recommendation = advise(**job)
    assert recommendation.winner is not None
    usual = find_gpu("H100").host_memory_bytes
    assert usual is not None and recommendation.winner.host_bytes_per_node > usual
    [warning] = recommendation.warnings
    for said in (format_gib(recommendation.winner.host_bytes_per_node), format_gib(usual), "--host-memory"):
        assert said in warning
    assert warning in recommendation.notes
    assert recommendation.as_dict()["warnings"] == [warning]
    assert not advise(**job, host_memory="16TiB").warnings
    held = advise(**job, host_memory="2TiB")
    assert held.winner is None and not held.warnings
    assert not advise(**JOB).warnings


def test_an_unusual_host_comes_last() -> None:
    """DeepSpeed's offload takes more of it than FSDP2's: were it much faster, it would still not be chosen, unless the host is
    known to hold it."""

    def hasty(model: Resolved, plan: Plan, gpu: Gpu) -> float:
        return clock(model, plan, gpu) * (0.01 if plan.backend == "deepspeed" else 1)

    job: dict[str, Any] = {"model": "Qwen/Qwen2.5-32B", "gpus": 8, "gpu": "MI250X", "micro_batch_size": 1}
    usual = find_gpu("MI250X").host_memory_bytes
    advice = {memory: advise(hasty, **job, host_memory=memory) for memory in (None, "4TiB")}
    assert usual is not None and advice[None].winner is not None and advice["4TiB"].winner is not None
    assert advice["4TiB"].winner.plan.backend == "deepspeed"
    assert advice[None].winner.host_bytes_per_node <= usual
    beyond = [c for c in advice[None].rivals if c.host_bytes_per_node > usual]
    assert beyond and beyond == list(advice[None].rivals[-len(beyond) :])
    assert all(advice[None].why_not(c).startswith("its host takes ") for c in beyond)
    assert "is faster, but its host takes " in " ".join(node.because for node in advice[None].tree.path)


def test_the_gpt2_of_the_source_documents() -> None:
    """GPT-2 Large and XL on 2 x 24 GB, fp32 and AdamW: XL under DDP is out of memory at batch 1, sharded it trains;
    Large trains under both, sharded with the larger batch. Source: huggingface/blog, pytorch-fsdp.md, tables 1 and 2."""
    job: dict[str, Any] = {"gpus": 2, "gpu": "23.65GiB", "precision": "fp32", "seq_len": 128, "margin": 0}
    extra_large = advise(model="openai-community/gpt2-xl", **job)
    ddp = next(c for c in extra_large.refused if c.plan.strategy == "ddp" and c.plan.activation_checkpointing == "none")
    assert ddp.plan.micro_batch_size == 1
    assert extra_large.winner is not None
    assert extra_large.winner.plan.strategy != "ddp"
    largest = [
        advise(
            model=GPT2, **job, find="batch", strategy=strategy, backend=backend, activation_checkpointing="none"
        ).finding
        for strategy, backend in (("ddp", "ddp"), ("zero2", "fsdp1"), ("zero3", "fsdp1"))
    ]
    ddp_size, zero2_size, zero3_size = (finding.answer for finding in largest if finding is not None)
    assert 0 < ddp_size < zero2_size < zero3_size  # type: ignore[operator]  # numbers, all three


def test_what_is_left_open_has_the_estimates_defaults() -> None:
    request = recommend(**JOB, timer=clock).recommendation.request
    assert request.as_estimate == EstimateRequest(**JOB)


def test_a_combination_that_no_backend_has() -> None:
    with pytest.raises(UsageError, match="backend fsdp2 has no strategy zero1"):
        advise(**JOB, strategy="zero1", backend="fsdp2")


def test_nvme_is_asked_where_the_host_is_too_small() -> None:
    recommendation = advise(model="meta-llama/Llama-2-70b-hf", gpus=2, gpu="24GiB", host_memory="300GiB")
    asked = {node.id: node for node in recommendation.tree.path}
    assert asked["offload_parameters"].answer == "no"
    assert "which has 300.00 GiB" in asked["offload_parameters"].because
    assert "offload_nvme" in asked
