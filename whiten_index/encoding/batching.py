"""Tokenise a window of texts and pack it into batches of like length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class TokenWindow:
    """Token ids of n texts, end to end.

    Attributes:
        ids: (total,) int32, the texts' tokens one after the other.
        offsets: (n + 1,) int64, where each text begins.
        truncated: how many texts were cut to the length limit.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    truncated: int

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(n,) tokens of each text."""
        return np.diff(self.offsets)

    def padded(
        self, rows: NDArray[np.int64], pad: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return token ids and mask of ``rows``, both (len(rows), longest), padded on the right."""
        width = int(self.lengths[rows].max())
        ids = np.full((len(rows), width), pad, dtype=np.int64)
        mask = np.zeros((len(rows), width), dtype=np.int64)
        for position, row in enumerate(rows):
            tokens = self.ids[self.offsets[row] : self.offsets[row + 1]]
            ids[position, : len(tokens)] = tokens
            mask[position, : len(tokens)] = 1
        return ids, mask


def tokenize(tokenizer: Any, texts: Sequence[str], *, max_length: int) -> TokenWindow:
    """Tokenise texts, cutting each to ``max_length`` tokens and counting the cuts.

    Args:
        tokenizer: a transformers tokenizer, fast or slow.
        texts: n texts.
        max_length: tokens a text at most, special ones included.
    """
    rows: list[NDArray[np.int32]] = []
    truncated = 0
    for start in range(0, len(texts), _CHUNK):
        chunk, cut = _tokenize_chunk(tokenizer, list(texts[start : start + _CHUNK]), max_length)
        rows += chunk
        truncated += cut
    offsets = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    ids = np.concatenate(rows) if rows else np.empty(0, dtype=np.int32)
    return TokenWindow(ids, offsets, truncated)


def _tokenize_chunk(
    tokenizer: Any, texts: list[str], max_length: int
) -> tuple[list[NDArray[np.int32]], int]:
    """Tokenise few enough texts that the tokenizer's bulky objects stay small."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        whole = tokenizer(texts, truncation=False, verbose=False)["input_ids"]
        kept = tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]
        cut = sum(len(row) > max_length for row in whole)
        return [np.asarray(row, dtype=np.int32) for row in kept], cut
    backend.no_padding()
    backend.enable_truncation(max_length)
    encodings = backend.encode_batch(texts)
    cut = sum(bool(encoding.overflowing) for encoding in encodings)
    return [np.asarray(encoding.ids, dtype=np.int32) for encoding in encodings], cut


def batches_by_length(
    lengths: NDArray[np.int64], *, token_budget: int, most_rows: int
) -> Iterator[NDArray[np.int64]]:
    """Yield row numbers in batches of like length, longest first.

    Args:
        lengths: (n,) tokens of each text.
        token_budget: padded tokens a batch at most; a batch holds at least one row.
        most_rows: rows a batch at most.
    """
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        width = max(int(lengths[order[start]]), 1)
        rows = min(max(token_budget // width, 1), most_rows)
        yield order[start : start + rows]
        start += rows
