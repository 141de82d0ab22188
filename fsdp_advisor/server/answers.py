"""From a question to its answer: what routes and pages share. An answer is a function of question and version, so it is kept."""

from __future__ import annotations

import asyncio
import gzip
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TypeVar

from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response

from fsdp_advisor.advice import Advice, recommend_resolved
from fsdp_advisor.errors import UnknownModel
from fsdp_advisor.estimator import DEFAULT_GPU, estimate_resolved
from fsdp_advisor.export import Job, export
from fsdp_advisor.export.choice import report_for
from fsdp_advisor.job.request import EstimateRequest, RecommendRequest
from fsdp_advisor.model import hub
from fsdp_advisor.model.resolve import Resolved, resolve
from fsdp_advisor.report import Report
from fsdp_advisor.server.errors import ServerBusy
from fsdp_advisor.server.observation import Metrics
from fsdp_advisor.server.questions import PASTED, Question
from fsdp_advisor.server.recordings import Recordings
from fsdp_advisor.server.replies import HOUR, reply, tag
from fsdp_advisor.server.settings import Settings

QUESTION_BYTES = 2048
"""About what a question takes in memory, a pasted configuration apart."""

GZIP_LEVEL = 3
"""A tenth more bytes than the usual 6, in half the time."""

T = TypeVar("T")
Asked = TypeVar("Asked", bound=EstimateRequest)


class Document:
    """A finished answer with its entity tag; kept compressed, since most take it so. `file_name`: it is a file to keep."""

    __slots__ = ("etag", "file_name", "gzipped", "lasting", "media_type")

    def __init__(
        self, body: bytes, *, lasting: bool, media_type: str = "application/json", file_name: str | None = None
    ) -> None:
        self.gzipped = gzip.compress(body, compresslevel=GZIP_LEVEL, mtime=0)
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


@dataclass(slots=True)
class Kept:
    """The documents used last, as many as their bytes allow."""

    most_bytes: int
    _documents: OrderedDict[Hashable, tuple[Document, int]] = field(default_factory=OrderedDict)
    _bytes: int = 0

    def __len__(self) -> int:
        return len(self._documents)

    @property
    def bytes(self) -> int:
        """What they take in memory, with the questions that lead to them."""
        return self._bytes

    def get(self, key: Hashable) -> Document | None:
        if (found := self._documents.get(key)) is None:
            return None
        self._documents.move_to_end(key)
        return found[0]

    def keep(self, key: Hashable, document: Document, key_bytes: int) -> None:
        size = len(document.gzipped) + key_bytes
        self._bytes += size - self._documents.pop(key, (None, 0))[1]
        self._documents[key] = (document, size)
        while self._bytes > self.most_bytes:
            self._bytes -= self._documents.popitem(last=False)[1][1]


