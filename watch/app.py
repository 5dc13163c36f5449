"""The app behind `fedtta watch`: the runs of a results folder, their live pages, and what other parts add."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from fastapi import APIRouter, FastAPI
from fastapi.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, Response

from fedtta.watch.access import READ, Access, Guard
from fedtta.watch.layout import Links, page
from fedtta.watch.runs import Runs

SCRIPT = Path(__file__).with_name("live.js")


def make_app(
    folder: Path,
    access: Access | None = None,
    routers: Sequence[APIRouter] = (),
    links: Links | None = None,
    only: str = "",
) -> FastAPI:
    """Return the app.

    Parameters
    ----------
    folder : Path
        The results folder; it need not exist yet.
    access : Access, optional
        Who may read; None: everyone on this machine. It holds for all routes, those of `routers`, too.
    routers : sequence of APIRouter
        Further pages, with the methods `fedtta.watch.access.READ`; `fedtta.watch.layout.View` makes one that follows
        what it shows.
    links : mapping, optional
        Text → address of the links to them at the top of every page.
    only : str
        Name of the only run that is shown; empty: all.

    Notes
    -----
    `app.state.reading` is the number of requests of pages that are being answered, `app.state.seen` the monotonic time
    of the last one, and `app.state.final` that of the last answer about a run that has ended.
    """
    runs = Runs(folder, only)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        runs.close()

    app = FastAPI(
        title="FedTTA", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False, lifespan=lifespan
    )
    app.state.runs, app.state.links = runs, {"Runs": "/", **(links or {})}
    app.state.reading, app.state.seen, app.state.final = 0, -1e9, -1e9
    app.include_router(_pages(app, runs))
    for router in routers:
        app.include_router(router)
    app.add_exception_handler(404, _missing)
    app.add_middleware(Guard, access=access or Access())
    return app


def _pages(app: FastAPI, runs: Runs) -> APIRouter:
    """Return the routes of the runs."""
    router = APIRouter(default_response_class=Response)

    def add(path: str, answer: Callable[..., Awaitable[Response]]) -> None:
        router.add_api_route(path, answer, methods=list(READ), response_model=None)

    @contextmanager
    def reading() -> Iterator[None]:
        app.state.reading += 1
        try:
            yield
        finally:
            app.state.reading -= 1
            app.state.seen = time.monotonic()

    async def index(request: Request) -> Response:
        with reading():
            return (await run_in_threadpool(runs.index)).respond(request)

    async def run(request: Request, name: str) -> Response:
        with reading():
            view = await runs.page(name)
        if view is None:
            return await _missing(request, None)
        if view.ended:
            app.state.final = time.monotonic()
        return view.respond(request)

    async def script() -> Response:
        return FileResponse(SCRIPT, media_type="text/javascript")

    add("/", index)
    add("/runs/{name}", run)
    add("/live.js", script)
    return router


async def _missing(request: Request, _: Exception | None) -> Response:
    words = '<h1>Not found</h1><p>There is no such page. The runs are on <a href="/">the first page</a>.</p>'
    return page(request, "Not found", f'<main id="page">{words}</main>', status=404)
