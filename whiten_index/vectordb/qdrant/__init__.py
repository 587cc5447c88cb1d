"""Rows in Qdrant: a collection a table, and the name that users query its alias.

A server is spoken to by REST or gRPC. ``qdrant:///folder`` is the client's own engine on disk,
which takes one connection at a time; ``qdrant://:memory:`` is the same in memory, one for all
connections of a process, gone with it. Both search exactly and are for trying out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from whiten_index.errors import ConfigError
from whiten_index.vectordb.staged_tables import MORE_BYTES

if TYPE_CHECKING:
    from whiten_index.vectordb.qdrant.qdrant_writer import QdrantWriter

__all__ = ["connect"]

# A collection is a folder of the server.
_LONGEST_NAME = 255 - MORE_BYTES


def connect(
    address: str, name: str, options: Mapping[str, str], *, make: bool = True
) -> QdrantWriter:
    """Connect to a server, a folder or this process's memory.

    Args:
        address: ``qdrant://host:6333``, ``qdrant+https://host``, ``qdrant:///folder`` or
            ``qdrant://:memory:``; an API key is its password, or in ``QDRANT_API_KEY``.
        name: the alias that users query.
        options: those of ``Options``.
        make: whether to make a folder that is not there, or is empty.

    Raises:
        ConfigError: the address, the name or an option cannot be used.
        DatabaseError: nothing answers there, or it is too old; or there is no folder to read from.
    """
    # The client is loaded here, so that options are read without it.
    from whiten_index.vectordb.qdrant.connection import Place, close_client, open_client
    from whiten_index.vectordb.qdrant.options import Options
    from whiten_index.vectordb.qdrant.qdrant_writer import QdrantWriter

    chosen, place = Options.parse(options), Place.of(address)
    _require_name(name)
    if place.local and options:
        raise ConfigError(
            f"{place.shown} is Qdrant's local mode, which searches exactly and has nothing to set; "
            f"leave out --option {next(iter(options))}"
        )
    client = open_client(place, chosen, make=make)
    try:
        return QdrantWriter(client, place, name, chosen)
    except BaseException:
        close_client(client, place)
        raise


def _require_name(name: str) -> None:
    """Refuse a name that Qdrant gives no collection.

    Raises:
        ConfigError: it holds a character that paths have, or is empty or too long.
    """
    odd = re.search(r'[<>:"/\\|?*\x00-\x1f\x7f]', name)
    if odd or name in ("", ".", "..") or len(name.encode()) > _LONGEST_NAME:
        raise ConfigError(
            f"Qdrant takes no collection of the name {name[:60]!r}; give one of 1 to "
            f'{_LONGEST_NAME} bytes without control characters and < > : " / \\ | ? *'
        )