class Answers:
    """Answers quick questions where they come in, one after the other and with an ear for others between two: each takes a few
    milliseconds, and a thread for them would only take turns with the one that listens. Slow ones have threads of their own.

    Who asks what is being answered already waits for the same answer.
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings, self._metrics = settings, metrics
        self._turn = asyncio.Lock()
        self._slow = ThreadPoolExecutor(settings.slow_threads, thread_name_prefix="slow")
        self._slow_asked = 0
        self._recordings = Recordings(settings, metrics)
        self._kept = Kept(settings.cache_bytes)
        self._under_way: dict[Hashable, asyncio.Task[Document]] = {}

    async def answer(self, question: Question) -> Document:
        """An estimate or a recommendation as the contract's JSON, or an exported file. Raises AdvisorError."""
        return await self.document(question, question, lambda model: _document(question, model))

    async def document(self, key: Hashable, question: Question, make: Callable[[Resolved], Document]) -> Document:
        """What `make` gives for the model asked for. `key` says all that it depends on. Raises AdvisorError."""
        found = self._kept.get(key)
        self._metrics.answers.labels("no" if found is None else "yes").inc()
        if found is not None:
            return found
        if (task := self._under_way.get(key)) is None:
            task = asyncio.create_task(self._made(key, question, make))
            self._under_way[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))
        return await asyncio.shield(task)

    async def worked(self, question: Question, work: Callable[[Resolved], T]) -> T:
        """What `work` makes of the model asked for, done where such answers are made: for pages too."""
        if question.config is not None:
            model = await self._recordings.resolved(question.config.encode(), PASTED, "config", question.variants())
            return await self._apart(lambda: work(model), slow=question.slow)
        name = question.request.model
        try:  # to find a model and to work on it is one errand: each wait for a turn is as long as the queue
            return await self._apart(lambda: work(_found(name)), slow=question.slow)
        except UnknownModel:
            if not self._settings.allow_hub or not hub.can_be_repo_id(name):
                raise
        data, _ = await asyncio.to_thread(hub.download, name, anonymous=True)
        model = await self._recordings.resolved(data, name, "hub", question.variants())
        return await self._apart(lambda: work(model), slow=question.slow)

    async def close(self) -> None:
        for task in self._under_way.values():
            task.cancel()
        await self._recordings.close()
        self._slow.shutdown(wait=False, cancel_futures=True)

    # Inside

    async def _made(self, key: Hashable, question: Question, make: Callable[[Resolved], Document]) -> Document:
        document = await self.worked(question, make)
        if document.lasting:
            self._kept.keep(key, document, QUESTION_BYTES + len(question.config or ""))
        return document

    def _ended(self, key: Hashable, task: asyncio.Task[Document]) -> None:
        self._under_way.pop(key, None)
        if not task.cancelled():
            task.exception()  # seen, should nobody wait any more

    async def _apart(self, work: Callable[[], T], *, slow: bool) -> T:
        if not slow:
            async with self._turn:
                return work()
        if self._slow_asked >= self._settings.max_slow:
            raise ServerBusy(
                f"{self._slow_asked} recommendations and allocator walks are asked for",
                hint="try again in a few seconds",
            )
        self._slow_asked += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._slow, work)
        finally:
            self._slow_asked -= 1


def _found(name: str) -> Resolved:
    """The model asked for. Nothing of this machine but catalog and memory is looked at."""
    return resolve(name, allow_hub=False, allow_paths=False, allow_recording=False)


def _document(question: Question, model: Resolved) -> Document:
    lasting = model.source != "hub"
    if question.target is not None:
        report = report_for(question.target, _on_some_gpu(question.request), model)
        made = export(question.target, Job.of(report, report.estimates[0]))
        return Document(made.text.encode(), lasting=lasting, media_type=made.media_type, file_name=made.file_name)
    if isinstance(question.request, RecommendRequest):
        return as_json(advised(model, question.request, explain=question.explain), timeline=question.explain)
    request = question.request
    report = estimate_resolved(_on_some_gpu(request), model, explain=question.explain)
    return as_json(_noted(request, report), timeline=question.explain)


def as_json(found: Report | Advice, *, timeline: bool) -> Document:
    """The contract's document."""
    report = found if isinstance(found, Report) else found.report
    body = to_json(found.as_dict(timeline=timeline), inf_nan_mode="null")
    return Document(body, lasting=report.model_source != "hub")


def advised(model: Resolved, request: RecommendRequest, *, explain: bool = False) -> Advice:
    """What is recommended."""
    sure = _on_some_gpu(request)
    report = _noted(request, estimate_resolved(sure.as_estimate, model, explain=explain))
    return Advice(report=report, recommendation=recommend_resolved(report, model, sure))


def _on_some_gpu(request: Asked) -> Asked:
    """A server's own GPU is nobody's business: the default is taken where none is named."""
    return request if request.gpu is not None else request.but(gpu=DEFAULT_GPU)


def _noted(request: EstimateRequest, report: Report) -> Report:
    if request.gpu is not None:
        return report
    return replace(report, notes=(*report.notes, f"GPU: {DEFAULT_GPU} is assumed; name another with gpu"))
