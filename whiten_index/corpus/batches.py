"""Frozen batches of rows, from the corpus to the store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pyarrow as pa

DIGEST_BYTES = 16
# The column of documents that names them.
ID = "id"
# Columns of documents whose texts are passages: number within the document from 0, start and end
# there in characters, and text.
PASSAGE, PASSAGE_START, PASSAGE_END, PASSAGE_TEXT = PASSAGE_COLUMNS = (
    "passage",
    "passage_start",
    "passage_end",
    "passage_text",
)


@dataclass(frozen=True, slots=True)
class TextBatch:
    """The usable texts of one shard, or their passages, with the rows they came from."""

    # n rows: column ``id``, then the kept metadata columns, then ``PASSAGE_COLUMNS`` if the texts
    # are passages.
    documents: pa.Table
    texts: list[str]  # n texts, none of them blank
    read: int  # rows read from the corpus to get these n, the skipped ones included
    skipped: Mapping[str, int] = field(default_factory=dict)  # reason -> rows left out

    def digests(self) -> NDArray[np.uint8]:
        """Return (n, 16) uint8: BLAKE2b-128 of each text's UTF-8 bytes."""
        return row_digests(text.encode() for text in self.texts)

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True, slots=True)
class EmbeddingBatch:
    """The embeddings of one shard, with the rows they belong to; see ``TextBatch``."""

    documents: pa.Table
    embeddings: NDArray[np.floating]  # (n, d) float16, float32 or float64, finite
    read: int
    skipped: Mapping[str, int] = field(default_factory=dict)

    def digests(self) -> NDArray[np.uint8]:
        """Return (n, 16) uint8: BLAKE2b-128 of each embedding's bytes."""
        return row_digests(row.tobytes() for row in np.ascontiguousarray(self.embeddings))

    def __len__(self) -> int:
        return int(self.embeddings.shape[0])


def row_digests(rows: Iterable[bytes]) -> NDArray[np.uint8]:
    """Return (n, 16) uint8: BLAKE2b-128 of each row's bytes."""
    joined = b"".join(hashlib.blake2b(row, digest_size=DIGEST_BYTES).digest() for row in rows)
    return np.frombuffer(joined, dtype=np.uint8).reshape(-1, DIGEST_BYTES)
