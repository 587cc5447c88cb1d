"""Tokenise a window of texts: each different text once, sorted by length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from whiten_index.overlap import ahead

_CHUNK = 1024


@dataclass(frozen=True, slots=True)
class TokenWindow:
    """The tokens of n texts, of which m differ; longest first, so that neighbours pad little.

    Attributes:
        ids: (total,) int32, the tokens of the m texts one after the other.
        offsets: (m + 1,) int64, where each of the m begins.
        places: (n,) int64, which of the m each of the n texts is.
        truncated: (n,) bool, whether a text was cut to the length limit.
    """

    ids: NDArray[np.int32]
    offsets: NDArray[np.int64]
    places: NDArray[np.int64]
    truncated: NDArray[np.bool_]

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(m,) tokens of each different text, falling."""
        return np.diff(self.offsets)

    def __len__(self) -> int:
        return len(self.places)


def tokenize(tokenizer: Any, texts: Sequence[str], *, max_length: int) -> TokenWindow:
    """Tokenise texts, cutting each to ``max_length`` tokens.

    Args:
        tokenizer: a transformers tokenizer, fast or slow.
        texts: n texts.
        max_length: tokens a text at most, special ones included.
    """
    first: dict[str, int] = {}
    seen = [first.setdefault(text, len(first)) for text in texts]
    ids, lengths, cut = _tokens(tokenizer, list(first), max_length)
    order = np.argsort(-lengths, kind="stable")
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths[order], out=offsets[1:])
    starts = np.cumsum(lengths) - lengths
    # Where each token of the sorted texts stood before.
    source = np.arange(len(ids)) + np.repeat(starts[order] - offsets[:-1], lengths[order])
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order))
    rows = np.asarray(seen, dtype=np.int64)
    return TokenWindow(ids[source], offsets, places[rows], cut[rows])


def _tokens(
    tokenizer: Any, texts: list[str], max_length: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]]:
    """Return token ids end to end, tokens of each text, and which were cut."""
    ids: list[NDArray[np.int32]] = [np.empty(0, dtype=np.int32)]
    lengths: list[int] = []
    cut: list[bool] = []
    # A text without any token, such as one of characters unknown to the model, is one of padding.
    empty = [int(tokenizer.pad_token_id or 0)]
    # Few enough texts at a time that the tokenizer's bulky objects stay small. Taking these apart
    # holds Python's lock, which tokenising the next chunk does not need.
    chunks = (texts[start : start + _CHUNK] for start in range(0, len(texts), _CHUNK))
    with closing(ahead(chunks, _tokenizing(tokenizer, max_length))) as tokenized:
        for chunk in tokenized:
            rows = [text.ids or empty for text in chunk]
            counts = [len(row) for row in rows]
            lengths += counts
            ids.append(np.fromiter(chain.from_iterable(rows), np.int32, sum(counts)))
            cut += [bool(text.overflowing) for text in chunk]
    return np.concatenate(ids), np.array(lengths, np.int64), np.array(cut, np.bool_)


class _Tokens(NamedTuple):
    """What a slow tokenizer makes of a text, in the form of a fast one's."""

    ids: list[int]
    overflowing: bool


def _tokenizing(tokenizer: Any, max_length: int) -> Callable[[list[str]], Sequence[Any]]:
    """Return a function that tokenises texts; each result has ``ids`` and ``overflowing``."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_padding()
        backend.enable_truncation(max_length, direction=tokenizer.truncation_side)
        fast: Callable[[list[str]], Sequence[Any]] = backend.encode_batch_fast
        return fast

    def slowly(texts: list[str]) -> list[_Tokens]:
        whole = tokenizer(texts, truncation=False, verbose=False)["input_ids"]
        kept = tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]
        return [_Tokens(k, len(w) > max_length) for k, w in zip(kept, whole, strict=True)]

    return slowly
