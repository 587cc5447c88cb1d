"""HTTP routes, the search page and MCP, and the function that runs the server."""

import contextlib
import logging
import math
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from dataclasses import asdict, is_dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import anyio
import pydantic_core
import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from mcp.server.transport_security import TransportSecuritySettings
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.routing import Route

import whiten_index
from whiten_index.artifacts.files import system_error, unforeseen
from whiten_index.errors import ConfigError, StorageError, WhitenIndexError
from whiten_index.paths import at_home
from whiten_index.serving import problems
from whiten_index.serving.bodies import (
    CompareBody,
    ComparisonBody,
    EmbeddingsBody,
    FoundBody,
    ProblemBody,
    SearchBody,
    VectorsBody,
)
from whiten_index.serving.guard import Guard
from whiten_index.serving.mcp_tools import mcp_server
from whiten_index.serving.serve_options import ServeOptions
from whiten_index.serving.service import Service

_PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": ProblemBody, "description": text, "content": {problems.PROBLEM: {}}}
    for status, text in {
        400: "It cannot be answered as asked.",
        401: "The token is missing or wrong.",
        404: "No such index or document.",
        413: "It is too large.",
        422: "The body does not fit its schema.",
        429: "Too many requests at once.",
        503: "A file that is needed is damaged or cannot be read, or the model cannot be asked.",
        504: "It took too long.",
    }.items()
}
_PAGE = {"/": ("page.html", "text/html"), "/page.js": ("page.js", "text/javascript"),
         "/page.css": ("page.css", "text/css")}  # fmt: skip
_BACKLOG = 2048


