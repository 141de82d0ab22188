"""The application: routes, pages and what stands around them."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles

from fsdp_advisor import __version__
from fsdp_advisor.server import api, health, middleware, pages
from fsdp_advisor.server.answers import Answers
from fsdp_advisor.server.assets import static_dir
from fsdp_advisor.server.errors import add_handlers
from fsdp_advisor.server.observation import Metrics, log_as_json
from fsdp_advisor.server.settings import Settings

COLLECTED_AFTER = (50_000, 20, 50)
"""Objects, and times: answers leave few cycles behind, and to look for them halts every request."""


def create_app(settings: Settings | None = None) -> FastAPI:
    """A server's application; settings are read from the environment where none are given."""
    settings = settings or Settings()
    log_as_json(settings.log_level)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        before = gc.get_threshold()
        gc.freeze()
        gc.set_threshold(*COLLECTED_AFTER)
        yield
        gc.set_threshold(*before)
        gc.unfreeze()
        ending, app.state.answers = app.state.answers, Answers(settings, app.state.metrics)  # it may be started again
        await ending.close()

    app = FastAPI(
        title="fsdp-advisor",
        version=__version__,
        description="Memory of sharded transformer training, without a GPU.",
        docs_url=None,  # FastAPI's own come from a CDN
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
        lifespan=lifespan,
    )
    metrics = Metrics()
    app.state.settings, app.state.answers, app.state.metrics = settings, Answers(settings, metrics), metrics
    add_handlers(app)
    app.include_router(api.router)
    app.include_router(health.router)
    app.include_router(pages.router)
    app.mount("/static", StaticFiles(directory=static_dir()), name="static")
    middleware.surround(app, settings)
    return app
