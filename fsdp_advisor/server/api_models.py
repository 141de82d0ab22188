"""Query strings and bodies of the REST routes: the command line's requests, plus fields that only HTTP has."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    JsonValue,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

from fsdp_advisor.configs import complete, from_texts
from fsdp_advisor.job.config_reading import ConfigReading
from fsdp_advisor.job.fields import fields_of, read_fields
from fsdp_advisor.job.request import AnyRequest, EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.server.answers import ModelSource
from fsdp_advisor.server.request_models import RequestModel, model_of, shown_in_json

PASTED = "config.json"
"""The name of a pasted configuration in its answer."""

EXAMPLE: dict[str, Any] = {
    "model": "meta-llama/Llama-2-7b-hf",
    "gpus": 4,
    "gpu": "A100-40GB",
    "precision": "bf16-mixed",
}
EXAMPLE_CONFIG: dict[str, Any] = {  # the shapes of a catalogued model, whose answer needs no recording
    "config": {
        "model_type": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "tie_word_embeddings": False,
    },
    "gpus": 2,
}

ConfigFiles = Annotated[
    tuple["ConfigText", ...],
    Field(max_length=16, description="Configuration files of other tools; the body's options win."),
]
Explain = Annotated[bool, Field(description="Add each strategy's timeline, and its peak with a fused loss.")]
Whole = Annotated[
    bool, Field(description="A zip archive of every file that a launch needs, not the target's file alone.")
]
Model = Annotated[str, Field(min_length=1, max_length=4096, description="A name, or a number of parameters.")]
Config = Annotated[dict[str, JsonValue] | None, Field(description="A transformers config.json, in place of `model`.")]

# mypy cannot follow classes that are made at run time
_Estimate: Any = model_of(EstimateRequest)
_Recommend: Any = model_of(RecommendRequest)


class CheckQuery(_Estimate):  # type: ignore[misc]
    """A query string that asks whether a job fits."""


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
    config_file: ConfigFiles = ()
    _configs: tuple[ConfigReading, ...] = PrivateAttr(default=())

    @model_validator(mode="wrap")
    @classmethod
    def _with_files(cls, given: Any, handler: ModelWrapValidatorHandler[_Body]) -> _Body:
        """The options of the files and of the body, which wins. Raises UsageError for a file that cannot be read."""
        if not isinstance(given, dict) or not given.get("config_file"):
            return handler(given)
        files = ConfigTexts.model_validate({"config_file": given["config_file"]}).config_file
        own = {name: value for name, value in given.items() if name not in fields_of(cls.kind)}
        asked = read_fields({n: v for n, v in given.items() if n not in own}, fields_of(cls.kind), shown_in_json)
        found = complete(from_texts({file.name: file.text for file in files}), asked, getattr(cls.kind, "SEARCHED", ()))
        options = dict(found.options)
        if own.get("config") is not None:
            options.pop("model", None)
        body = handler(own | options)
        body._configs = found.readings
        return body

    def request(self, kind: type[AnyRequest], **defaults: Any) -> AnyRequest:
        """The request, with the readings of its files."""
        return replace(super().request(kind, **defaults), configs=self._configs)

    @model_validator(mode="after")
    def _names_one_model(self) -> _Body:
        has_model = "model" in self.model_fields_set
        if has_model and self.config is not None:
            raise ValueError("give model or config, not both")
        if not has_model and self.config is None:
            raise ValueError("model is missing: give its name, or its config.json as config")
        return self

    def source(self) -> ModelSource:
        """The model to answer for."""
        if self.config is None:
            return ModelSource(self.model)
        return ModelSource(PASTED, json.dumps(self.config, sort_keys=True, separators=(",", ":")).encode())


class ConfigText(BaseModel):
    """A configuration file of another tool. Its name tells the format: `fsdp.yaml`, `ds_config.json`, `train.sh`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=200)]
    text: Annotated[str, Field(max_length=65_536)]


class ConfigTexts(BaseModel):
    """The configuration files of a body. Errors then name their place in it."""

    config_file: ConfigFiles


class EstimateBody(_Body, _Estimate):  # type: ignore[misc]
    """A posted job to estimate: `model`, or `config` in its place."""

    explain: Explain = False


class RecommendBody(_Body, _Recommend):  # type: ignore[misc]
    """A posted job to recommend for: `model`, or `config` in its place."""

    explain: Explain = False


class ExportBody(_Body, _Estimate):  # type: ignore[misc]
    """A posted job to export: `model`, or `config` in its place."""

    bundle: Whole = False


class CheckBody(_Body, _Estimate):  # type: ignore[misc]
    """A posted job to check: `model`, or `config` in its place."""


class DiagnoseBody(BaseModel):
    """The text of an out-of-memory error, or a log that has one, and the job. Its model must be in the catalog."""

    model_config = ConfigDict(extra="forbid")

    text: Annotated[str, Field(min_length=1, max_length=200_000, description="PyTorch's message, or a log.")]
    job: CheckBody | None = None

    @model_validator(mode="after")
    def _names_model(self) -> DiagnoseBody:
        if self.job is not None and self.job.config is not None:
            raise ValueError("diagnose takes a model by name, not a config")
        return self


class CompareBody(BaseModel):
    """Two jobs to compare. Each names its model, or has a configuration file that does; a `config` cannot be compared."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"a": EXAMPLE, "b": EXAMPLE | {"precision": "fp32"}}]}
    )

    a: CheckBody
    b: CheckBody

    @model_validator(mode="after")
    def _names_models(self) -> CompareBody:
        if self.a.config is not None or self.b.config is not None:
            raise ValueError("compare takes models by name, not a config")
        return self
