"""The server's settings: environment variables `FSDP_ADVISOR_...`, or the options of `fsdp-advisor serve`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

KIB, MIB, GIB = 2**10, 2**20, 2**30
PREFIX = "FSDP_ADVISOR_"


class Settings(BaseSettings):
    """One server's settings. A field's variable is its name in capitals after FSDP_ADVISOR_; PORT is read too."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore", populate_by_name=True)

    host: Annotated[str, Field(description="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[
        int,
        Field(
            ge=0,
            le=65535,
            validation_alias=AliasChoices(PREFIX + "PORT", "PORT"),
            description="Port to listen on; 0 takes any free port. The variable PORT is read too.",
        ),
    ] = 8000
    workers: Annotated[int, Field(ge=1, le=256, description="Processes that compute answers.")] = 2
    allow_hub: Annotated[
        bool, Field(description="Look up models on the Hugging Face hub: the only outgoing connection.")
    ] = False
    cors_origins: Annotated[
        tuple[str, ...],
        NoDecode,
        Field(description="Origins whose pages may call the API, separated by commas; * for any."),
    ] = ()
    root_path: Annotated[str, Field(description="Path under which a proxy serves this, such as /advisor.")] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="Lowest severity to log, as JSON lines.")
    ] = "info"

    max_connections: Annotated[int, Field(ge=2, description="Open connections; others get status 503.")] = 1024
    max_waiting: Annotated[
        int, Field(ge=1, description="Answers being computed or waiting for a worker; others get status 503.")
    ] = 64
    max_body_bytes: Annotated[int, Field(ge=KIB, le=MIB, description="Largest request body.")] = 256 * KIB
    max_json_depth: Annotated[int, Field(ge=2, le=200, description="Deepest nesting of a JSON body.")] = 32
    receive_seconds: Annotated[float, Field(gt=0, description="Time limit to receive a request's body.")] = 30.0
    answer_seconds: Annotated[float, Field(gt=0, description="Time limit to compute one answer.")] = 120.0
    graceful_seconds: Annotated[int, Field(ge=0, description="Time for requests to finish at shutdown.")] = 10
    cached_answers: Annotated[int, Field(ge=0, description="Answers kept in memory.")] = 1024

    record_seconds: Annotated[
        float, Field(gt=0, description="Time limit to record a pasted configuration and answer.")
    ] = 600.0
    record_memory_bytes: Annotated[int, Field(ge=GIB, description="Memory of the recording process.")] = 4 * GIB
    record_queue: Annotated[int, Field(ge=0, description="Requests that may wait for the recording process.")] = 4

    @field_validator("root_path")
    @classmethod
    def _starts_with_a_slash(cls, value: str) -> str:
        return "/" + path if (path := value.strip("/")) else ""

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value
