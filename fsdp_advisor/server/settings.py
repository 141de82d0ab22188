"""What an operator can set: environment variables `FSDP_ADVISOR_...`, or the options of `fsdp-advisor serve`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, SettingsConfigDict

KIB, MIB, GIB = 2**10, 2**20, 2**30
PREFIX = "FSDP_ADVISOR_"


class Settings(BaseSettings):
    """One server's settings. A field's variable is its name in capitals after FSDP_ADVISOR_; PORT is taken too."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore", populate_by_name=True)

    host: Annotated[str, Field(description="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1"
    port: Annotated[
        int,
        Field(
            ge=0,
            le=65535,
            validation_alias=AliasChoices(PREFIX + "PORT", "PORT"),
            description="Port to listen on; 0 takes any that is free. The variable PORT is taken too.",
        ),
    ] = 8000
    workers: Annotated[int, Field(ge=1, le=256, description="Server processes.")] = 1
    allow_hub: Annotated[
        bool, Field(description="Look up models on the Hugging Face hub: the only outgoing connection there is.")
    ] = False
    cors_origins: Annotated[
        tuple[str, ...],
        NoDecode,
        Field(description="Origins whose pages may call the API, between commas; * for any."),
    ] = ()
    root_path: Annotated[str, Field(description="Path under which a proxy serves this, such as /advisor.")] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Field(description="Least severity that is logged, as JSON lines.")
    ] = "info"

    max_in_flight: Annotated[int, Field(ge=1, description="Requests at once per worker; others get status 503.")] = 64
    slow_threads: Annotated[int, Field(ge=1, description="Threads for recommendations and allocator walks.")] = 2
    max_slow: Annotated[
        int, Field(ge=1, description="Recommendations and allocator walks at once per worker; others get status 503.")
    ] = 32
    max_connections: Annotated[int, Field(ge=1, description="Open connections per worker.")] = 1024
    max_connections_per_client: Annotated[
        int, Field(ge=1, description="Of these, from one address (IPv6: one /64 network).")
    ] = 256
    max_body_bytes: Annotated[int, Field(ge=KIB, le=MIB, description="Largest request body.")] = 256 * KIB
    max_json_depth: Annotated[int, Field(ge=2, le=200, description="Deepest nesting of a JSON body.")] = 32
    receive_seconds: Annotated[float, Field(gt=0, description="For a request to arrive whole.")] = 10.0
    graceful_seconds: Annotated[int, Field(ge=0, description="For requests to end when the server stops.")] = 10
    cache_bytes: Annotated[int, Field(ge=0, description="Answers kept in memory per worker.")] = 24 * MIB

    record_seconds: Annotated[float, Field(gt=0, description="For a pasted configuration to be recorded.")] = 60.0
    record_memory_bytes: Annotated[int, Field(ge=GIB, description="Memory of the recording process.")] = 4 * GIB
    record_queue: Annotated[int, Field(ge=0, description="Pasted configurations that may wait, per worker.")] = 4

    @field_validator("root_path")
    @classmethod
    def _from_the_root(cls, value: str) -> str:
        return "/" + path if (path := value.strip("/")) else ""

    @field_validator("cors_origins", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value

    def environment(self) -> dict[str, str]:
        """The variables that make these settings, for worker processes."""
        values = self.model_dump(mode="json") | {"cors_origins": ",".join(self.cors_origins)}
        return {PREFIX + name.upper(): str(value) for name, value in values.items()}
