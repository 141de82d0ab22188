"""The routes of the pages. Every page is also served as JSON, under its path with `.json`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from urllib.parse import parse_qsl, urlencode

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.hardware import list_gpus
from fsdp_advisor.job.parsing import make_request
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.job.unknown_options import unknown_option
from fsdp_advisor.model import catalog
from fsdp_advisor.server import page_accuracy, page_compare, page_form, page_how, page_what_if
from fsdp_advisor.server.answers import Document, ModelSource, compare_document, recommend_document
from fsdp_advisor.server.api_models import PASTED
from fsdp_advisor.server.config_paths import refuse_adapter_paths
from fsdp_advisor.server.page_home import error_page, home_page
from fsdp_advisor.server.pasted import with_pasted_file
from fsdp_advisor.server.rendering import HTML, render, static_dir
from fsdp_advisor.server.responses import body_response, document_response
from fsdp_advisor.server.service import service_of

router = APIRouter(include_in_schema=False)
NOT_KEPT = {"Cache-Control": "no-store"}


@router.get("/")
async def home(request: Request) -> Response:
    """The form with its answer; without a query string, an example's."""
    options, unknown = page_form.read_query(request.query_params)
    options = options or page_form.EXAMPLE
    where = (_root(request), urlencode(options) if unknown else request.url.query)
    try:
        options, lines = await run_in_threadpool(with_pasted_file, options)
        source, asked = _job(options)
        arguments = (tuple(options.items()), tuple(unknown), lines, *where)
        document = await service_of(request).answer(source, home_page, asked, *arguments)
    except AdvisorError as error:
        page = await run_in_threadpool(error_page, error, options, *where)
        return Response(page, error.http_status, NOT_KEPT, HTML)
    return document_response(request, document)


@router.get("/.json")
async def home_json(request: Request) -> Response:
    """The first page's answer as REST gives it, with timelines. Raises InvalidOption for a name that is no option."""
    options, unknown = page_form.read_query(request.query_params)
    if unknown:
        raise unknown_option(unknown[0], page_form.offered())
    options, _ = await run_in_threadpool(with_pasted_file, options or page_form.EXAMPLE)
    source, asked = _job(options)
    return document_response(request, await service_of(request).answer(source, recommend_document, asked, True))


def _job(options: dict[str, str]) -> tuple[ModelSource, RecommendRequest]:
    """The job that a form describes. A pasted configuration replaces the model's name. Raises UsageError."""
    values: dict[str, Any] = dict(options)
    config = values.pop("config", None)
    if config is not None:
        values["model"] = PASTED
    request = make_request(values, RecommendRequest)
    refuse_adapter_paths(request.as_dict())
    return ModelSource(request.model, None if config is None else config.encode()), request


@router.get("/what-if.json")
async def what_if(request: Request) -> Response:
    """The effects of the changes that the page offers next to an answer, for the plan in the query. The page's script calls it."""
    options, _ = await run_in_threadpool(with_pasted_file, page_form.read_query(request.query_params)[0])
    source, asked = _job(options)
    return document_response(request, await service_of(request).answer(source, page_what_if.effects, asked))


@router.get("/compare")
async def compare(request: Request) -> Response:
    """Two plans side by side. `a` and `b` are query strings of the first page, or addresses that end in one."""
    given = _compared(request)
    values: dict[str, Any] = {"given": given, "problem": None, "sides": []}
    status = 200
    if all(given.values()):
        try:
            values |= page_compare.view(**await _comparison(request, given))
        except AdvisorError as error:
            values["problem"], status = error, error.http_status
    html = await run_in_threadpool(render, "compare.html", _root(request), "/compare", **values)
    return body_response(request, html, HTML) if status == 200 else Response(html, status, NOT_KEPT, HTML)


@router.get("/compare.json")
async def compare_json(request: Request) -> Response:
    """Both sides of the comparison, and their differences, as data."""
    return body_response(request, _json(await _comparison(request, _compared(request))))


def _compared(request: Request) -> dict[str, str]:
    return {name: request.query_params.get(name, "").rpartition("?")[2].strip() for name in "ab"}


