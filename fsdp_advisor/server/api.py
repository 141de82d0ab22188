"""The REST routes of version 1."""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from dataclasses import asdict, replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from starlette.responses import Response

from fsdp_advisor.errors import InvalidOption, UsageError
from fsdp_advisor.export import TARGETS, find
from fsdp_advisor.export.choice import needs_recording_for
from fsdp_advisor.hardware import Gpu, list_gpus
from fsdp_advisor.job.fields import shown
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.model import catalog
from fsdp_advisor.server import schema
from fsdp_advisor.server.answers import (
    Document,
    ModelSource,
    check_document,
    compare_document,
    decided,
    diagnose_document,
    estimate_document,
    export_document,
    recommend_document,
)
from fsdp_advisor.server.api_models import (
    PASTED,
    CheckBody,
    CheckQuery,
    CompareBody,
    DiagnoseBody,
    EstimateBody,
    EstimateQuery,
    ExportBody,
    ExportQuery,
    RecommendBody,
    RecommendQuery,
)
from fsdp_advisor.server.errors import Problem
from fsdp_advisor.server.request_models import documented, reader_of
from fsdp_advisor.server.responses import body_response, document_response
from fsdp_advisor.server.service import service_of

_PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "The body cannot be read"},
    404: {"model": Problem, "description": "No such model or GPU"},
    408: {"model": Problem, "description": "The body took too long to arrive"},
    413: {"model": Problem, "description": "The body is too large"},
    422: {"model": Problem, "description": "Impossible values, or a configuration that describes no model"},
    503: {"model": Problem, "description": "The server is busy; Retry-After says when to ask again"},
}
_NOT_MODIFIED: dict[int | str, dict[str, Any]] = {304: {"description": "Not changed since the ETag that was sent"}}
_FILE: dict[int | str, dict[str, Any]] = {
    200: {
        "content": {kind: {} for kind in ("application/zip", *(target.media_type for target in TARGETS.values()))},
        "description": "The file, or an archive of all files of a launch",
    },
    **_NOT_MODIFIED,
}

Pattern = Annotated[str | None, Query(max_length=200, description="A part of a name, or a kind: moe, blackwell")]
Target = Annotated[str, Path(max_length=64, description="What the file is for", examples=list(TARGETS))]


async def _refuse_query_of_post(request: Request) -> None:
    """Raises UsageError if a POST has options in its query string: they would be ignored."""
    if request.method == "POST" and request.query_params:
        names = ", ".join(shown(name) for name in request.query_params)
        raise UsageError(f"a POST takes no query string, which has {names}", hint="put the options into the body")


router = APIRouter(prefix="/api/v1", responses=_PROBLEMS, dependencies=[Depends(_refuse_query_of_post)])


async def _answer(
    request: Request, source: ModelSource, make: Callable[..., Document], asked: EstimateRequest, *options: Hashable
) -> Response:
    return document_response(request, await service_of(request).answer(source, make, asked, *options))


@router.get("/estimate", summary="Memory and time of a job under one strategy or all", tags=["answers"],
            response_model=schema.Estimate, responses=_NOT_MODIFIED, openapi_extra=documented(EstimateQuery))  # fmt: skip
async def get_estimate(
    request: Request, query: Annotated[EstimateQuery, Depends(reader_of(EstimateQuery))]
) -> Response:
    asked = query.request(EstimateRequest)
    return await _answer(request, ModelSource(asked.model), estimate_document, asked, query.explain)


@router.post("/estimate", summary="The same, for a job or a config.json in the body", tags=["answers"],
             response_model=schema.Estimate)  # fmt: skip
async def post_estimate(request: Request, body: EstimateBody) -> Response:
    asked = body.request(EstimateRequest, model=PASTED)
    return await _answer(request, body.source(), estimate_document, asked, body.explain)


@router.get("/recommend", summary="The fastest configuration that fits, and why", tags=["answers"],
            response_model=schema.Advice, responses=_NOT_MODIFIED, openapi_extra=documented(RecommendQuery))  # fmt: skip
async def get_recommend(
    request: Request, query: Annotated[RecommendQuery, Depends(reader_of(RecommendQuery))]
) -> Response:
    asked = query.request(RecommendRequest)
    return await _answer(request, ModelSource(asked.model), recommend_document, asked, query.explain)


