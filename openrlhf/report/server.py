"""The report as a page of a server on this machine: it pages through all samples of the runs."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import uvicorn
from fastapi import Depends, FastAPI, HTTPException
from fastapi.middleware.trustedhost import TrustedHostMiddleware
from fastapi.responses import HTMLResponse

from openrlhf.errors import ConfigError
from openrlhf.report.curves import make_panels
from openrlhf.report.page import make_page
from openrlhf.report.run_folder import read_runs
from openrlhf.report.sample_index import Query, SampleIndex
from openrlhf.report.samples import Row

HOST = "127.0.0.1"


def make_app(paths: Sequence[Path]) -> FastAPI:
    """Return the server of the runs in these folders; each load of the page reads them anew."""
    indexes: dict[str, SampleIndex] = {}  # by the path of the run, which the page asks by
    read_runs(paths)  # what is no run is said at the start
    app = FastAPI(openapi_url=None)
    # A page of another host, which a browser was sent to by name, must not read the samples.
    app.add_middleware(TrustedHostMiddleware, allowed_hosts=[HOST, "localhost"])

    def index_of(run: str) -> SampleIndex:
        if run not in indexes:
            raise HTTPException(404, f"there is no run {run}")
        return indexes[run]

    Index = Annotated[SampleIndex, Depends(index_of)]
    Asked = Annotated[Query, Depends()]

    @app.get("/")
    def page() -> HTMLResponse:
        runs = read_runs(paths)
        for run in runs:
            path = str(run.path)
            indexes[path] = indexes.get(path) or SampleIndex(run.path)
            indexes[path].refresh()
        return HTMLResponse(make_page(runs, make_panels(runs), is_served=True))

    @app.get("/samples")
    def samples(index: Index, query: Asked) -> Row:
        return index.samples(query)

    @app.get("/groups")
    def groups(index: Index, query: Asked) -> Row:
        return index.groups(query)

    @app.get("/sample")
    def sample(index: Index, file: str, number: int) -> Row:
        found = index.sample(file, number)
        if found is None:
            raise HTTPException(404, f"there is no sample {number} in {file}")
        return found

    return app


def serve(paths: Sequence[Path], port: int, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C; `say` is told the address."""
    app = make_app(paths)
    try:
        listener = socket.create_server((HOST, port))
    except OSError as error:
        raise ConfigError(
            f"--port {port} cannot be used: {error.strerror}. Type --port 0 for a free one."
        ) from error
    with listener, suppress(KeyboardInterrupt):
        say(f"report: http://{HOST}:{listener.getsockname()[1]} (Ctrl-C ends it)")
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        asyncio.run(server.serve(sockets=[listener]))
