"""Run the server until it is told to stop."""

import logging
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import anyio
import uvicorn

from whiten_index.errors import ConfigError, StorageError
from whiten_index.serving.application import application
from whiten_index.serving.mcp_tools import mcp_server
from whiten_index.serving.serve_options import ServeOptions
from whiten_index.serving.service import Service

_BACKLOG = 2048


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
    listening = socket.socket(family)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((options.host, options.port))
    except OSError as error:
        listening.close()
        raise StorageError(
            f"{options.host}:{options.port} cannot be listened on ({error.strerror or error}); "
            "take another --host or --port"
        ) from error
    with listening:
        app = application(Service(places, options))
        config = uvicorn.Config(
            app,
            backlog=_BACKLOG,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=int(options.max_seconds) + 1,
        )
        listening.listen(_BACKLOG)
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
        host = f"[{options.host}]" if family == socket.AF_INET6 else options.host
        ready(f"http://{host}:{listening.getsockname()[1]}")
        try:
            uvicorn.Server(config).run(sockets=[listening])
        except KeyboardInterrupt:
            # It stopped gracefully, then raised the signal once more.
            return


def serve_stdio(places: Mapping[str, Path | str], options: ServeOptions | None = None) -> None:
    """Serve indexes by MCP over standard input and output, until the input ends."""
    service = Service(places, options or ServeOptions())

    async def run() -> None:
        async with service.running():
            await mcp_server(service).run_stdio_async()

    anyio.run(run)


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
        if name in found:
            raise ConfigError(f"two indexes are called {name}; name one as NAME={place}")
        found[name] = place
    return found
