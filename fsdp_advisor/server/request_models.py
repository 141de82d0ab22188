"""Pydantic models of requests, for FastAPI and its OpenAPI schema. Values are read by the same validator as everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Mapping
from typing import Annotated, Any, ClassVar, Literal, Optional, TypeVar, Union

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, create_model, model_validator
from starlette.requests import Request

from fsdp_advisor.errors import InvalidOption
from fsdp_advisor.job import fields
from fsdp_advisor.job.fields import MAX_SHOWN, fields_of, read_fields, shown
from fsdp_advisor.job.parsing import check_nodes
from fsdp_advisor.job.request import AnyRequest, EstimateRequest
from fsdp_advisor.server.config_paths import refuse_adapter_paths

Query = TypeVar("Query", bound="RequestModel")


class RequestModel(BaseModel):
    """Base of the models of requests. Fields that `kind` does not have are HTTP's own, such as `explain`."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
    kind: ClassVar[type[EstimateRequest]] = EstimateRequest

    @model_validator(mode="before")
    @classmethod
    def _read(cls, given: Any) -> Any:
        """The fields of the request in their types. Raises InvalidOption, which pydantic passes on."""
        if not isinstance(given, dict):
            return given
        known = fields_of(cls.kind)
        own = {name: value for name, value in given.items() if name in cls.model_fields and name not in known}
        values = read_fields({name: value for name, value in given.items() if name not in own}, known, shown_in_json)
        check_nodes(values)
        refuse_adapter_paths(values)
        return own | values

    def request(self, kind: type[AnyRequest], **defaults: Any) -> AnyRequest:
        """The request of `kind` with the fields that were given. `defaults` are for required fields that were not."""
        given = defaults | {name: getattr(self, name) for name in fields_of(kind) if name in self.model_fields_set}
        return kind(**given, given=frozenset(given))


def shown_in_json(value: object) -> str:
    """A refused value for a message, as JSON writes it.

    >>> shown_in_json(None), shown_in_json([True]), shown_in_json("-3")
    ('null', '[true]', '-3')
    """
    if isinstance(value, str | float) or (isinstance(value, int) and not isinstance(value, bool)):
        return shown(value)
    text = json.dumps(value, default=str)
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def model_of(kind: type[EstimateRequest]) -> type[RequestModel]:
    """A pydantic model with the fields of `kind`, under its name."""
    described: dict[str, Any] = {field.name: _described(field) for field in fields_of(kind).values()}
    model = create_model(kind.__name__, __base__=RequestModel, __doc__=kind.__doc__, **described)
    model.kind = kind
    return model


def _described(field: fields.Field) -> tuple[Any, Any]:
    """Type and default of a field, as `create_model` takes them."""
    rule = field.rule
    limits = Field(ge=rule.ge, le=rule.le, lt=rule.lt, min_length=rule.min_length, max_length=rule.max_length)
    kind: Any = Literal[field.choices] if field.choices else Annotated[field.kind, limits]
    if field.many:
        kind = tuple[kind, ...]
    if rule.json:
        kind = Union[kind, dict[str, JsonValue]]  # noqa: UP007  # as below
    about = rule.about[0].upper() + rule.about[1:] + (f"; default: {rule.default}" if rule.default else "")
    described: Any = Annotated[
        Optional[kind] if field.optional else kind,  # noqa: UP045  # `kind | None` fails for a string literal type
        Field(
            description=about,
            deprecated=rule.hidden or None,
            json_schema_extra=_without_default if rule.default else None,
        ),
    ]
    return described, ... if field.required else field.default


def _without_default(schema: dict[str, Any]) -> None:
    """Remove the default of a field whose value is computed if it is not given: sending it would be another request."""
    schema.pop("default", None)


def reader_of(kind: type[Query]) -> Callable[[Request], Coroutine[Any, Any, Query]]:
    """A dependency of routes that reads a query string as `kind`. `documented` adds its parameters to the OpenAPI schema.

    FastAPI has both as `Query()`, but examines each of the 80 fields anew for every request, which takes longer than all else that
    a repeated question needs.
    """
    many = {field.name for field in fields_of(kind.kind).values() if field.many}

    async def read(request: Request) -> Query:
        query = request.query_params
        try:
            return kind.model_validate({name: query.getlist(name) if name in many else query[name] for name in query})
        except ValidationError as error:
            raise RequestValidationError([{**one, "loc": ("query", *one["loc"])} for one in error.errors()]) from None

    return read


def documented(kind: type[RequestModel]) -> dict[str, Any]:
    """The parameters of a query string of `kind`, as an operation of an OpenAPI schema describes them."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    required = schema.get("required", ())
    parameters = [
        {
            "name": name,
            "in": "query",
            "required": name in required,
            **{key: about[key] for key in ("description", "deprecated") if key in about},
            "schema": about,
        }
        for name, about in schema["properties"].items()
    ]
    return {"parameters": parameters}


def complaint(error: Mapping[str, Any]) -> InvalidOption:
    """A pydantic error about a field of HTTP's own, worded as in the other interfaces."""
    name = ".".join(str(part) for part in error["loc"]) or "request"
    if error["type"] == "missing":
        field = fields_of(EstimateRequest).get(name)
        return InvalidOption(name, f"{name} is missing", hint=field.hint if field is not None else "see /docs")
    if error["type"] == "value_error":
        return InvalidOption(name, error["msg"].removeprefix("Value error, "), hint="see /docs")
    return InvalidOption(
        name, f"{name} must be {expected_by(error)}, not {shown_in_json(error['input'])}", hint="see /docs"
    )


def expected_by(error: Mapping[str, Any]) -> str:
    """The condition that a value violates, such as "at least 1", from one of pydantic's errors."""
    context = error.get("ctx") or {}
    match error["type"].removesuffix("_parsing").removesuffix("_type").removesuffix("_from_float"):
        case "greater_than_equal":
            return f"at least {context['ge']}"
        case "less_than_equal":
            return f"at most {context['le']}"
        case "greater_than":
            return f"more than {context['gt']}"
        case "string_too_long":
            return f"at most {context['max_length']} characters long"
        case "string_too_short":
            return f"at least {context['min_length']} character long"
        case "literal_error":
            return str(context["expected"]).replace("'", "")
        case "int":
            return "a whole number"
        case "float" | "finite_number":
            return "a number"
        case "bool":
            return "true or false"
        case "string":
            return "text"
        case "dict" | "model":
            return "a JSON object"
        case "tuple":
            return "a list"
        case _:
            return "another value"
