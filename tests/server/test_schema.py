"""Schemathesis over the OpenAPI document: no server error, and every answer as described, whatever is sent."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

schemathesis = pytest.importorskip("schemathesis")

from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance  # noqa: E402

from fsdp_advisor.server.app import create_app  # noqa: E402  # after the check for schemathesis
from fsdp_advisor.server.settings import Settings  # noqa: E402

SECONDS = 120
"""For a configuration to be recorded, should this machine be busy."""
CASES = 190
"""Of each operation, of which there are 11."""

NOT_HELD = [positive_data_acceptance, negative_data_rejection]
"""A valid name may be unknown, a valid job impossible; and words are taken without regard to case, numbers as text."""

schema = schemathesis.openapi.from_asgi("/openapi.json", create_app(Settings(log_level="error", record_seconds=15)))


@schema.parametrize()
@settings(max_examples=CASES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_the_description_holds(case: schemathesis.Case) -> None:
    case.call_and_validate(excluded_checks=NOT_HELD, timeout=SECONDS)
