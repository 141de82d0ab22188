"""The decision tree: its shape, its numbers, and that its path tells the truth."""

from __future__ import annotations

from typing import Any

import pytest
from asked import GPT2, LLAMA, advise, unknown

from fsdp_advisor.advice import Recommendation
from fsdp_advisor.advice.nodes import NO, YES
from fsdp_advisor.advice.tree import ACTIVATIONS, FRAGMENTATION, STATES
from fsdp_advisor.estimator import estimate
from fsdp_advisor.hardware import find_gpu
from fsdp_advisor.job.plan import BACKENDS
from fsdp_advisor.units import format_gib

JOBS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "ddp fits": ({"model": GPT2, "gpus": 2, "gpu": "H100"}, ["ddp", "fastest"]),
    "states are too large": (
        {"model": LLAMA, "gpus": 4, "gpu": "A100-40GB"},
        ["ddp", "term", "zero1", "zero2", "zero3", "fastest"],
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
        {"model": "Qwen/Qwen2.5-32B", "gpus": 8, "gpu": "H100"},
        ["ddp", "term", "zero1", "zero2", "zero3", "checkpointing", "fastest"],
    ),
    "offload": (
        {"model": LLAMA, "gpus": 1, "gpu": "24GiB"},
        ["ddp", "term", "zero1", "zero2", "zero3", "checkpointing", "offload_optimizer", "fastest"],
    ),
    "offload of everything": (
        {"model": "meta-llama/Llama-2-70b-hf", "gpus": 2, "gpu": "24GiB"},
        ["ddp", "term", "zero1", "zero2", "zero3", "checkpointing", "offload_optimizer", "offload_parameters", "fastest"],
    ),
    "two nodes ask about hsdp": (
        {"model": "Qwen/Qwen2.5-32B", "gpus": 16, "nnodes": 2, "gpu": "H100"},
        ["ddp", "term", "zero1", "zero2", "hsdp", "zero3", "fastest"],
    ),
    "one strategy": (
        {"model": LLAMA, "gpus": 8, "gpu": "24GiB", "strategy": "zero3", "offload": "none"},
        ["zero3", "checkpointing", "fastest"],
    ),
    "nothing fits": (
        {"model": "meta-llama/Llama-2-70b-hf", "gpus": 2, "gpu": "24GiB", "offload": "none"},
        ["ddp", "term", "zero1", "zero2", "zero3", "checkpointing", "other", "more_gpus"],
    ),
}  # fmt: skip


def sound(recommendation: Recommendation) -> None:
    """One root, a parent before each child, and a path that is connected by its answers."""
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
    for node in tree.nodes:
        if node.answer in (YES, NO) and node.id not in ("more_gpus",) and not node.outcome:
            assert node.needed_bytes is not None
            assert node.available_bytes is not None
            assert (node.answer == YES) == (node.needed_bytes <= node.available_bytes)


@pytest.mark.parametrize("name", JOBS)
def test_the_path(name: str) -> None:
    options, path = JOBS[name]
    recommendation = advise(**options)
    sound(recommendation)
    ids = [node.id for node in recommendation.tree.path]
    asked = [id for id in ids if id not in FRAGMENTATION]
    assert asked == path
    last = ids[len(asked) :]  # what is settled by the allocator comes last
    assert last in ([], *(list(FRAGMENTATION[:n]) for n in (1, 2, 3)))
    assert bool(last) == (recommendation.winner is not None)


def test_the_allocator_has_the_last_word() -> None:
    """A 7B model on 4 x 40 GB: the fastest is not what fits once fragmentation is counted, on 8 x 80 GB it is, if set so."""
    nodes = {node.id: node for node in advise(model=LLAMA, gpus=4, gpu="A100-40GB").tree.path}
    assert [nodes[id].answer for id in FRAGMENTATION[:2]] == [NO, NO]
    assert nodes["next"].answer == "ZeRO-3 (fsdp2), checkpointing, micro-batch 5"
    assert "GiB reserved, 0.98 GiB for CUDA and NCCL), has 36.24 GiB" in nodes["fragmentation"].because
    set_so = {
        node.id: node
        for node in advise(model=LLAMA, gpus=8, gpu="H100", strategy="zero3", backend="deepspeed").tree.path
    }
    assert [set_so[id].answer for id in FRAGMENTATION[:2]] == [NO, YES]
    assert "next" not in set_so


def test_the_term_that_is_too_large() -> None:
    answers = {
        name: next(n.answer for n in advise(**JOBS[name][0]).tree.nodes if n.id == "term")
        for name in ("states are too large", "activations are too large")
    }
    assert answers == {"states are too large": STATES, "activations are too large": ACTIVATIONS}


def test_the_numbers_are_those_of_the_plan() -> None:
    job: dict[str, Any] = {"model": LLAMA, "gpus": 4, "gpu": "A100-40GB"}
    node = next(n for n in advise(**job).tree.nodes if n.id == "zero2")
    needed = [
        estimate(**job, strategy="zero2", backend=backend).estimates[0].needed_bytes or 0
        for backend in BACKENDS["zero2"]
        if backend != "fsdp1"
    ]
    available = int(find_gpu("A100-40GB").memory_bytes * 0.92)
    assert (node.needed_bytes, node.available_bytes) == (min(needed), available)
    assert node.because == f"needs {format_gib(min(needed))}, has {format_gib(available)}"


def test_the_leaf_is_the_recommended_one() -> None:
    recommendation = advise(model=LLAMA, gpus=4, gpu="A100-40GB")
    leaf = recommendation.tree.nodes[-1]
    assert recommendation.winner is not None
    assert (leaf.id, leaf.outcome, leaf.taken) == ("recommended", True, True)
    assert recommendation.winner.walked is not None
    assert leaf.needed_bytes == recommendation.winner.walked.device_bytes


def test_without_a_clock_the_last_question_is_about_simplicity() -> None:
    path = advise(unknown, model=LLAMA, gpus=4, gpu="A100-40GB").tree.path
    last = next(node for node in reversed(path) if node.id not in FRAGMENTATION)
    assert last.question.startswith("Which is the simplest of the")


def test_every_question_has_a_way_out() -> None:
    tree = advise(model=LLAMA, gpus=4, gpu="A100-40GB").tree
    ways = {node.parent for node in tree.nodes if node.outcome}
    ends = ("fastest", *FRAGMENTATION)  # one after the other
    assert len(ways.intersection(ends)) == 1
    assert ways - set(ends) == {n.id for n in tree.nodes if not n.outcome and n.id not in ("term", *ends)}


def test_a_bare_count_is_judged_by_its_states() -> None:
    recommendation = advise(model="7e9", gpus=4, gpu="H100")
    sound_path = [(n.id, n.answer) for n in recommendation.tree.path]
    assert sound_path[:3] == [("ddp", NO), ("term", STATES), ("zero1", "perhaps")]
    assert recommendation.fits is None
    assert recommendation.winner is not None
    assert recommendation.winner.needed_bytes is None
