"""A request as pydantic reads it: models made of the same fields, for what is not plainly right, and for REST."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Optional

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.request import AnyRequest, EstimateRequest, Option, check_nodes, fields_of

AS_WRITTEN = ("model", "gpu", "interconnect", "allocator_conf")
"""Texts that are no words of ours: their case is kept."""


class Asked(BaseModel):
    """What every request does alike: words are taken without regard to case and to blanks around them."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _forgive(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return {
            name: (value.strip() if name in AS_WRITTEN else value.strip().lower()) if isinstance(value, str) else value
            for name, value in values.items()
        }

    @model_validator(mode="after")
    def _fills_its_nodes(self) -> Asked:
        check_nodes(getattr(self, "gpus", 1), getattr(self, "nnodes", 1))
        return self

    def request(self, kind: type[AnyRequest], **defaults: Any) -> AnyRequest:
        """The part that is a request of `kind`. What was not given stays so; `defaults` stand for what this model has not."""
        given = defaults | {name: getattr(self, name) for name in fields_of(kind) if name in self.model_fields_set}
        return kind(**given, given=frozenset(given))


_MODELS: dict[type, type[Asked]] = {}


def model_of(kind: type[EstimateRequest]) -> type[Asked]:
    """The pydantic model with the fields of `kind`, under its name."""
    if kind not in _MODELS:
        made: dict[str, Any] = {option.name: _field(option) for option in fields_of(kind).values()}
        _MODELS[kind] = create_model(kind.__name__, __base__=Asked, __doc__=kind.__doc__, **made)
    return _MODELS[kind]


def _field(option: Option) -> tuple[Any, Any]:
    rule = option.rule
    limits = Field(ge=rule.ge, le=rule.le, lt=rule.lt, min_length=rule.min_length, max_length=rule.max_length)
    kind: Any = Literal[option.choices] if option.choices else Annotated[option.kind, limits]
    described: Any = Annotated[
        Optional[kind] if option.optional else kind,  # noqa: UP045  # a value, not a hint
        Field(description=rule.description),
    ]
    read = described if rule.parse is None else Annotated[described, _parsed_by(rule.parse)]
    return read, ... if option.required else option.default


def _parsed_by(parse: Callable[[str], float | None]) -> BeforeValidator:
    """Text as `parse` reads it; what it cannot read is left for pydantic to refuse."""

    def read(value: Any) -> Any:
        number = parse(value) if isinstance(value, str) else value
        return value if number is None else number

    return BeforeValidator(read)


def read(given: Mapping[str, Any], kind: type[AnyRequest]) -> AnyRequest:
    """The request that pydantic makes of it. Its first complaint becomes a UsageError."""
    try:
        return model_of(kind)(**given).request(kind)
    except ValidationError as error:
        first = error.errors()[0]
        written = given.get(".".join(map(str, first["loc"])), first["input"])
        raise complaint({**first, "input": written}, kind) from None


def complaint(error: Mapping[str, Any], kind: type[EstimateRequest] = EstimateRequest) -> UsageError:
    """One of pydantic's complaints, as an error with a hint."""
    name = ".".join(str(part) for part in error["loc"]) or "request"
    message = error["msg"].removeprefix("Value error, ")
    if name == "request":
        return UsageError(message, hint="each node has the same number of GPUs")
    if error["type"] == "missing":
        return UsageError(f"{name}: {message}", hint=_hint(name, kind))
    option = fields_of(kind).get(name)
    if option is not None and option.rule.parse is not None and error["type"].endswith("_parsing"):
        return UsageError(f"{name}: cannot read {error['input']!r}", hint=_hint(name, kind))
    return UsageError(f"{name}: {message}, not {error['input']!r}", hint=_hint(name, kind))


def _hint(name: str, kind: type[EstimateRequest]) -> str:
    option = fields_of(kind).get(name)
    if option is None:
        import difflib

        near = difflib.get_close_matches(name, fields_of(kind), n=1)
        return f"did you mean {near[0]}?" if near else "see fsdp-advisor estimate --help"
    return option.rule.description or "see fsdp-advisor estimate --help"
