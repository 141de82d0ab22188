"""What is asked over HTTP: the command line's request, and what only HTTP has, a configuration pasted in place of a model's name."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import ConfigDict, Field, JsonValue, model_validator

from fsdp_advisor.request import EstimateRequest

PASTED = "config.json"
"""What a pasted configuration is called in the answer."""

_EXPLAIN = "Add each strategy's timeline, and its peak with a fused loss."
_EXAMPLE: dict[str, Any] = {
    "model": "meta-llama/Llama-2-7b-hf",
    "gpus": 4,
    "gpu": "A100-40GB",
    "precision": "bf16-mixed",
}


@dataclass(frozen=True, slots=True)
class Question:
    """One question, whole: equal questions have equal answers. `config` is the JSON text of a pasted configuration."""

    request: EstimateRequest
    explain: bool = False
    config: str | None = None


class EstimateQuery(EstimateRequest):
    """A query string."""

    explain: Annotated[bool, Field(description=_EXPLAIN)] = False

    def question(self) -> Question:
        return Question(_request(self), self.explain)


class EstimateBody(EstimateQuery):
    """A posted job: `model`, or `config` in its place."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": ["model"]}, {"required": ["config"]}],
            "examples": [_EXAMPLE, {"config": {"model_type": "llama", "hidden_size": 512}, "gpus": 2}],
        }
    )

    model: Annotated[str, Field(min_length=1, max_length=4096)] = PASTED
    config: Annotated[
        dict[str, JsonValue] | None, Field(description="A transformers config.json, in place of `model`.")
    ] = None

    @model_validator(mode="after")
    def _one_model(self) -> EstimateBody:
        if (self.config is None) == ("model" not in self.model_fields_set):
            raise ValueError("give model or config, one of them")
        return self

    def question(self) -> Question:
        config = None if self.config is None else json.dumps(self.config, sort_keys=True, separators=(",", ":"))
        return Question(_request(self), self.explain, config)


def _request(asked: EstimateRequest) -> EstimateRequest:
    """The part that the command line has too."""
    return EstimateRequest(**{name: getattr(asked, name) for name in EstimateRequest.model_fields})