@router.post("/recommend", summary="The same, for a job or a config.json in the body", tags=["answers"],
             response_model=schema.Advice)  # fmt: skip
async def post_recommend(request: Request, body: RecommendBody) -> Response:
    asked = body.request(RecommendRequest, model=PASTED)
    return await _answer(request, body.source(), recommend_document, asked, body.explain)


@router.get("/check", summary="Whether a job fits, in one line", tags=["answers"],
            response_model=schema.Check, responses=_NOT_MODIFIED, openapi_extra=documented(CheckQuery))  # fmt: skip
async def get_check(request: Request, query: Annotated[CheckQuery, Depends(reader_of(CheckQuery))]) -> Response:
    asked = query.request(EstimateRequest)
    return await _answer(request, ModelSource(asked.model), check_document, asked)


@router.post("/check", summary="The same, for a job or a config.json in the body", tags=["answers"],
             response_model=schema.Check)  # fmt: skip
async def post_check(request: Request, body: CheckBody) -> Response:
    asked = body.request(EstimateRequest, model=PASTED)
    return await _answer(request, body.source(), check_document, asked)


@router.post("/compare", summary="Two jobs, and what each difference costs in memory and time", tags=["answers"],
             response_model=schema.Comparison)  # fmt: skip
async def post_compare(request: Request, body: CompareBody) -> Response:
    a, b = (decided(job.request(EstimateRequest)) for job in (body.a, body.b))
    return await _answer(request, ModelSource(a.model), compare_document, a, b)


@router.post("/diagnose", summary="Why a GPU ran out of memory, from the text of the error", tags=["answers"],
             response_model=schema.Diagnosis)  # fmt: skip
async def post_diagnose(request: Request, body: DiagnoseBody) -> Response:
    job = None if body.job is None else body.job.request(EstimateRequest)
    return document_response(request, await service_of(request).page(diagnose_document, body.text, job))


@router.get("/export/{target}", summary="The file that launches a job, or the recommended one", tags=["answers"],
            responses=_FILE, openapi_extra=documented(ExportQuery))  # fmt: skip
async def get_export(
    request: Request, target: Target, query: Annotated[ExportQuery, Depends(reader_of(ExportQuery))]
) -> Response:
    asked = query.request(EstimateRequest)
    return await _export(request, target, ModelSource(asked.model), asked, query.bundle)


@router.post("/export/{target}", summary="The same, for a job or a config.json in the body", tags=["answers"],
             responses=_FILE)  # fmt: skip
async def post_export(request: Request, target: Target, body: ExportBody) -> Response:
    return await _export(request, target, body.source(), body.request(EstimateRequest, model=PASTED), body.bundle)


async def _export(request: Request, target: str, source: ModelSource, asked: EstimateRequest, whole: bool) -> Response:
    name = find(target).name
    source = replace(source, must_record=needs_recording_for(name, decided(asked)))
    return await _answer(request, source, export_document, asked, name, whole)


def _refuse_other_than_pattern(request: Request) -> None:
    """Raises InvalidOption for a parameter that a list does not have: it would be ignored, and the list would be whole."""
    for name in request.query_params:
        if name != "pattern":
            raise InvalidOption(name, f"no such option: {shown(name)}", hint="did you mean pattern?")


@router.get("/models", summary="Models known without looking any up", tags=["lists"],
            response_model=list[schema.ModelRow], responses=_NOT_MODIFIED)  # fmt: skip
async def models(request: Request, pattern: Pattern = None) -> Response:
    _refuse_other_than_pattern(request)
    rows = [entry.as_row() for entry in catalog.search(pattern)]
    return body_response(request, json.dumps(rows, separators=(",", ":")).encode())


@router.get("/gpus", summary="GPUs known by name", tags=["lists"],
            response_model=list[Gpu], responses=_NOT_MODIFIED)  # fmt: skip
async def gpus(request: Request, pattern: Pattern = None) -> Response:
    _refuse_other_than_pattern(request)
    rows = [asdict(gpu) for gpu in list_gpus(pattern)]
    return body_response(request, json.dumps(rows, separators=(",", ":")).encode())
