"""From a question to its answer: what routes and pages share. An answer is a function of question and version, so it is kept."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from fsdp_advisor import hub
from fsdp_advisor.advice import Advice, recommend_resolved
from fsdp_advisor.errors import UnknownModel
from fsdp_advisor.estimator import DEFAULT_GPU, estimate_resolved
from fsdp_advisor.export import Job, export
from fsdp_advisor.export.choice import report_for
from fsdp_advisor.report import Report
from fsdp_advisor.request import EstimateRequest, RecommendRequest
from fsdp_advisor.resolve import Resolved, resolve
from fsdp_advisor.server.questions import PASTED, Question
from fsdp_advisor.server.recordings import Recordings
from fsdp_advisor.server.replies import HOUR, reply, tag
from fsdp_advisor.server.settings import Settings

REPORTS_KEPT = 16
"""Reports hold timelines, so few are kept; of documents, which are bytes, as many as the settings allow."""

QUESTION_BYTES = 2048
"""About what a question takes in memory."""

T = TypeVar("T")
Asked = TypeVar("Asked", bound=EstimateRequest)


class Document:
    """A finished answer with its entity tag; kept compressed, since most take it so. `file_name`: it is a file to keep."""

    __slots__ = ("etag", "file_name", "gzipped", "lasting", "media_type")

    def __init__(
        self, body: bytes, *, lasting: bool, media_type: str = "application/json", file_name: str | None = None
    ) -> None:
        self.gzipped = gzip.compress(body, compresslevel=6, mtime=0)
        self.etag = tag(body)
        self.lasting, self.media_type, self.file_name = lasting, media_type, file_name

    @property
    def body(self) -> bytes:
        return gzip.decompress(self.gzipped)

    def reply(self, request: Request) -> Response:
        """The answer in the coding that the asker takes, or 304. What the hub says may change at any time."""
        zipped = "gzip" in request.headers.get("accept-encoding", "")
        headers = {"Content-Encoding": "gzip"} if zipped else {}
        if self.file_name is not None:
            headers["Content-Disposition"] = f'attachment; filename="{self.file_name}"'
        return reply(
            request,
            self.gzipped if zipped else self.body,
            self.media_type,
            max_age=HOUR if self.lasting else None,
            etag=self.etag,
            headers=headers,
        )

    @property
    def size(self) -> int:
        """Bytes in memory, with the question that leads to it."""
        return len(self.gzipped) + QUESTION_BYTES


class Answers:
    """Answers questions, one at a time: arithmetic in a thread of its own, so that other requests are not held up."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="answers")
        self._recordings = Recordings(settings)
        self._reports: OrderedDict[Question, Report] = OrderedDict()
        self._documents: OrderedDict[Question, Document] = OrderedDict()
        self._document_bytes = 0
        self.hits = self.misses = 0

    async def answer(self, question: Question) -> Document:
        """An estimate or a recommendation as the contract's JSON, or an exported file. Raises AdvisorError."""
        if (found := self._documents.get(question)) is not None:
            self._documents.move_to_end(question)
            self.hits += 1
            return found
        self.misses += 1
        resolved = await self._resolved(question)
        document = await self._apart(lambda: _document(question, resolved))
        self._keep(question, document)
        return document

    async def report(self, question: Question) -> Report:
        """The answer as data, with what an explanation needs: for pages."""
        question = replace(question, explain=True)
        if (found := self._reports.get(question)) is not None:
            self._reports.move_to_end(question)
            return found
        resolved = await self._resolved(question)
        report = await self._apart(lambda: _report(question, resolved))
        self._reports[question] = report
        if len(self._reports) > REPORTS_KEPT:
            self._reports.popitem(last=False)
        return report

    async def worked(self, question: Question, work: Callable[[Resolved], T]) -> T:
        """What `work` makes of the model asked for, done where answers are made: for pages."""
        resolved = await self._resolved(question)
        return await self._apart(lambda: work(resolved))

    async def close(self) -> None:
        await self._recordings.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # Inside

    async def _resolved(self, question: Question) -> Resolved:
        """The model asked for. Nothing of this machine but catalog and memory is looked at."""
        if question.config is not None:
            return await self._recordings.resolved(question.config.encode(), PASTED, "config", question.variants())
        name = question.request.model
        try:
            return await self._apart(lambda: resolve(name, allow_hub=False, allow_paths=False, allow_recording=False))
        except UnknownModel:
            if not self._settings.allow_hub or not hub.can_be_repo_id(name):
                raise
        data, _ = await asyncio.to_thread(hub.download, name, for_strangers=True)
        return await self._recordings.resolved(data, name, "hub", question.variants())

    async def _apart(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _keep(self, question: Question, document: Document) -> None:
        self._documents[question] = document
        self._document_bytes += document.size
        while self._document_bytes > self._settings.cache_bytes:
            self._document_bytes -= self._documents.popitem(last=False)[1].size


def _report(question: Question, resolved: Resolved) -> Report:
    request = question.request
    return _noted(request, estimate_resolved(_on_some_gpu(request), resolved, explain=question.explain))


def _document(question: Question, resolved: Resolved) -> Document:
    lasting = resolved.source != "hub"
    if question.target is not None:
        report = report_for(question.target, _on_some_gpu(question.request), resolved)
        made = export(question.target, Job.of(report, report.estimates[0]))
        return Document(made.text.encode(), lasting=lasting, media_type=made.media_type, file_name=made.file_name)
    if isinstance(question.request, RecommendRequest):
        content = advised(resolved, question.request).as_dict()
    else:
        content = _report(question, resolved).as_dict(timeline=question.explain)
    return Document(json.dumps(content, separators=(",", ":")).encode(), lasting=lasting)


def advised(model: Resolved, request: RecommendRequest) -> Advice:
    """What is recommended."""
    report = _noted(request, estimate_resolved(_on_some_gpu(request).as_estimate, model))
    return Advice(report=report, recommendation=recommend_resolved(report, model, _on_some_gpu(request)))


def _on_some_gpu(request: Asked) -> Asked:
    """A server's own GPU is nobody's business: the default is taken where none is named."""
    return request if request.gpu is not None else request.model_copy(update={"gpu": DEFAULT_GPU})


def _noted(request: EstimateRequest, report: Report) -> Report:
    if request.gpu is not None:
        return report
    return replace(report, notes=(*report.notes, f"GPU: {DEFAULT_GPU} is assumed; name another with gpu"))
