"""The decision tree: its shape, its figures and its path."""

from __future__ import annotations

from typing import Any

import pytest
from matrix import in_turn, of_today
from searches import GPT2, LLAMA, advise, no_clock

from fsdp_advisor.advice import Recommendation
from fsdp_advisor.advice.decision_tree import ACTIVATIONS, NO, STATES, YES
from fsdp_advisor.estimator import estimate
from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.units import format_gib

JOBS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "ddp fits": ({"model": GPT2, "gpus": 2, "gpu": "H100"}, ["ddp", "fastest"]),
    "states are too large": (
        {"model": LLAMA, "gpus": 8, "gpu": "A100-40GB"},
        ["ddp", "term", "zero1", "zero2", "fastest"],
    ),
    "activations are too large": (
        {"model": GPT2, "gpus": 2, "gpu": "40GiB", "seq_len": 512, "global_batch_size": 64},
        ["ddp", "term", "ddp_checkpointing", "fastest"],
    ),
    "a smaller micro-batch": (
        {"model": GPT2, "gpus": 2, "gpu": "40GiB", "seq_len": 512, "global_batch_size": 64, "activation_checkpointing": "none"},
        ["ddp", "term", "ddp_micro_batch", "fastest"],
    ),
    "checkpointing": (
        {"model": LLAMA, "gpus": 4, "gpu": "A100-40GB", "micro_batch_size": 2},
        ["ddp", "term", "zero1", "zero2", "zero3", "checkpointing", "fastest"],
    ),
    "offload": (
        {"model": LLAMA, "gpus": 1, "gpu": "24GiB"},
        ["ddp", "term", "offload_optimizer", "fastest"],
    ),
    "offload of everything": (
        {"model": "meta-llama/Llama-2-70b-hf", "gpus": 2, "gpu": "24GiB"},
        ["ddp", "term", "zero1", "zero2", "zero3", "checkpointing", "offload_optimizer", "offload_parameters", "fastest"],
    ),
    "two nodes ask about hsdp": (
        {"model": "Qwen/Qwen2.5-32B", "gpus": 16, "nnodes": 2, "gpu": "H100"},
        ["ddp", "term", "zero1", "zero2", "hsdp", "zero3", "checkpointing", "fastest"],
    ),
    "one strategy": (
        {"model": LLAMA, "gpus": 8, "gpu": "24GiB", "strategy": "zero3", "offload": "none"},
        ["zero3", "checkpointing", "fastest"],
    ),
    "nothing fits": (
        {"model": LLAMA, "gpus": 2, "gpu": "24GiB", "offload": "none"},
        ["ddp", "term", "zero1", "zero2", "zero3", "checkpointing", "other", "remedies"],
    ),
}  # fmt: skip


def is_sound(recommendation: Recommendation) -> None:
    """One root, each parent before its children, a path connected by its answers, answers that follow from the figures."""
    tree = recommendation.tree
    seen: set[str] = set()
    for node in tree.nodes:
        assert node.id not in seen
        assert node.parent is None or node.parent in seen, f"{node.id} before {node.parent}"
        seen.add(node.id)
    assert [n.id for n in tree.nodes if n.parent is None] == [tree.nodes[0].id]
    for before, after in zip(tree.path, tree.path[1:], strict=False):
        assert (after.parent, after.on) == (before.id, before.answer)
    for node in tree.path:
        assert node.because
        assert node.answer
        if node.answer in (YES, NO) and node.id != "remedies":
            assert node.needed_bytes is not None
            assert node.available_bytes is not None
            runs = node.needed_bytes <= node.available_bytes or "are enough with less cache" in node.because
            assert (node.answer == YES) == runs


@pytest.mark.parametrize("name", of_today(list(JOBS), 2))
def test_the_tree_takes_the_expected_path(name: str) -> None:
    options, path = JOBS[name]
    recommendation = advise(**options)
    is_sound(recommendation)
    assert [node.id for node in recommendation.tree.path] == path