def application(service: Service) -> FastAPI:
    """Return the ASGI application of a service."""
    options = service.options
    mcp = mcp_server(service)
    own = mcp.streamable_http_app(
        stateless_http=True,
        json_response=True,
        max_request_body_size=options.body_bytes,
        # The guard looks at hosts.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with service.running(), mcp.session_manager.run():
            yield

    app = FastAPI(
        title="whiten-index",
        version=whiten_index.__version__,
        description="Search in reduced embeddings.",
        lifespan=lifespan,
        # They would load scripts from elsewhere.
        docs_url=None,
        redoc_url=None,
        responses=_PROBLEMS,
    )
    app.router.route_class = _Route
    for kind in (WhitenIndexError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, problems.answer)
    app.add_middleware(Guard, options=options, metrics=service.metrics)
    if options.cors_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(options.cors_origin),
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type", "mcp-protocol-version"],
        )
    _add_routes(app, service)
    for route in own.routes:
        if isinstance(route, Route):
            route.methods = {"POST"}  # there is no stream of events to listen to
        app.router.routes.append(route)
    for path, (name, media_type) in _PAGE.items():
        app.add_api_route(path, _static(name, media_type), include_in_schema=False)
    if options.token:
        schema = app.openapi()
        schema["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        schema["security"] = [{"token": []}]
    return app


class _Request(Request):
    async def json(self) -> Any:
        """Return the body, parsed in a fifth of the time that Python takes for numbers."""
        return pydantic_core.from_json(await self.body())


class _Route(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return a handler with pydantic's parser, which explains errors of the system."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                return await handle(_Request(request.scope, request.receive))
            except Exception as error:
                if (failed := unforeseen(error, step="the request")) is None:
                    raise
                raise failed from error

        return answer


def _add_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/search", response_model=FoundBody)
    async def search(body: SearchBody) -> Response:
        """Find documents by texts, by raw embeddings, or by another document."""
        return _json(await service.search(body))

    @app.post("/v1/embeddings", response_model=VectorsBody)
    async def embeddings(body: EmbeddingsBody) -> Response:
        """Return reduced vectors of queries, in the format of OpenAI's API."""
        return _json(await service.vectors(body))

    @app.post("/v1/compare", response_model=ComparisonBody)
    async def compare(body: CompareBody) -> Response:
        """Search by raw embeddings, by the indexes, and by each width of one fit."""
        return _json(await service.compare(body))

    @app.get("/v1/models")
    async def models() -> Response:
        """List the indexes in the format of OpenAI's API."""
        data = [{"id": name, "object": "model", "created": 0, "owned_by": "whiten-index"}
                for name in service.indexes]  # fmt: skip
        return _json({"object": "list", "data": data})

    @app.get("/v1/indexes")
    async def indexes() -> Response:
        """List the indexes."""
        return _json({"indexes": service.summaries()})

    # Files are read: in another thread than the loop's.
    @app.get("/v1/indexes/{name}")
    def describe(name: str) -> Response:
        """Return what is known of the published version of an index."""
        return _json(service.describe(name))

    @app.get("/v1/indexes/{name}/versions")
    def versions(name: str) -> Response:
        """List the versions of an index, newest first."""
        return _json(service.versions(name))

    @app.get("/healthz")
    async def healthz() -> Response:
        """Answer if the server runs."""
        return _json({"status": "ok"})

    @app.get("/readyz")
    async def readyz() -> Response:
        """Answer which versions are searched, and whether a newer one cannot be opened."""
        found = {
            each["name"]: {"version": each["version"], "reload_failed": bool(each["fault"])}
            for each in service.summaries()
        }
        return _json({"status": "ok", "indexes": found})

    @app.get("/metrics")
    async def metrics() -> Response:
        """Return counters for Prometheus."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")


def _json(value: Any) -> Response:
    """Return JSON; kept columns of any type are in it."""
    return Response(
        pydantic_core.to_json(value, fallback=_plain, inf_nan_mode="null"),
        media_type="application/json",
    )


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def _static(name: str, media_type: str) -> Callable[[], Awaitable[Response]]:
    content = files(whiten_index.serving).joinpath(name).read_bytes()

    async def answer() -> Response:
        return Response(content, media_type=media_type)

    return answer


def serve(
    places: Mapping[str, Path | str],
    options: ServeOptions | None = None,
    *,
    ready: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve indexes over HTTP until SIGTERM or Ctrl-C; requests under way are answered first.

    Args:
        places: name -> folder or URI of a published index.
        options: where and how.
        ready: called with the server's address when it listens.

    Raises:
        StorageError: the address cannot be listened on.
        WhitenIndexError: an index cannot be opened; see ``open_index``.
    """
    options = options or ServeOptions()
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    # Before the indexes are opened, which may take minutes.
    # asyncio turns off Nagle's algorithm, 40 ms a request, only where TCP is named.
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((options.host, options.port))
    except (OSError, UnicodeError) as error:
        listening.close()
        raise StorageError(
            f"{options.host}:{options.port} cannot be listened on ({error}); take another --host "
            "or --port"
        ) from error
    with listening:
        app = application(Service(places, options))
        config = uvicorn.Config(
            app,
            backlog=_BACKLOG,
            log_config=None,
            access_log=False,
            # uvloop raises if a client leaves before its last answer.
            loop="asyncio",
            # httptools keeps a header of any length.
            http="h11",
            ws="none",
            server_header=False,
            timeout_graceful_shutdown=int(options.max_seconds) + 1,
        )
        listening.listen(_BACKLOG)
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        logging.getLogger("asyncio").addFilter(_Seldom())
        host = f"[{options.host}]" if family == socket.AF_INET6 else options.host
        ready(f"http://{host}:{listening.getsockname()[1]}")
        try:
            uvicorn.Server(config).run(sockets=[listening])
        except KeyboardInterrupt:
            # It stopped gracefully, then raised the signal once more.
            return


class _Seldom(logging.Filter):
    """Lets through one line a minute where connections take all files that a process may open."""

    _next = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        if not str(record.msg).startswith("socket.accept() out of system resource"):
            return True
        # asyncio tries thousands of times a second.
        if seldom := time.monotonic() >= self._next:
            self._next = time.monotonic() + 60
            record.msg = "no new connection is taken: as many files are open as the limit allows"
            record.exc_info = None
        return seldom


def serve_stdio(places: Mapping[str, Path | str], options: ServeOptions | None = None) -> None:
    """Serve indexes by MCP over standard input and output, until the input ends.

    SIGTERM and Ctrl-C end the process with status 0; what is under way is not answered.

    Raises:
        BrokenPipeError: the reader of the output has gone.
        StorageError: the input or output is closed, or cannot be read or written.
    """
    if None in (sys.__stdin__, sys.__stdout__):
        raise StorageError("standard input or output is closed; serve --stdio needs both")
    service = Service(places, options or ServeOptions())

    async def run() -> None:
        async with service.running(), anyio.create_task_group() as group:
            group.start_soon(_end_on_signals)
            await mcp_server(service).run_stdio_async()
            group.cancel_scope.cancel()

    try:
        anyio.run(run)
    except BaseExceptionGroup as failed:
        if failed.subgroup(BrokenPipeError) is not None:
            raise BrokenPipeError from failed
        error: BaseException = failed.subgroup(OSError) or failed
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if not isinstance(error, OSError):
            raise
        raise system_error("standard input or output", error, action="use") from failed


async def _end_on_signals() -> None:
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for _ in signals:
            # Nothing wakes the thread that waits for a line of the input.
            os._exit(0)


def named(arguments: tuple[str, ...]) -> dict[str, str]:
    """Return name -> place of arguments ``PLACE``, named by its last part, or ``NAME=PLACE``.

    Examples:
        >>> named(("docs/index", "news=s3://bucket/news"))
        {'index': 'docs/index', 'news': 's3://bucket/news'}
    """
    found = dict[str, str]()
    for each in arguments:
        name, equals, place = each.partition("=")
        if not equals or "/" in name:
            name, place = each.rstrip("/").rpartition("/")[2] or each, each
        elif place.startswith("~"):
            # Neither a shell nor the reader of job files looks behind the name.
            place = str(at_home(place))
        if name in found:
            raise ConfigError(f"two indexes are called {name}; name one as NAME={place}")
        found[name] = place
    return found
