"""Query strings and bodies of the REST routes: the command line's requests, plus what only HTTP has."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import ConfigDict, Field, JsonValue, model_validator

from fsdp_advisor.job.request import EstimateRequest, RecommendRequest
from fsdp_advisor.server.answers import ModelSource
from fsdp_advisor.server.request_models import RequestModel, model_of

PASTED = "config.json"
"""The name of a pasted configuration in its answer."""

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

Explain = Annotated[bool, Field(description="Add each strategy's timeline, and its peak with a fused loss.")]
Whole = Annotated[
    bool, Field(description="A zip archive of every file that a launch needs, not the target's file alone.")
]
Model = Annotated[str, Field(min_length=1, max_length=4096, description="A name, or a number of parameters.")]
Config = Annotated[dict[str, JsonValue] | None, Field(description="A transformers config.json, in place of `model`.")]

# mypy cannot follow classes that are made at run time
_Estimate: Any = model_of(EstimateRequest)
_Recommend: Any = model_of(RecommendRequest)


class EstimateQuery(_Estimate):  # type: ignore[misc]
    """A query string that asks for an estimate."""

    explain: Explain = False


class RecommendQuery(_Recommend):  # type: ignore[misc]
    """A query string that asks for a recommendation."""

    explain: Explain = False


class ExportQuery(_Estimate):  # type: ignore[misc]
    """A query string that asks for a file to launch with."""

    bundle: Whole = False


class _Body(RequestModel):
    """What all bodies share: `model`, or `config` in its place."""

    model_config = ConfigDict(
        json_schema_extra={
            "oneOf": [{"required": ["model"]}, {"required": ["config"]}],
            "examples": [EXAMPLE, EXAMPLE_CONFIG],
        },
    )

    model: Model = PASTED
    config: Config = None

    @model_validator(mode="after")
    def _names_one_model(self) -> _Body:
        if (self.config is None) == ("model" not in self.model_fields_set):
            raise ValueError("give model or config, one of them")
        return self

    def source(self) -> ModelSource:
        """The model to answer for."""
        if self.config is None:
            return ModelSource(self.model)
        return ModelSource(PASTED, json.dumps(self.config, sort_keys=True, separators=(",", ":")).encode())


class EstimateBody(_Body, _Estimate):  # type: ignore[misc]
    """A posted job to estimate: `model`, or `config` in its place."""

    explain: Explain = False


class RecommendBody(_Body, _Recommend):  # type: ignore[misc]
    """A posted job to recommend for: `model`, or `config` in its place."""

    explain: Explain = False


class ExportBody(_Body, _Estimate):  # type: ignore[misc]
    """A posted job to export: `model`, or `config` in its place."""

    bundle: Whole = False
