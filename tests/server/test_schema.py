"""Random requests made from the OpenAPI document: no server error, and every response as described."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fastapi import FastAPI
from hypothesis import HealthCheck, settings
from matrix import ALL

schemathesis = pytest.importorskip("schemathesis")

from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from fsdp_advisor.export import TARGETS  # after the check for schemathesis
from fsdp_advisor.server.app import create_app
from fsdp_advisor.server.service import AnswerService
from fsdp_advisor.server.settings import Settings

pytestmark = pytest.mark.slow

SECONDS = 3600
"""Time limit of one request, for a configuration that is recorded on a busy machine."""
EXAMPLES = 40 if ALL else 1
"""Requests per operation, of which there are 15."""

EXCLUDED = [positive_data_acceptance, negative_data_rejection]
"""A valid name may be unknown and a valid job impossible; words are accepted in any case, and numbers as text."""

SETTINGS = Settings(log_level="error", workers=1, record_seconds=SECONDS, answer_seconds=SECONDS)
app = create_app(SETTINGS)


@asynccontextmanager
async def nothing(app: FastAPI) -> AsyncIterator[None]:
    """Start nothing with the application: schemathesis starts and stops it for each operation, and its worker with it."""
    yield


@pytest.fixture(scope="module", autouse=True)
def service() -> Iterator[None]:
    """One worker for all operations."""
    app.state.service = AnswerService(SETTINGS)
    app.state.service.start()
    yield
    app.state.service.close()


app.router.lifespan_context = nothing
schema = schemathesis.openapi.from_asgi("/openapi.json", app)
if not ALL:  # its hundreds of boundary values per operation take minutes
    schema.config.phases.coverage.enabled = False


LARGE, SMALL = "meta-llama/Llama-2-7b-hf", "openai-community/gpt2"


def of_a_small_model(body: Any) -> Any:
    """The body with a small model of the catalog instead of the large one, or of the configuration, of the document's examples."""
    if not isinstance(body, dict):
        return body
    config = body.get("config")
    if body.get("model") == LARGE or (isinstance(config, dict) and "model_type" in config):
        return {**{name: value for name, value in body.items() if name != "config"}, "model": SMALL}
    return {name: of_a_small_model(value) for name, value in body.items()}


@schema.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_responses_match_the_openapi_document(case: schemathesis.Case) -> None:
    if not ALL and case.path_parameters.get("target") in TARGETS:  # test_api.py downloads every target
        case.path_parameters["target"] = "accelerate"
    # which records the configuration; searches of a large model take seconds
    if not ALL and case.path != "/api/v1/estimate":
        case.body = of_a_small_model(case.body)
    case.call_and_validate(excluded_checks=EXCLUDED, timeout=SECONDS)
