"""What watches a server asks it: is it up, is it ready, how does it do."""

from __future__ import annotations

from fastapi import APIRouter, Request
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from fsdp_advisor.model import catalog
from fsdp_advisor.server.errors import Problem, problem

router = APIRouter(tags=["operation"])


class Health(BaseModel):
    status: str


class Ready(BaseModel):
    status: str
    models: int


@router.get("/healthz", summary="Whether the server is up")
async def healthz(response: Response) -> Health:
    response.headers["Cache-Control"] = "no-store"
    return Health(status="up")


@router.get(
    "/readyz", summary="Whether the catalog is loaded", response_model=Ready, responses={503: {"model": Problem}}
)
async def readyz(response: Response) -> Ready | Response:
    try:
        models = len(await run_in_threadpool(catalog.entries))
    except Exception:  # whatever is wrong with the file, its answers cannot be had
        return problem(503, "the catalog cannot be read", "is the installation whole?")
    response.headers["Cache-Control"] = "no-store"
    return Ready(status="ready", models=models)


@router.get("/metrics", summary="Figures for Prometheus", response_class=Response,
            responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}})  # fmt: skip
async def metrics(request: Request) -> Response:
    return Response(
        request.app.state.metrics.text(), media_type=CONTENT_TYPE_LATEST, headers={"Cache-Control": "no-store"}
    )
