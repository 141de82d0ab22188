"""The server's settings: environment variables `FSDP_ADVISOR_...`, or the options of `fsdp-advisor serve`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

KIB, MIB, GIB = 2**10, 2**20, 2**30
PREFIX = "FSDP_ADVISOR_"


class Settings(BaseSettings):
    """One server's settings, which `cli.serve` describes. A field's variable is its name in capitals after FSDP_ADVISOR_, and PORT too."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore", populate_by_name=True)

    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535, validation_alias=AliasChoices(PREFIX + "PORT", "PORT"))] = 8000
    workers: Annotated[int, Field(ge=1, le=256)] = 2
    allow_hub: bool = False
    cors_origins: Annotated[tuple[str, ...], NoDecode] = ()
    root_path: str = ""
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    max_connections: Annotated[int, Field(ge=2)] = 1024
    max_waiting: Annotated[int, Field(ge=1)] = 64
    max_body_bytes: Annotated[int, Field(ge=KIB, le=MIB)] = 256 * KIB
    max_json_depth: Annotated[int, Field(ge=2, le=200)] = 32
    receive_seconds: Annotated[float, Field(gt=0)] = 30.0
    answer_seconds: Annotated[float, Field(gt=0)] = 120.0
    graceful_seconds: Annotated[int, Field(ge=0)] = 10
    cached_answers: Annotated[int, Field(ge=0)] = 1024

    record_seconds: Annotated[float, Field(gt=0)] = 600.0
    record_memory_bytes: Annotated[int, Field(ge=GIB)] = 4 * GIB
    record_queue: Annotated[int, Field(ge=0)] = 4

    @field_validator("root_path")
    @classmethod
    def _starts_with_a_slash(cls, value: str) -> str:
        return "/" + path if (path := value.strip("/")) else ""

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value
