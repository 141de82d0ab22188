"""The application: its routes, pages and middleware."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.staticfiles import StaticFiles

from fsdp_advisor import __version__
from fsdp_advisor.server import api, errors, middleware, monitoring, pages
from fsdp_advisor.server.rendering import static_dir
from fsdp_advisor.server.service import AnswerService
from fsdp_advisor.server.settings import Settings


def create_app(settings: Settings | None = None) -> FastAPI:
    """The ASGI application. Without `settings`, they are read from the environment."""
    settings = settings or Settings()
    monitoring.log_as_json(settings.log_level)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.service = AnswerService(settings)
        app.state.service.start()
        yield
        app.state.service.close()

    app = FastAPI(
        title="fsdp-advisor",
        version=__version__,
        description="Memory of sharded transformer training, without a GPU.",
        docs_url=None,  # FastAPI's own pages load scripts from a CDN
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
        lifespan=lifespan,
    )
    errors.add_handlers(app)
    app.include_router(api.router)
    app.include_router(monitoring.router)
    app.include_router(pages.router)
    app.mount("/static", StaticFiles(directory=static_dir()), name="static")
    middleware.add(app, settings)
    app.openapi()  # built once, before requests come
    return app
