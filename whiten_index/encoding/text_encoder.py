"""Encoders that take texts, not tokens: each different text once. Importing it loads no torch."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.encoding.window_encoder import Encoded, WindowEncoder, listed
from whiten_index.errors import EncoderError

_BATCH_TEXTS = 64


@dataclass(frozen=True, slots=True)
class TextWindow:
    """Texts to encode: text i is number ``places[i]`` (n,) of the ``distinct`` ones."""

    texts: Sequence[str]
    distinct: list[str]
    places: NDArray[np.int64]
    queries: bool
    # (m, d), of the first distinct texts, from an interrupted run.
    known: NDArray[np.float32] | tuple[()] = ()


@dataclass(slots=True)
class EmbeddedTexts:
    """Embeddings (m, d) of distinct texts, tokens of all, and which (m,) were cut."""

    embeddings: NDArray[np.float32]
    tokens: int
    padded_tokens: int
    truncated: NDArray[np.bool_]


@dataclass(slots=True)
class TextRun:
    """A window whose distinct texts are encoded."""

    window: TextWindow
    found: EmbeddedTexts
    out_of_memory: int = 0


class TextEncoder(WindowEncoder):
    """An encoder that is given each different text once."""

    longest_first = False  # texts of similar length make batches with little padding

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings of queries, (n, d): with the model's query prompt, if any."""
        return self.collect(self.run(self._window(texts, queries=True))).embeddings

    def prepare(self, texts: Sequence[str]) -> TextWindow:
        """Find the distinct texts of a window of documents."""
        return self._window(texts, queries=False)

    def _window(self, texts: Sequence[str], *, queries: bool) -> TextWindow:
        texts = listed(texts)
        distinct = list(dict.fromkeys(texts))
        if self.longest_first:
            distinct.sort(key=len, reverse=True)
        number = {text: place for place, text in enumerate(distinct)}
        places: Any = np.fromiter((number[text] for text in texts), np.int64, len(texts))
        return TextWindow(texts, distinct, places, queries)


class BatchEncoder(TextEncoder):
    """An encoder of this machine that is given one batch of texts after another."""

    longest_first = True

    @abstractmethod
    def _embed(self, texts: Sequence[str], *, queries: bool) -> EmbeddedTexts:
        """Encode one batch."""

    def run(
        self,
        prepared: TextWindow,
        *,
        advance: Callable[[int], None] | None = None,
        stopped: Callable[[NDArray[np.float32]], None] | None = None,
    ) -> TextRun:
        """Encode a prepared window; Ctrl-C gives ``stopped`` what is done."""
        texts, done = prepared.distinct, len(prepared.known)
        found = EmbeddedTexts(
            np.empty((len(texts), self.dim), np.float32), 0, 0, np.zeros(len(texts), np.bool_)
        )
        found.embeddings[:done] = np.reshape(prepared.known, (done, self.dim))
        rows, reported = len(prepared.texts), 0
        try:
            while done < len(texts):
                batch = slice(done, done + _BATCH_TEXTS)
                some = self._embed(texts[batch], queries=prepared.queries)
                found.embeddings[batch], found.truncated[batch] = some.embeddings, some.truncated
                found.tokens += some.tokens
                found.padded_tokens += some.padded_tokens
                done = min(batch.stop, len(texts))
                if advance is not None:
                    now = done * rows // len(texts)
                    advance(now - reported)
                    reported = now
        except KeyboardInterrupt:
            if stopped is not None and done > len(prepared.known):
                stopped(found.embeddings[:done])
            raise
        return TextRun(prepared, found)

    def collect(self, ran: TextRun) -> Encoded:
        """Return the embeddings of a window in the order of its texts."""
        window, found = ran.window, ran.found
        finite = np.asarray(np.isfinite(found.embeddings).all(axis=1))
        if not finite.all():
            raise EncoderError(
                f"{self.spec.described} gives NaN or infinity for "
                f"{window.distinct[int(np.argmin(finite))][:60]!r}; use another model"
            )
        return Encoded(
            embeddings=found.embeddings[window.places],
            truncated=found.truncated[window.places],
            known=int((window.places < len(window.known)).sum()),
            tokens=found.tokens,
            padded_tokens=found.padded_tokens,
            distinct=len(window.distinct),
        )