async def _comparison(request: Request, given: dict[str, str]) -> dict[str, Any]:
    """The values of the comparison: memory and time of each query's plan, and the cost of their differences. Raises AdvisorError."""
    answer = service_of(request).answer
    jobs = [_job(page_form.read_query(dict(parse_qsl(query)))[0]) for query in given.values()]
    documents = await asyncio.gather(*(answer(source, page_compare.side, asked) for source, asked in jobs))
    first, second = map(page_compare.read, documents)
    a, b = (make_request(dict(parse_qsl(side["query"])), EstimateRequest) for side in (first, second))
    found = page_compare.read(await answer(jobs[0][0], compare_document, a, b))
    return {"first": first, "second": second, "comparison": {k: found[k] for k in ("differences", "cure")}}


def _add_list(path: str, template: str, find: Callable[[str], dict[str, Any]]) -> None:
    """Add a page that lists the entries that match the query's `pattern`."""

    async def page(request: Request) -> Response:
        values = await run_in_threadpool(find, _pattern(request))
        html = await run_in_threadpool(render, template, _root(request), path, **values)
        return body_response(request, html, HTML)

    async def data(request: Request) -> Response:
        return body_response(request, _json(await run_in_threadpool(find, _pattern(request))))

    _add(path, page, data)


def _add_report(path: str, template: str, view: Callable[[], dict[str, Any]]) -> None:
    """Add a page whose values take long to compute."""

    async def page(request: Request) -> Response:
        arguments = (view, template, _root(request), path)
        return document_response(request, await service_of(request).page(report_page, *arguments))

    async def data(request: Request) -> Response:
        return document_response(request, await service_of(request).page(report_data, view))

    _add(path, page, data)


def _add(path: str, page: Callable[..., Any], data: Callable[..., Any]) -> None:
    router.add_api_route(path, page, methods=["GET"], name=path)
    router.add_api_route(f"{path}.json", data, methods=["GET"], name=f"{path}.json")


def report_page(view: Callable[[], dict[str, Any]], template: str, root: str, path: str) -> Document:
    """A page with the values of `view`; a worker process runs this."""
    return Document.of(render(template, root, path, **view()), media_type=HTML)


def report_data(view: Callable[[], dict[str, Any]]) -> Document:
    """The values of `view` as JSON, without the drawings; a worker process runs this."""
    return Document.of(_json({name: value for name, value in view().items() if not name.endswith("_drawing")}))


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(values, default=asdict, separators=(",", ":")).encode()


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The REST routes, as /openapi.json describes them to programs."""
    described = request.app.openapi()
    routes = [
        {
            "method": method.upper(),
            "path": path,
            "summary": operation.get("summary"),
            "parameters": [_parameter(parameter) for parameter in operation.get("parameters", [])],
        }
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
    ]
    values = {"routes": routes, "origin": str(request.base_url).rstrip("/")}
    html = await run_in_threadpool(render, "docs.html", _root(request), "/docs", **values)
    return body_response(request, html, HTML)


def _parameter(parameter: dict[str, Any]) -> dict[str, Any]:
    """An OpenAPI parameter as a row of a table."""
    schema = parameter.get("schema", {})
    kinds = [schema, *schema.get("anyOf", [])]
    takes = next((", ".join(map(str, k["enum"])) for k in kinds if "enum" in k), None)
    default = schema.get("default")
    return {
        "name": parameter["name"],
        "required": parameter.get("required", False),
        "takes": takes or " or ".join(k["type"] for k in kinds if k.get("type") not in (None, "null")),
        "default": "" if default is None else default,
        "meaning": parameter.get("description") or schema.get("description") or "",
    }


@router.get("/favicon.ico")
async def favicon(request: Request) -> Response:
    """The icon, where browsers look for it if a response names none."""
    return body_response(request, (static_dir() / "icon.svg").read_bytes(), "image/svg+xml")


def _root(request: Request) -> str:
    """The prefix under which a proxy serves the site."""
    return str(request.scope.get("root_path", ""))


def _pattern(request: Request) -> str:
    return request.query_params.get("pattern", "").strip()[:200]


def _models(pattern: str) -> dict[str, Any]:
    return {"pattern": pattern, "models": [entry.as_row() for entry in catalog.search(pattern)]}


def _gpus(pattern: str) -> dict[str, Any]:
    return {"pattern": pattern, "gpus": [asdict(gpu) for gpu in list_gpus(pattern)]}


_add_list("/models", "models.html", _models)
_add_list("/gpus", "gpus.html", _gpus)
_add_report("/how", "how.html", page_how.view)
_add_report("/accuracy", "accuracy.html", page_accuracy.view)
