"""Collections of Milvus: a server, or Milvus Lite on a file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

from whiten_index.errors import ConfigError
from whiten_index.vectordb.staged_tables import MORE_BYTES

if TYPE_CHECKING:
    from whiten_index.vectordb.milvus.milvus_writer import MilvusWriter

__all__ = ["connect"]

_LONGEST_NAME = 255 - MORE_BYTES


def connect(
    address: str, name: str, options: Mapping[str, str], *, make: bool = True
) -> MilvusWriter:
    """Connect to a collection, which need not be there yet.

    Args:
        address: ``milvus://host:19530``, ``milvus+https://host`` or ``milvus:///folder/file.db``.
        name: the alias that users query.
        options: ``index`` (hnsw, flat, ivf_flat, autoindex), ``m``, ``ef_construction``, ``ef``,
            ``nlist``, ``nprobe``, ``db``.
        make: whether to make a file that is not there.

    Raises:
        ConfigError: the address, the name or an option cannot be used, or Milvus Lite is missing.
        DatabaseError: the database cannot be reached, or refuses; or the file is not there and is not
            to be made.
    """
    # The client is loaded here, so that options are read without it.
    from whiten_index.vectordb.milvus.address import Place
    from whiten_index.vectordb.milvus.connection import Connection
    from whiten_index.vectordb.milvus.lite import require_lite
    from whiten_index.vectordb.milvus.milvus_writer import MilvusWriter
    from whiten_index.vectordb.milvus.options import IndexOptions

    parsed = IndexOptions.parse(options)
    if not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) or len(name) > _LONGEST_NAME:
        raise ConfigError(
            f"Milvus takes no collection of the name {name[:60]!r}; a name has letters, digits and "
            f"underscores, begins with no digit, and is 1 to {_LONGEST_NAME} characters long"
        )
    file = Place.of(address, parsed.database).file
    if file is not None and not make:
        require_lite(file)
    return MilvusWriter(Connection(address, parsed), name, parsed)
