"""Makes a request from keywords, whose values may be text. The command line, Python, REST and the page all use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, overload

from fsdp_advisor.errors import UsageError
from fsdp_advisor.job.fields import check_required, fields_of, read_fields
from fsdp_advisor.job.request import AnyRequest, EstimateRequest, uneven_nodes


@overload
def make_request(given: Mapping[str, Any]) -> EstimateRequest: ...
@overload
def make_request(given: Mapping[str, Any], kind: type[AnyRequest]) -> AnyRequest: ...
def make_request(given: Mapping[str, Any], kind: type[EstimateRequest] = EstimateRequest) -> EstimateRequest:
    """A request from its fields as text or as Python values. Raises UsageError for the first thing that is wrong.

    >>> make_request({"model": "gpt2", "gpus": "8", "strategy": "ZeRO-3"}).strategy
    'zero3'
    """
    known = fields_of(kind)
    values = read_fields(given, known)
    check_required(values, known)
    check_nodes(values)
    return kind(**values, given=frozenset(values))


def check_nodes(values: Mapping[str, Any]) -> None:
    """Raises UsageError unless each node has the same number of GPUs."""
    uneven = uneven_nodes(values.get("gpus", 1), values.get("nnodes", 1))
    if uneven is not None:
        raise UsageError(uneven, hint="each node has the same number of GPUs")
