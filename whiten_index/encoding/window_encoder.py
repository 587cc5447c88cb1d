"""Windows of texts in, embeddings out: what every encoder has. Importing it loads no torch."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.prefetch import overlapped
from whiten_index.encoding.spec import Spec
from whiten_index.encoding.tokenization import TokenWindow
from whiten_index.errors import ConfigError

# Larger windows pad no less, and keep a GPU waiting for the first one to be tokenised: of 20,000
# texts, windows of 16,384 encoded 0.84 of the texts a second (H200).
WINDOW_ROWS = 8_192


@dataclass(frozen=True, slots=True)
class Encoded:
    """Embeddings of n texts."""

    embeddings: NDArray[np.float32]  # (n, d), in the order of the texts
    truncated: NDArray[np.bool_]  # (n,), True for a text longer than the token limit
    known: int  # texts that an interrupted run had encoded; the rest of the counts is without them
    tokens: int  # encoded, padding not counted, identical texts once
    padded_tokens: int  # the same with padding
    distinct: int  # number of different texts, which alone were encoded


@dataclass(frozen=True, slots=True)
class TextWindow:
    """Texts to encode: text i is number ``places[i]`` (n,) of the m different ones."""

    texts: Sequence[str]
    places: NDArray[np.int64]
    queries: bool
    distinct: Sequence[str] = ()  # without tokens
    tokens: TokenWindow | None = None
    inputs: Any = None  # tokens where the model takes them
    # (m', d), of the first different texts, from an interrupted run.
    known: NDArray[np.float32] | tuple[()] = ()


class WindowEncoder(ABC):
    """An encoder of windows of texts, here or behind an API: each different text once.

    Attributes:
        spec: identity of the encoder.
    """

    spec: Spec
    window_rows = WINDOW_ROWS  # texts that are encoded together
    requests_at_once = 1  # at the start, of an API
    longest_first = False  # texts of similar length make batches with little padding

    @property
    def dim(self) -> int:
        """Width d of the embeddings."""
        return self.spec.dim

    @property
    @abstractmethod
    def runtime(self) -> dict[str, str]:
        """Versions of the libraries that compute embeddings, and names of how."""

    @property
    def note(self) -> str | None:
        """Note for the user at the end of an encoding; None without any."""
        return None

    def charge(self, size: int) -> tuple[int | None, float | None]:
        """Return about how many tokens and how much money ``size`` bytes of texts cost.

        None where nothing is charged, or the price is unknown.
        """
        del size
        return None, None

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings of queries, (n, d): with the model's query prompt, if any."""
        return self.collect(self.run(self.window(listed(texts), queries=True))).embeddings

    @abstractmethod
    def count_tokens(self, texts: Sequence[str]) -> int:
        """Return how many tokens queries have together, without those that are cut."""

    def prepare(self, texts: Sequence[str]) -> TextWindow:
        """Make a window of documents ready.

        ``prepare``, ``run`` and ``collect`` may overlap for different windows, in one thread each.
        """
        return self.window(listed(texts), queries=False)

    def window(self, texts: Sequence[str], *, queries: bool) -> TextWindow:
        """Find the different texts."""
        distinct = list(dict.fromkeys(texts))
        if self.longest_first:
            distinct.sort(key=len, reverse=True)
        number = {text: place for place, text in enumerate(distinct)}
        places: Any = np.fromiter((number[text] for text in texts), np.int64, len(texts))
        return TextWindow(texts, places, queries, distinct)

    @abstractmethod
    def run(
        self,
        prepared: TextWindow,
        *,
        advance: Callable[[int], None] | None = None,
        stopped: Callable[[NDArray[np.float32]], None] | None = None,
    ) -> Any:
        """Encode a prepared window; this may return before the embeddings are there.

        A run that is stopped gives ``stopped`` what may be ``known`` to another one.
        """

    @abstractmethod
    def collect(self, ran: Any) -> Encoded:
        """Return the embeddings of a window in the order of its texts."""

    def stop(self, ran: Any) -> None:  # noqa: ARG002
        """Let a window that is under way end soon."""
        return

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings of documents, (n, d) float32, unnormalised.

        Texts are sorted by length inside windows of 8,192, and come back in order.

        Raises:
            EncoderError: the model gives NaN or infinity.
        """
        texts = listed(texts)
        embeddings = np.empty((len(texts), self.dim), dtype=np.float32)
        filled = 0
        for block in self.stream([texts]):
            embeddings[filled : filled + len(block)] = block
            filled += len(block)
        return embeddings

    def stream(
        self, chunks: Iterable[Sequence[str]], *, advance: Callable[[int], None] | None = None
    ) -> Iterator[NDArray[np.float32]]:
        """Yield the embeddings of documents as (m, d) float32 blocks; see ``stream_windows``."""
        for encoded in self.stream_windows(chunks, advance=advance):
            yield encoded.embeddings

    def stream_windows(
        self, chunks: Iterable[Sequence[str]], *, advance: Callable[[int], None] | None = None
    ) -> Iterator[Encoded]:
        """Yield the embeddings of an unlimited stream of documents, window by window, in order.

        Chunks are joined or split to windows of 8,192 texts. Reading and tokenising overlap
        with encoding.

        Args:
            chunks: lists of texts, drawn in another thread.
            advance: called with the number of texts of each batch.
        """
        texts = chain.from_iterable(map(listed, chunks))
        yield from overlapped(
            iter(lambda: list(islice(texts, self.window_rows)), []),
            read=list,
            prepare=self.prepare,
            work=functools.partial(self.run, advance=advance),
            finish=self.collect,
            stop=self.stop,
        )

    def encode_window(self, texts: Sequence[str]) -> Encoded:
        """Encode a window of documents, sorted by length inside, in their order outside."""
        return self.collect(self.run(self.prepare(texts)))


def listed(texts: Sequence[str]) -> Sequence[str]:
    """Return texts as a list; anything else raises a ConfigError."""
    if isinstance(texts, str):
        raise ConfigError("encode takes a list of texts; put the one text in brackets")
    listed = texts if isinstance(texts, list) else list(texts)
    for text in listed:
        if not isinstance(text, str):
            raise ConfigError(f"encode takes texts, and {text!r:.60} is none; convert or drop it")
    return listed
