"""The server's answers: computed in worker processes, each once, and kept."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from fsdp_advisor.errors import MissingExtra, UnknownModel
from fsdp_advisor.job.request import EstimateRequest
from fsdp_advisor.model import cache, hub
from fsdp_advisor.server.answers import Document, ModelSource, answer, decided
from fsdp_advisor.server.monitoring import ANSWERS
from fsdp_advisor.server.settings import Settings
from fsdp_advisor.server.workers import WorkerPool
from fsdp_advisor.tape_keys import needs_recording


class AnswerService:
    """Finds or computes answers. Requests for an answer that is being computed wait for it.

    Names of the catalog go to a pool of workers. Configurations and models with adapters go to one other process, which records
    them with torch.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._pool = WorkerPool(settings.workers, max_waiting=settings.max_waiting, seconds=settings.answer_seconds)
        self._recorder = WorkerPool(
            1,
            max_waiting=1 + settings.record_queue,
            seconds=settings.record_seconds,
            memory_bytes=settings.record_memory_bytes,
        )
        self._answers: OrderedDict[Hashable, asyncio.Task[Document]] = OrderedDict()

    def start(self) -> None:
        """Start the workers. The recording process starts with the first configuration."""
        self._pool.start()

    def close(self) -> None:
        """End all processes."""
        self._pool.close()
        self._recorder.close()

    async def answer(
        self, source: ModelSource, make: Callable[..., Document], request: EstimateRequest, *options: Hashable
    ) -> Document:
        """The result of `make(model, request, *options)`, computed once for equal questions. Raises AdvisorError."""
        key = (source.key, make, request, request.given, options)
        return await self._once(key, lambda: self._compute(source, make, request, *options))

    async def page(self, make: Callable[..., Document], *arguments: Hashable) -> Document:
        """The result of `make(*arguments)`, for pages that need no model."""
        return await self._once((make, arguments), lambda: self._pool.run(make, *arguments))

    async def _once(self, key: Hashable, compute: Callable[[], Coroutine[Any, Any, Document]]) -> Document:
        """The kept answer for `key`, or else a new one."""
        task = self._answers.get(key)
        ANSWERS.labels("no" if task is None else "yes").inc()
        if task is None:
            task = self._answers[key] = asyncio.create_task(compute())
            task.add_done_callback(lambda done: self._keep(key, done))
        else:
            self._answers.move_to_end(key)
        return await asyncio.shield(task)  # one client may disconnect while others wait

    def _keep(self, key: Hashable, task: asyncio.Task[Document]) -> None:
        failed = task.cancelled() or task.exception() is not None
        if failed or not task.result().lasting:
            self._answers.pop(key, None)
        while len(self._answers) > self._settings.cached_answers:
            self._answers.popitem(last=False)

    async def _compute(self, source: ModelSource, *rest: Any) -> Document:
        asked = [r for r in rest if isinstance(r, EstimateRequest)]
        can_record = cache.installed_versions() is not None  # without torch, the answer itself says what is missing
        must_record = source.must_record or (can_record and any(needs_recording(decided(r)) for r in asked))
        source = replace(source, must_record=must_record)
        if source.config is None:
            try:
                return await (self._recorder if source.must_record else self._pool).run(answer, source, *rest)
            except UnknownModel:
                if not self._settings.allow_hub or not hub.can_be_repo_id(source.name):
                    raise
            config, _ = await asyncio.to_thread(hub.download, source.name, anonymous=True)
            source = replace(source, config=config, origin="hub")
        if cache.installed_versions() is None:
            raise MissingExtra(f"{source.name} has to be recorded; this server lacks torch and transformers")
        return await self._recorder.run(answer, source, *rest)


def service_of(request: Request) -> AnswerService:
    """The service of the application that serves a request."""
    service: AnswerService = request.app.state.service
    return service
