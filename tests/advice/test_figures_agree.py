"""A recommendation and `estimate` give the same figures for the same plan."""

from __future__ import annotations

import json
import shlex
from typing import Any

import pytest
from matrix import of_today, taken
from searches import GPT2, LLAMA, advise, estimate_of

import fsdp_advisor
from fsdp_advisor.advice import Recommendation
from fsdp_advisor.cli import main

pytestmark = pytest.mark.slow

SMALL = "openai-community/gpt2"
JOBS: tuple[dict[str, Any], ...] = (
    {"model": SMALL, "gpus": 1, "gpu": "4GiB"},
    {"model": SMALL, "gpus": 4, "gpu": "V100-16GB", "precision": "fp16-mixed"},
    {"model": SMALL, "gpus": 8, "gpu": "4GiB", "global_batch_size": 64, "seq_len": 512},
    {"model": SMALL, "gpus": 2, "gpu": "4GiB", "framework": "deepspeed"},
    {"model": SMALL, "gpus": 16, "nnodes": 2, "gpu": "4GiB", "framework": "accelerate", "margin": 0.3},
    {"model": GPT2, "gpus": 2, "gpu": "24GiB", "find": "batch", "seq_len": 256, "host_memory": "64GiB"},
    {"model": LLAMA, "gpus": 4, "gpu": "A100-40GB"},
)
MORE: tuple[dict[str, Any], ...] = (
    {"model": GPT2, "gpus": 2, "gpu": "24GiB"},
    {"model": GPT2, "gpus": 2, "gpu": "H100"},
    {"model": GPT2, "gpus": 4, "gpu": "24GiB", "gradient_accumulation_steps": 4},
    {"model": GPT2, "gpus": 2, "gpu": "24GiB", "margin": 0},
    {"model": GPT2, "gpus": 2, "gpu": "24GiB", "margin": 0.3},
    {"model": GPT2, "gpus": 2, "gpu": "24GiB", "framework": "accelerate"},
    {"model": GPT2, "gpus": 2, "gpu": "24GiB", "framework": "trainer"},
    {"model": GPT2, "gpus": 16, "nnodes": 2, "gpu": "16GiB"},
    {"model": GPT2, "gpus": 2, "gpu": "24GiB", "precision": "fp32", "optim": "sgd"},
    {"model": GPT2, "gpus": 2, "gpu": "24GiB", "allocator_conf": "max_split_size_mb:256"},
    {"model": GPT2, "gpus": 2, "gpu": "24GiB", "host_memory": "64GiB"},
    {"model": GPT2, "gpus": 2, "gpu": "24GiB", "backend": "fsdp1"},
    {"model": GPT2, "gpus": 2, "gpu": "24GiB", "find": "batch", "seq_len": 256},
    {"model": GPT2, "gpus": 2, "gpu": "8GiB", "find": "sequence"},
    {"model": LLAMA, "gpus": 8, "gpu": "H100"},
)


@pytest.fixture(scope="module", params=taken(JOBS, MORE, days=2), ids=str)
def advised(request: pytest.FixtureRequest) -> tuple[dict[str, Any], Recommendation]:
    return request.param, advise(None, **request.param)


Advised = tuple[dict[str, Any], Recommendation]


def test_winner_and_runners_up_have_the_figures_of_estimate(advised: Advised) -> None:
    job, recommendation = advised
    assert recommendation.winner is not None
    found = [recommendation.winner, *(other.candidate for other in recommendation.runners_up), *recommendation.frontier]
    for candidate in found:
        row = estimate_of(candidate, job["model"])
        assert row.fits
        assert candidate.needed_bytes == row.needed_bytes
        assert row.needed_bytes is not None
        assert row.needed_bytes <= recommendation.available_bytes or candidate.runs_in_available
        assert candidate.step_seconds == (row.step.seconds if row.step else None)


def test_json_has_one_needed_figure(advised: Advised) -> None:
    _, recommendation = advised
    document = recommendation.as_dict()
    assert document["needed_bytes"] == document["estimate"]["needed_bytes"]
    assert document["peak_reserved_bytes"] == document["estimate"]["peak_reserved_bytes"]
    assert document["step_seconds"] == document["estimate"]["step_seconds"]
    assert document["tree"]["nodes"][-1]["needed_bytes"] == document["needed_bytes"]


def test_options_give_the_same_estimate(advised: Advised) -> None:
    _, recommendation = advised
    words = iter(shlex.split(shlex.join(recommendation.options)))
    given = {word[2:].replace("-", "_"): next(words) for word in words}
    [row] = fsdp_advisor.estimate(**given).estimates
    assert recommendation.winner is not None
    assert row.plan == recommendation.winner.plan
    assert row.needed_bytes == recommendation.winner.needed_bytes


SWEPT: dict[str, Any] = {"model": SMALL, "gpus": 4, "gpu": "16GiB", "strategy": "ddp", "seq_len": 256}
SWEEPS: dict[str, dict[str, Any]] = {
    "batch": {"global_batch_size": 48},
    "sequence": {"micro_batch_size": 4},
    "gpus": {"framework": "trainer", "eval_strategy": "steps", "compute_metrics": True, "eval_samples": 64},
    "gpu-type": {"micro_batch_size": 4},
}


@pytest.mark.parametrize("find", of_today(tuple(SWEEPS), days=4))
def test_estimate_gives_the_same_figures_for_what_a_sweep_finds(find: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = fsdp_advisor.recommend(find=find, **SWEPT, **SWEEPS[find]).recommendation
    main(["estimate", "--json", "-q", *found.options])
    [row] = json.loads(capsys.readouterr().out)["estimates"]
    assert found.winner is not None
    assert (row["needed_bytes"], row["fits"]) == (found.winner.needed_bytes, True)
