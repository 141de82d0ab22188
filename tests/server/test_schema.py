"""Random requests made from the OpenAPI document: no server error, and every response as described."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from matrix import ALL

schemathesis = pytest.importorskip("schemathesis")

from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from fsdp_advisor.export import TARGETS  # after the check for schemathesis
from fsdp_advisor.server.app import create_app
from fsdp_advisor.server.settings import Settings

pytestmark = pytest.mark.slow

SECONDS = 3600
"""Time limit of one request, for a configuration that is recorded on a busy machine."""
EXAMPLES = 40 if ALL else 1
"""Requests per operation, of which there are 15."""

EXCLUDED = [positive_data_acceptance, negative_data_rejection]
"""A valid name may be unknown and a valid job impossible; words are accepted in any case, and numbers as text."""

schema = schemathesis.openapi.from_asgi(
    "/openapi.json", create_app(Settings(log_level="error", workers=1, record_seconds=SECONDS, answer_seconds=SECONDS))
)
if not ALL:  # its hundreds of boundary values per operation take minutes
    schema.config.phases.coverage.enabled = False


@schema.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_responses_match_the_openapi_document(case: schemathesis.Case) -> None:
    if not ALL and case.path_parameters.get("target") in TARGETS:  # test_api.py downloads every target
        case.path_parameters["target"] = "accelerate"
    case.call_and_validate(excluded_checks=EXCLUDED, timeout=SECONDS)
