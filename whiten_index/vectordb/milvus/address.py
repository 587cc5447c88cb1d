"""Which server or file of Milvus an address names."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import parse_qsl, unquote, urlsplit

from whiten_index.errors import ConfigError

TOKEN = "MILVUS_TOKEN"
_PORT = 19530
_TLS = ("server_pem_path", "client_pem_path", "client_key_path", "ca_pem_path", "server_name")
_FORMS = (
    f"the address of Milvus is one of milvus://host:{_PORT}, milvus+https://host and "
    "milvus:///folder/file.db; give the token, or user:password, "
    f"in {TOKEN}"
)


@dataclass(frozen=True)
class Place:
    """What an address names.

    Attributes:
        shown: the address.
        uri: of a server, as the client takes it.
        file: of Milvus Lite, None for a server.
        token: or user and password with a colon between.
        database: of the server, "" for its default.
        tls: parameters of the client.
    """

    shown: str
    uri: str = ""
    file: str | None = None
    token: str = field(default="", repr=False)
    database: str = ""
    tls: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, address: str, database: str) -> Self:
        """Return what an address names.

        Args:
            address: as it was given.
            database: that an option names, "" for none.

        Raises:
            ConfigError: it has another form.
        """
        try:
            parts = urlsplit(address)
            host, port = parts.hostname or "", parts.port
        except ValueError:
            raise ConfigError(_FORMS) from None
        path, tls = unquote(parts.path), dict(parse_qsl(parts.query, keep_blank_values=True))
        if parts.fragment or set(tls) - set(_TLS):
            raise ConfigError(f"after ? an address of Milvus takes {', '.join(_TLS)} alone")
        if not parts.netloc:
            return cls(f"milvus://{path}", file=_lite_file(path), database=database)
        if not re.fullmatch(r"[\w.-]+|[0-9a-f:.]+(%[\w.-]+)?", host):
            raise ConfigError(_FORMS)
        if host.endswith(".db"):
            raise ConfigError(
                f"milvus://{host} names a host; a file needs three strokes: milvus:///folder/x.db"
            )
        inside, named = path.strip("/"), f"[{host}]" if ":" in host else host
        if inside and database and inside != database:
            raise ConfigError(
                f"the address names the database {inside!r} and --option db {database!r}"
            )
        secure = parts.scheme == "milvus+https"
        at = f"{named}:{port or (443 if secure else _PORT)}"
        database = inside or database
        return cls(
            f"{parts.scheme}://{at}{'/' if database else ''}{database}",
            f"{'https' if secure else 'http'}://{at}",
            token=os.environ.get(TOKEN, ""),
            database=database,
            tls=tls,
        )


def _lite_file(path: str) -> str:
    if not path.endswith(".db"):
        raise ConfigError(
            f"milvus://{path}: Milvus Lite takes a file that ends in .db, in its full path"
        )
    return str(Path(path).absolute())
