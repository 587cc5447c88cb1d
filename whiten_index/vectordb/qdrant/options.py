"""What ``--option NAME=VALUE`` can say to a Qdrant server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, Self

from whiten_index.errors import ConfigError
from whiten_index.vectordb.option_values import (
    one_of,
    real_number,
    require_known,
    whole_number,
    yes_or_no,
)


class Quantization(Enum):
    """What a collection searches in place of the vectors, which stay beside it."""

    NONE = "none"
    SCALAR = "scalar"
    BINARY = "binary"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What ``--option NAME=VALUE`` can say to a server; None leaves it to the server.

    Attributes:
        m: edges of a node of the HNSW graph, 0 for no graph.
        ef_construct: neighbours looked at while it is built.
        hnsw_ef: neighbours looked at in an approximate search of ours, of the check for one.
        indexing_threshold: kilobytes of vectors from which a segment has a graph, once all rows
            are loaded; smaller ones are searched exactly. 10,000 by default.
        quantization: none, scalar (a byte a number) or binary (a bit a number).
        oversampling: how many times more rows a quantised search of ours takes, to rank them again.
        on_disk: whether the vectors stay on disk rather than in memory.
        shard_number: parts of the collection.
        replication_factor: copies of each part.
        prefer_grpc: whether to speak gRPC, which sends vectors faster, rather than REST.
        grpc_port: at which it listens for it.
        timeout: seconds that it has for a request.
        index_timeout: seconds that it has to build the graph.
        tls_ca: file of the certificates to trust, in place of the system's.
        built: the options given of which a collection is made, as text.
    """

    m: int | None = None
    ef_construct: int | None = None
    hnsw_ef: int | None = None
    indexing_threshold: int = 10_000
    quantization: Quantization = Quantization.NONE
    oversampling: float | None = None
    on_disk: bool | None = None
    shard_number: int | None = None
    replication_factor: int | None = None
    prefer_grpc: bool = False
    grpc_port: int = 6334
    timeout: int = 60
    index_timeout: int = 3600
    tls_ca: str | None = None
    built: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Return what was given as text.

        Raises:
            ConfigError: an option is unknown, or its value is of another kind.
        """
        require_known(given, _READ, "Qdrant")
        values = {name: _READ[name](name, text) for name, text in given.items()}
        built = {name: _told(values[name]) for name in _BUILT if name in values}
        return cls(**values, built=built)

    def resumed(self, built: Mapping[str, str], target: str) -> Self:
        """Return the options of a push that goes on: its own, and what was given here instead.

        Args:
            built: the options that its collection was made with.
            target: what the collection is called.

        Raises:
            ConfigError: one is given that only a new collection takes.
        """
        for name in _ONLY_NEW:
            text = self.built.get(name)
            if text is not None and text != built.get(name):
                was = f"{name}={built[name]}" if name in built else f"no {name}"
                raise ConfigError(
                    f"{target} was made with {was}, which --option {name}={text} does not change; "
                    "leave it out, or drop that collection"
                )
        kept = {name: text for name, text in built.items() if name not in self.built}
        values = {name: _READ[name](name, text) for name, text in kept.items()}
        return replace(self, **values, built={**kept, **self.built})


def _told(value: Any) -> str:
    """Return the value of an option as one text, however it was written."""
    return str(value.value if isinstance(value, Enum) else value).lower()


def _quantization(name: str, text: str) -> Quantization:
    return Quantization(one_of(name, text, [each.value for each in Quantization]))


def _path(_: str, text: str) -> str:
    return text


_READ: dict[str, Callable[[str, str], Any]] = {
    "m": partial(whole_number, least=0),
    "ef_construct": whole_number,
    "hnsw_ef": whole_number,
    "indexing_threshold": partial(whole_number, least=0),
    "quantization": _quantization,
    "oversampling": partial(real_number, least=1, most=1000),
    "on_disk": yes_or_no,
    "shard_number": whole_number,
    "replication_factor": whole_number,
    "prefer_grpc": yes_or_no,
    "grpc_port": partial(whole_number, most=65_535),
    "timeout": whole_number,
    "index_timeout": whole_number,
    "tls_ca": _path,
}
# Of these a collection is made; the others are of a connection or of searches.
SHAPING = _BUILT = (
    "m", "ef_construct", "indexing_threshold", "quantization", "on_disk", "shard_number",
    "replication_factor",
)  # fmt: skip
_ONLY_NEW = ("shard_number", "replication_factor")
# What of these a collection is made of where nothing else is given; the server has its own, too.
DEFAULTS: Mapping[str, str] = {
    name: _told(getattr(Options, name)) for name in ("quantization", "indexing_threshold")
}
