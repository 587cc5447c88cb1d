"""Options of the server. Importing them loads nothing heavy."""

import ipaddress
import os
import re
from pathlib import Path
from typing import Literal

from whiten_index.artifacts.files import read_bounded, reading
from whiten_index.encoding.encoder_config import OpeningOptions
from whiten_index.errors import ConfigError
from whiten_index.options import INDEX, option, parse_bytes, schema

SERVER, LIMITS = "Server", "Limits"
TOKEN_VARIABLE = "WHITEN_INDEX_TOKEN"
PROBES = ("/healthz", "/readyz")
_SHORTEST_TOKEN = 16


@schema
class ServeOptions(OpeningOptions):
    """Options of ``whiten-index serve``.

    Raises:
        ConfigError: a value is out of bounds, or a port that others can reach has no token.

    Examples:
        >>> ServeOptions(port=9000).host
        '127.0.0.1'
    """

    host: str = option("Address to listen on.", SERVER, default="127.0.0.1")
    port: int = option(
        "Port to listen on; 0 takes a free one.", SERVER, default=8080, ge=0, le=65535
    )
    token_file: str | None = option(
        "File with the token that requests must send (Authorization: Bearer TOKEN).",
        SERVER,
        default=None,
        shown=f"the variable {TOKEN_VARIABLE}",
    )
    no_auth: bool = option(
        "Listen on an address that others can reach without a token.", SERVER, default=False
    )
    cors_origin: tuple[str, ...] = option(
        "Origin whose pages in a browser may ask, such as https://example.org.", SERVER, default=()
    )
    log_queries: bool = option("Write the texts of queries to the log.", SERVER, default=False)
    reload_seconds: float = option(
        "How often a new version is looked for.", SERVER, default=5.0, ge=0.1, le=86_400
    )
    store: str | None = option(
        "Where the raw embeddings are now, if they moved.", INDEX, default=None
    )
    rerank: int | None = option(
        "Rank N candidates, top-k at least, again by the raw embeddings in the store; 0 for none.",
        INDEX,
        default=None,
        ge=0,
        shown="what the index was built for",
    )
    mapped: bool | None = option(
        "Read the index file as it is searched, not as a whole.",
        INDEX,
        default=None,
        shown="if its lists are in a file of their own",
    )
    verify: Literal["full", "manifest"] = option(
        "Compare every file's checksum, or only its size, which misses flipped bits.",
        INDEX,
        default="full",
    )
    compare_memory: str | int = option(
        "Memory for the comparison of an index with its raw embeddings; 0 for none.",
        INDEX,
        default="2GiB",
    )
    max_body: str | int = option("Size of a request.", LIMITS, default="4MiB")
    max_texts: int = option("Texts or embeddings of a request.", LIMITS, default=256, ge=1)
    max_hits: int = option(
        "Hits or candidates of a request, of all its queries.", LIMITS, default=10_000, ge=1
    )
    max_requests: int = option(
        "Requests at once; others get status 429.", LIMITS, default=256, ge=1
    )
    max_seconds: float = option(
        "Time of a request, and of those under way when the server stops.",
        LIMITS,
        default=30.0,
        ge=0.01,
        le=3600,
    )

    def __post_init__(self) -> None:
        _ = self.body_bytes, self.compare_bytes
        token = self.token
        for origin in self.cors_origin:
            if origin != "*" and not re.fullmatch(r"https?://[^/]+", origin):
                raise ConfigError(
                    f"--cors-origin {origin!r} is no origin; write one as https://example.org, or *"
                )
        if not (self.no_auth or self.loopback or token):
            raise ConfigError(
                f"others can reach --host {self.host}; give a token with --token-file FILE or "
                f"{TOKEN_VARIABLE}, or allow everybody with --no-auth"
            )

    @property
    def loopback(self) -> bool:
        """True if only this machine reaches the address."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    @property
    def token(self) -> str | None:
        """The token that requests must send, None without one."""
        if self.token_file is None:
            found = os.environ.get(TOKEN_VARIABLE)
            where = TOKEN_VARIABLE
        else:
            path = Path(self.token_file)
            try:
                with reading(path):
                    found = read_bounded(path).decode().strip()
            except (FileNotFoundError, NotADirectoryError, ConfigError):
                # It may be the token itself.
                raise ConfigError(
                    "--token-file cannot be read, as there is no such file; write the token into "
                    "one that you alone can read, and name it"
                ) from None
            except (OSError, ValueError) as error:
                raise ConfigError(f"--token-file {path} cannot be read ({error})") from error
            where = f"--token-file {path}"
        if found is None:
            return None
        if len(found) < _SHORTEST_TOKEN or not (found.isascii() and found.isprintable()):
            raise ConfigError(
                f"the token of {where} must have {_SHORTEST_TOKEN} ASCII characters at least; "
                "make one with: openssl rand -hex 32"
            )
        return found

    @property
    def body_bytes(self) -> int:
        """``max_body`` as a number."""
        return parse_bytes(self.max_body, option="--max-body")

    @property
    def compare_bytes(self) -> int:
        """``compare_memory`` as a number."""
        given = self.compare_memory
        return 0 if str(given) == "0" else parse_bytes(given, option="--compare-memory")
