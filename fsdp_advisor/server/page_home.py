"""The first page: the form, and the answer for the job in the query string. Worker processes run these functions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any, Literal
from urllib.parse import urlencode

from fsdp_advisor.errors import AdvisorError, UnknownGpu, UnknownModel
from fsdp_advisor.hardware import GPUS
from fsdp_advisor.job.adapter_fields import GROUP
from fsdp_advisor.job.search_request import RecommendRequest
from fsdp_advisor.job.unknown_options import unknown_option
from fsdp_advisor.model.resolved import Resolved
from fsdp_advisor.server import page_answer, page_form
from fsdp_advisor.server.answers import Document
from fsdp_advisor.server.pasted import MAX_BYTES
from fsdp_advisor.server.rendering import HTML, render


def home_page(
    model: Resolved,
    request: RecommendRequest,
    options: tuple[tuple[str, str], ...],
    unknown: tuple[str, ...],
    pasted: tuple[str, ...],
    root: str,
    query: str,
) -> Document:
    """The page with its answer. `options` and `unknown` are from `page_form.read_query`, `query` is the query string. `pasted`: lines
    about a pasted file.
    """
    values = dict(options)
    view = page_answer.view(page_answer.answer(model, request), model, values)
    view["pasted"] = pasted
    for name in unknown[:5]:
        place, text = _ignored(name)
        view[place] = (*view[place], text)
    return Document.of(_render(values, view, root, query), media_type=HTML, lasting=view["lasting"])


def _ignored(name: str) -> tuple[Literal["cautions", "notes"], str]:
    """(the place on the page, a sentence) about a name in the query that is no option: a caution if an option was probably meant."""
    error = unknown_option(name, page_form.offered(), see="")
    said = f"{name[:40]} is no option and was ignored"
    return ("cautions", f"{said}: {error.hint}") if error.hint else ("notes", said)


def error_page(error: AdvisorError, options: Mapping[str, str], root: str, query: str) -> bytes:
    """The page with an error instead of an answer, as HTML. The form keeps the values and marks the wrong one."""
    view = {"problem": error, "meant": _meant(error, options), "title": "fsdp-advisor"}
    return _render(options, view, root, query, invalid=getattr(error, "option", ""))


def _meant(error: AdvisorError, options: Mapping[str, str]) -> list[tuple[str, str]]:
    """The values that an error suggests, each with the query in which it replaces the wrong value."""
    found = re.search(r"did you mean (.+?)\?", error.hint)
    named = "model" if isinstance(error, UnknownModel) else "gpu" if isinstance(error, UnknownGpu) else ""
    wrong = named or getattr(error, "option", "")
    if found is None or not wrong:
        return []
    return [(word, urlencode({**options, wrong: word})) for word in re.split(r", | or ", found[1])]


def _render(options: Mapping[str, str], view: Mapping[str, Any], root: str, query: str, *, invalid: str = "") -> bytes:
    main, more = page_form.controls(options, invalid=invalid)
    others = [control for group, controls in more.items() if group != GROUP for control in controls]
    return render(
        "index.html",
        root,
        "/",
        main=main,
        more=more,
        generates=any(c.name == "task" and c.value == "grpo" for c in others),
        more_open=any(c.invalid for c in others),
        more_set=[c.label for c in others if c.value],
        adapters_open=any(c.invalid for c in more[GROUP]),
        adapters_set=[c.label for c in more[GROUP] if c.value],
        config=options.get("config", ""),
        longest=MAX_BYTES,
        can_record=find_spec("torch") is not None,
        gpus=GPUS,
        query=f"?{query}" if query else "",
        **view,
    )