def test_questions_off_the_path_have_no_answer() -> None:
    nodes = {node.id: node for node in advise(model=GPT2, gpus=2, gpu="H100").tree.nodes}
    assert nodes["ddp"].answer == YES
    assert nodes["zero2"].answer is None
    assert nodes["zero2"].needed_bytes is None
    assert not nodes["zero2"].taken


@in_turn(0, of=2)
def test_the_tree_names_the_part_that_is_too_large() -> None:
    answers = {
        name: next(n.answer for n in advise(**JOBS[name][0]).tree.nodes if n.id == "term")
        for name in ("states are too large", "activations are too large")
    }
    assert answers == {"states are too large": STATES, "activations are too large": ACTIVATIONS}


@in_turn(1, of=2)
def test_figures_on_the_path_are_those_of_estimate() -> None:
    job: dict[str, Any] = {"model": LLAMA, "gpus": 4, "gpu": "A100-40GB"}
    nodes = {node.id: node for node in advise(**job).tree.path}
    available = int(find_gpu("A100-40GB").memory_bytes * 0.92)
    for strategy in ("ddp", "zero1", "zero2"):
        [row] = estimate(**job, strategy=strategy).estimates
        node = nodes[strategy]
        assert row.needed_bytes is not None
        assert (node.needed_bytes, node.available_bytes) == (row.needed_bytes, available)
        assert node.because == f"needs {format_gib(row.needed_bytes)}, and {format_gib(available)} are available"


@in_turn(3, of=5)
def test_offload_that_does_not_fit_is_answered_with_the_choice_that_needs_least() -> None:
    """ZeRO-1 with optimizer offload, the simplest, needs 12 times as much as ZeRO-3."""
    job: dict[str, Any] = {"model": "meta-llama/Llama-3.1-405B", "gpus": 8, "gpu": "A100-40GB", "micro_batch_size": 1}
    nodes = {node.id: node for node in advise(**job).tree.path}
    for offload in ("optimizer", "parameters"):
        [row] = estimate(
            **job, strategy="zero3", backend="deepspeed", offload=offload, activation_checkpointing="full"
        ).estimates
        node = nodes[f"offload_{offload}"]
        assert (node.answer, node.needed_bytes) == (NO, row.needed_bytes)
        assert node.because.startswith(f"{row.label} (deepspeed): needs {format_gib(row.needed_bytes or 0)}, ")
        assert f"{format_gib(row.host_bytes_per_node)} of host memory per node" in node.because


def test_the_tree_ends_in_the_recommendation() -> None:
    recommendation = advise(model=LLAMA, gpus=4, gpu="A100-40GB")
    leaf = recommendation.tree.nodes[-1]
    assert recommendation.winner is not None
    assert (leaf.id, leaf.outcome, leaf.taken) == ("recommended", True, True)
    assert leaf.needed_bytes == recommendation.winner.needed_bytes


def test_without_times_the_last_question_is_about_simplicity() -> None:
    last = advise(no_clock, model=GPT2, gpus=2, gpu="24GiB").tree.path[-1]
    assert last.question == "Which is the simplest plan that fits?"


def test_every_question_has_an_outcome() -> None:
    tree = advise(model=LLAMA, gpus=4, gpu="A100-40GB").tree
    outcomes = {node.parent for node in tree.nodes if node.outcome}
    assert outcomes == {n.id for n in tree.nodes if not n.outcome and n.id != "term"}


def test_a_bare_count_is_judged_by_its_states() -> None:
    recommendation = advise(model="7e9", gpus=4, gpu="H100")
    path = [(n.id, n.answer) for n in recommendation.tree.path]
    assert path[:3] == [("ddp", NO), ("term", STATES), ("zero1", "unknown")]
    assert recommendation.fits is None
    assert recommendation.winner is not None
    assert recommendation.winner.needed_bytes is None
