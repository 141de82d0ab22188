"""What is asked over HTTP: the command line's requests, and what only HTTP has, a configuration pasted in place of a model's name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import ConfigDict, Field, JsonValue, model_validator

from fsdp_advisor.advice.families import Job, families
from fsdp_advisor.job.parsing import Asked, model_of
from fsdp_advisor.job.plan import Plan, plans
from fsdp_advisor.job.request import EstimateRequest, RecommendRequest
from fsdp_advisor.tapes import tape_key_of

PASTED = "config.json"
"""What a pasted configuration is called in the answer."""

EXAMPLE: dict[str, Any] = {
    "model": "meta-llama/Llama-2-7b-hf",
    "gpus": 4,
    "gpu": "A100-40GB",
    "precision": "bf16-mixed",
}
EXAMPLE_CONFIG: dict[str, Any] = {
    "config": {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1376,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "vocab_size": 32000,
    },
    "gpus": 2,
}


@dataclass(frozen=True, slots=True)
class Question:
    """One question, whole: equal questions have equal answers.

    A `RecommendRequest` asks for a recommendation, any other for an estimate. `config` is the JSON text of a pasted
    configuration. `target` asks for an export; of its request only what is `given` is held.
    """

    request: EstimateRequest
    explain: bool = False
    config: str | None = None
    target: str | None = None
    given: frozenset[str] = frozenset()

    @property
    def searched(self) -> RecommendRequest | None:
        """The request of the search that answers this question; None where nothing is searched."""
        if isinstance(self.request, RecommendRequest):
            return self.request
        if self.target is not None and self.request.strategy == "all":
            return RecommendRequest(**{name: getattr(self.request, name) for name in self.given}, given=self.given)
        return None

    @property
    def slow(self) -> bool:
        """Whether the answer takes a part of a second: a search, or a walk through the allocator, which every export takes."""
        walked = self.target is not None or self.request.reserved or self.request.allocator_conf is not None
        return walked or self.searched is not None

    def variants(self) -> set[str]:
        """The recordings that the answer replays, by their keys. Raises UsageError."""
        return {tape_key_of(plan).name for plan in self._plans()}

    def _plans(self) -> Iterator[Plan]:
        searched = self.searched
        if searched is None and self.target is None:
            yield from plans(self.request, seq_len=1)
            return
        if searched is None:  # the target may have a backend of its own
            searched = RecommendRequest(**self.request.as_dict())
        yield from plans(searched.as_estimate, seq_len=1)
        job = Job.of(searched, gpus=searched.gpus, nnodes=searched.nnodes, seq_len=1)
        sizes = (1, 2) if searched.micro_batch_size is None else (searched.micro_batch_size,)
        yield from (family.plan(job, size) for family in families(searched, nnodes=searched.nnodes) for size in sizes)


# As they come: query strings and bodies

Explain = Annotated[bool, Field(description="Add each strategy's timeline, and its peak with a fused loss.")]
Model = Annotated[str, Field(min_length=1, max_length=4096, description="A name, or a number of parameters.")]
Config = Annotated[dict[str, JsonValue] | None, Field(description="A transformers config.json, in place of `model`.")]
_ONE_MODEL = ConfigDict(
    json_schema_extra={
        "oneOf": [{"required": ["model"]}, {"required": ["config"]}],
        "examples": [EXAMPLE, EXAMPLE_CONFIG],
    },
)


# made of the requests' fields, so that mypy cannot follow
_Estimate: Any = model_of(EstimateRequest)
_Recommend: Any = model_of(RecommendRequest)


class EstimateQuery(_Estimate):  # type: ignore[misc]
    """A query string that asks for an estimate."""

    explain: Explain = False

    def question(self) -> Question:
        return Question(self.request(EstimateRequest), explain=self.explain)


class RecommendQuery(_Recommend):  # type: ignore[misc]
    """A query string that asks for a recommendation."""

    explain: Explain = False

    def question(self) -> Question:
        return Question(self.request(RecommendRequest), explain=self.explain)


class ExportQuery(_Estimate):  # type: ignore[misc]
    """A query string that asks for a file to launch with."""

    def question(self, target: str) -> Question:
        request = self.request(EstimateRequest)
        return Question(request, target=target, given=request.given)


class _Posted(Asked):
    """What every body does alike."""

    @model_validator(mode="after")
    def _one_model(self) -> _Posted:
        if (getattr(self, "config", None) is None) == ("model" not in self.model_fields_set):
            raise ValueError("give model or config, one of them")
        return self

    @property
    def pasted(self) -> str | None:
        """The configuration, in one spelling."""
        config = getattr(self, "config", None)
        return None if config is None else json.dumps(config, sort_keys=True, separators=(",", ":"))


class EstimateBody(_Estimate, _Posted):  # type: ignore[misc]
    """A posted job to estimate: `model`, or `config` in its place."""

    model_config = _ONE_MODEL

    model: Model = PASTED
    config: Config = None
    explain: Explain = False

    def question(self) -> Question:
        request = self.request(EstimateRequest, model=PASTED)
        return Question(request, explain=self.explain, config=self.pasted)


class RecommendBody(_Recommend, _Posted):  # type: ignore[misc]
    """A posted job to recommend for: `model`, or `config` in its place."""

    model_config = _ONE_MODEL

    model: Model = PASTED
    config: Config = None
    explain: Explain = False

    def question(self) -> Question:
        request = self.request(RecommendRequest, model=PASTED)
        return Question(request, explain=self.explain, config=self.pasted)


class ExportBody(_Estimate, _Posted):  # type: ignore[misc]
    """A posted job to export: `model`, or `config` in its place."""

    model_config = _ONE_MODEL

    model: Model = PASTED
    config: Config = None

    def question(self, target: str) -> Question:
        request = self.request(EstimateRequest, model=PASTED)
        return Question(request, config=self.pasted, target=target, given=request.given)
