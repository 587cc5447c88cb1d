"""Other databases of vectors: one file each, one protocol, one contract test."""

from whiten_index.sinks.protocol import (
    VECTOR,
    Changing,
    Found,
    Generation,
    Layout,
    Metric,
    Sink,
    VectorDtype,
)
from whiten_index.sinks.registry import (
    open_sink,
    require_address,
    require_client,
    require_options,
    shaping_options,
)
from whiten_index.sinks.rows import RowsError, require_rows, vectors_of
from whiten_index.sinks.secrets import require_no_secrets

__all__ = [
    "VECTOR",
    "Changing",
    "Found",
    "Generation",
    "Layout",
    "Metric",
    "RowsError",
    "Sink",
    "VectorDtype",
    "open_sink",
    "require_address",
    "require_client",
    "require_no_secrets",
    "require_options",
    "require_rows",
    "shaping_options",
    "vectors_of",
]
