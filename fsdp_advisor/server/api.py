"""The REST routes of version 1."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.responses import Response

from fsdp_advisor.export import TARGETS, find
from fsdp_advisor.hardware import Gpu, list_gpus
from fsdp_advisor.model import catalog
from fsdp_advisor.server import schema
from fsdp_advisor.server.answers import Answers
from fsdp_advisor.server.errors import Problem
from fsdp_advisor.server.questions import (
    EstimateBody,
    EstimateQuery,
    ExportBody,
    ExportQuery,
    Question,
    RecommendBody,
    RecommendQuery,
)
from fsdp_advisor.server.replies import HOUR, reply

_PROBLEMS: dict[int | str, dict[str, Any]] = {
    400: {"model": Problem, "description": "The body cannot be read"},
    404: {"model": Problem, "description": "No such model or GPU"},
    408: {"model": Problem, "description": "The request took too long to arrive"},
    413: {"model": Problem, "description": "The body is too large"},
    422: {"model": Problem, "description": "Impossible values, or a configuration that describes no model"},
    503: {
        "model": Problem,
        "description": "More requests than are answered at once; Retry-After says when to ask again",
    },
}
_CHANGED: dict[int | str, dict[str, Any]] = {304: {"description": "Not changed since the ETag that was sent"}}


class AskedRoute(APIRoute):
    """A route that asks by its query string alone has the whole of it read by its model.

    FastAPI takes a query apart field by field, which is longer than all else that a kept answer needs.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        query: list[Any] = [p.field_info.annotation for p in self.dependant.query_params]
        if query not in ([EstimateQuery], [RecommendQuery]) or self.dependant.path_params:
            return super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                asked = query[0].model_validate(dict(request.query_params))
            except ValidationError as error:
                errors = error.errors(include_url=False)
                raise RequestValidationError([{**e, "loc": ("query", *e["loc"])} for e in errors]) from None
            answer: Response = await self.endpoint(request, asked)
            return answer

        return handle


router = APIRouter(prefix="/api/v1", responses=_PROBLEMS, route_class=AskedRoute)
Pattern = Annotated[str | None, Query(max_length=200, description="Only names that contain this")]


@router.get("/estimate", summary="Memory and time of a job under one strategy or all", tags=["answers"],
            response_model=schema.Estimate, responses=_CHANGED)  # fmt: skip
async def estimate_asked(request: Request, query: Annotated[EstimateQuery, Query()]) -> Response:
    return await _answer(request, query.question())


@router.post("/estimate", summary="The same, for a job or a config.json in the body", tags=["answers"],
             response_model=schema.Estimate)  # fmt: skip
async def estimate_posted(request: Request, body: EstimateBody) -> Response:
    return await _answer(request, body.question())


@router.get("/recommend", summary="The fastest configuration that fits, and why", tags=["answers"],
            response_model=schema.Advice, responses=_CHANGED)  # fmt: skip
async def recommend_asked(request: Request, query: Annotated[RecommendQuery, Query()]) -> Response:
    return await _answer(request, query.question())


@router.post("/recommend", summary="The same, for a job or a config.json in the body", tags=["answers"],
             response_model=schema.Advice)  # fmt: skip
async def recommend_posted(request: Request, body: RecommendBody) -> Response:
    return await _answer(request, body.question())


Target = Annotated[str, Path(max_length=64, description="What the file is for", examples=list(TARGETS))]
_FILE: dict[int | str, dict[str, Any]] = {
    200: {"content": {made.media_type: {} for made in TARGETS.values()}, "description": "The file"},
    **_CHANGED,
}


@router.get("/export/{target}", summary="The file that launches a job, or the recommended one", tags=["answers"],
            responses=_FILE)  # fmt: skip
async def export_asked(request: Request, target: Target, query: Annotated[ExportQuery, Query()]) -> Response:
    return await _answer(request, query.question(find(target).name))


@router.post("/export/{target}", summary="The same, for a job or a config.json in the body", tags=["answers"],
             responses=_FILE)  # fmt: skip
async def export_posted(request: Request, target: Target, body: ExportBody) -> Response:
    return await _answer(request, body.question(find(target).name))


async def _answer(request: Request, question: Question) -> Response:
    answers: Answers = request.app.state.answers
    document = await answers.answer(question)
    return document.reply(request)


@router.get("/models", summary="Models known without looking any up", tags=["lists"],
            response_model=list[schema.ModelRow], responses=_CHANGED)  # fmt: skip
async def models(request: Request, pattern: Pattern = None) -> Response:
    rows = [entry.as_row() for entry in catalog.search(pattern)]
    return reply(request, json.dumps(rows, separators=(",", ":")).encode(), max_age=HOUR)


@router.get("/gpus", summary="GPUs known by name", tags=["lists"],
            response_model=list[Gpu], responses=_CHANGED)  # fmt: skip
async def gpus(request: Request, pattern: Pattern = None) -> Response:
    rows = [asdict(gpu) for gpu in list_gpus(pattern)]
    return reply(request, json.dumps(rows, separators=(",", ":")).encode(), max_age=HOUR)
