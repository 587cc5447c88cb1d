"""The command that serves indexes, and the demo that makes one to serve."""

import logging
from typing import Any

import click

from whiten_index.cli import terminal
from whiten_index.cli.schema_options import GroupedCommand, config_option, given, schema_options
from whiten_index.cli.signals import raise_if_interrupted
from whiten_index.errors import require_installed
from whiten_index.serving.serve_options import ServeOptions


@click.command(cls=GroupedCommand)
@click.argument("indexes", nargs=-1, required=True, metavar="[NAME=]INDEX...")
@config_option
@schema_options(ServeOptions)
@click.option("--stdio", is_flag=True, help="Serve MCP over standard input and output, no HTTP.")
def serve(indexes: tuple[str, ...], stdio: bool, **options: Any) -> None:
    """Serve each INDEX over HTTP and MCP, and a page to search it, until SIGTERM or Ctrl-C.

    A new version answers as soon as it is published. An index is called by its folder's name
    unless it is given another, NAME=INDEX.
    """
    require_installed("fastapi", "uvicorn", "mcp", "prometheus_client", by="serve", extra="serve")
    chosen = ServeOptions(**given(options))
    from whiten_index.serving import server

    places = server.named(indexes)
    quiet = logging.WARNING if terminal.CHOSEN["quiet"] else logging.INFO
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    logging.getLogger("whiten_index.serving").setLevel(quiet)
    if stdio:
        server.serve_stdio(places, chosen)
        return

    def ready(address: str) -> None:
        raise_if_interrupted()
        click.echo(f"{address}  (Ctrl-C stops the server)", err=True)

    server.serve(places, chosen, ready=ready)
