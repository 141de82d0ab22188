"""The pages: each for people, and under the same path with `.json` for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

from fastapi import APIRouter, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from fsdp_advisor.errors import AdvisorError
from fsdp_advisor.estimator import make_request
from fsdp_advisor.hardware import GPUS, list_gpus
from fsdp_advisor.job.request import RecommendRequest
from fsdp_advisor.model import catalog
from fsdp_advisor.server import page_accuracy, page_answer, page_form, page_how
from fsdp_advisor.server.answers import Answers, advised
from fsdp_advisor.server.assets import static_dir
from fsdp_advisor.server.errors import refusal
from fsdp_advisor.server.questions import PASTED, Question
from fsdp_advisor.server.rendering import HTML, render
from fsdp_advisor.server.replies import HOUR, reply

router = APIRouter(include_in_schema=False)


@router.get("/")
async def home(request: Request) -> Response:
    """The form, and the answer to what the query string asks; an example's where it asks nothing."""
    said, strange = page_form.given(request.query_params)
    said = said or dict(page_form.EXAMPLE)
    config = said.get("config")
    try:
        question, asked = _question(said)
        answers: Answers = request.app.state.answers
        view = await answers.worked(question, lambda model: page_answer.view(page_answer.answer(model, asked), config))
        view["notes"] = (*view["notes"], *(f"{name[:40]} is no option and was left aside" for name in strange[:5]))
        status = 200
    except AdvisorError as error:
        view, status = {"problem": error, "title": "fsdp-advisor"}, error.http_status
    body = await run_in_threadpool(_home, request, said, view)
    if status != 200:
        return Response(body, status_code=status, media_type=HTML, headers={"Cache-Control": "no-store"})
    return reply(request, body, HTML, max_age=HOUR if view["lasting"] else None)


def _home(request: Request, said: dict[str, str], view: dict[str, Any]) -> bytes:
    problem = view.get("problem")
    main, more = page_form.controls(said, invalid=getattr(problem, "option", ""))
    return render(
        request,
        "index.html",
        main=main,
        more=more,
        more_open=any(control.value != control.default for control in more),
        config=said.get("config", ""),
        can_record=find_spec("torch") is not None,
        models=catalog.entries(),
        gpus=GPUS,
        query=f"?{request.url.query}" if request.url.query else "",
        **view,
    )


@router.get("/.json")
async def home_json(request: Request) -> Response:
    """The page's answer as data: the estimate's document with the timeline, and `recommendation` filled."""
    said, _ = page_form.given(request.query_params)
    try:
        question, asked = _question(said or dict(page_form.EXAMPLE))
        answers: Answers = request.app.state.answers
        document = await answers.worked(question, lambda model: advised(model, asked).as_dict(timeline=True))
    except AdvisorError as error:
        return refusal(error)
    lasting = document["model"]["source"] != "hub"
    body = json.dumps(document, separators=(",", ":")).encode()
    return reply(request, body, max_age=HOUR if lasting else None)


def _question(said: dict[str, str]) -> tuple[Question, RecommendRequest]:
    """The question of a form; a pasted configuration takes the model's place. Raises UsageError."""
    options: dict[str, Any] = dict(said)
    config = options.pop("config", None)
    if config is not None:
        options["model"] = PASTED
    request = make_request(options, RecommendRequest)
    return Question(request, config=config), request


def _page(path: str, template: str, make: Callable[[str], dict[str, Any]]) -> None:
    """A page whose data take no question but a pattern, where it is a list: `make` gives them, as what JSON can hold."""

    async def page(request: Request) -> Response:
        values = await run_in_threadpool(make, _pattern(request))
        return reply(request, await run_in_threadpool(lambda: render(request, template, **values)), HTML)

    async def as_json(request: Request) -> Response:
        values = await run_in_threadpool(make, _pattern(request))
        data = {name: value for name, value in values.items() if not name.endswith("_drawing")}
        return reply(request, json.dumps(data, default=asdict, separators=(",", ":")).encode())

    router.add_api_route(path, page, methods=["GET"], name=path)
    router.add_api_route(f"{path}.json", as_json, methods=["GET"], name=f"{path}.json")


@router.get("/docs")
async def docs(request: Request) -> Response:
    """The REST routes as the OpenAPI document has them; complete for programs at /openapi.json."""
    described = request.app.openapi()
    routes = [
        {
            "method": method.upper(),
            "path": path,
            "summary": operation.get("summary"),
            "parameters": _parameters(operation),
        }
        for path, operations in described["paths"].items()
        for method, operation in operations.items()
    ]
    body = await run_in_threadpool(lambda: render(request, "docs.html", routes=routes))
    return reply(request, body, HTML)


def _parameters(operation: dict[str, Any]) -> list[dict[str, Any]]:
    """An operation's parameters as a table shows them."""
    rows = []
    for parameter in operation.get("parameters", []):
        schema = parameter.get("schema", {})
        kinds = [schema, *schema.get("anyOf", [])]
        takes = next((", ".join(map(str, k["enum"])) for k in kinds if "enum" in k), None)
        default = schema.get("default")
        rows.append(
            {
                "name": parameter["name"],
                "required": parameter.get("required", False),
                "takes": takes or " or ".join(k["type"] for k in kinds if k.get("type") not in (None, "null")),
                "default": "" if default is None else default,
                "meaning": parameter.get("description") or schema.get("description") or "",
            }
        )
    return rows


def _pattern(request: Request) -> str:
    return request.query_params.get("pattern", "").strip()[:200]


def _models(pattern: str) -> dict[str, Any]:
    return {"pattern": pattern, "models": [entry.as_row() for entry in catalog.search(pattern)]}


def _gpus(pattern: str) -> dict[str, Any]:
    return {"pattern": pattern, "gpus": [asdict(gpu) for gpu in list_gpus(pattern)]}


_page("/models", "models.html", _models)
_page("/gpus", "gpus.html", _gpus)
_page("/how", "how.html", lambda _: page_how.view())
_page("/accuracy", "accuracy.html", lambda _: page_accuracy.view())


@router.get("/favicon.ico")
async def favicon(request: Request) -> Response:
    """Where browsers look for an icon, whatever a page names; of a page of JSON they know no other."""
    return reply(request, (static_dir() / "icon.svg").read_bytes(), "image/svg+xml")
