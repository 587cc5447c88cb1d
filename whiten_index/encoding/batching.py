"""Encoders of this machine: a window cut into batches by a token budget. This loads no torch."""

import sys
import threading
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.files import is_out_of_memory, unforeseen
from whiten_index.encoding.spec import EncoderSpec
from whiten_index.encoding.tokenization import (
    read_part,
    require_known_tokens,
    require_room,
    tokenize,
)
from whiten_index.encoding.window_encoder import Encoded, TextWindow, WindowEncoder
from whiten_index.errors import RefusedTextError, StorageError


class BatchEncoder(WindowEncoder):
    """An encoder that is given one batch of texts or tokens after another.

    A batch has ``batch_tokens``, those of padding counted (texts for a model whose tokens are not
    known), halved whenever memory runs out.
    """

    spec: EncoderSpec
    batch_tokens: int
    packs = False  # whether texts are joined end to end, so that nothing is padded
    pads = True  # whether a batch of queries is filled up to its longest text
    shortest = 0.8  # length of a batch's shortest document, as a share of its longest
    device: Any = "cpu"
    vocabulary: int | None = None  # tokens that the model knows

    def __init__(self, spec: EncoderSpec, tokenizer: Any) -> None:
        self.spec, self._tokenizer = spec, tokenizer
        self.truncation_side = getattr(tokenizer, "truncation_side", "right")
        self.prompts = spec.document_prompt, spec.query_prompt
        for prompt in self.prompts if tokenizer is not None else ():
            require_room(tokenizer, spec, prompt)

    def window(self, texts: Sequence[str], *, queries: bool) -> TextWindow:
        """Tokenise texts."""
        if queries:
            how: Any = {"max_length": self.spec.max_length, "side": self.truncation_side}
            texts = [read_part(text, **how) for text in texts]
        if self._tokenizer is None:
            return super().window(texts, queries=queries)
        prompted = [self.prompts[queries] + text for text in texts]
        tokens = tokenize(self._tokenizer, prompted, max_length=self.spec.max_length)
        longest = int(tokens.lengths.max(initial=0))
        require_known_tokens(tokens.ids, longest, self.spec, self.vocabulary)
        return TextWindow(texts, tokens.places, queries, tokens=tokens)

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Return how many tokens queries have together, without those that are cut."""
        window = self.window(texts, queries=True)
        return 0 if window.tokens is None else int(window.tokens.lengths[window.places].sum())

    def run(
        self,
        prepared: TextWindow,
        *,
        advance: Callable[[int], None] | None = None,
        stopped: Callable[[NDArray[np.float32]], None] | None = None,
    ) -> "Batches":
        """Encode a prepared window; Ctrl-C gives ``stopped`` what is done."""
        batches, tell = Batches(prepared, self), advance or (lambda _: None)
        try:
            tell(len(prepared.known))
            self._drive(batches, tell)
            # Texts that repeat others.
            tell(len(prepared.texts) - len(batches.embeddings))
        except KeyboardInterrupt:
            if stopped is not None and len(found := batches.finished()):
                stopped(self.host(found))
            raise
        return self.ran(batches)

    def host(self, embeddings: Any) -> NDArray[np.float32]:
        """Return embeddings as an array."""
        return np.asarray(embeddings)

    def ran(self, batches: "Batches") -> "Batches":
        """Return batches that are done, with embeddings that are arrays or will be."""
        return batches

    def room(self, window: TextWindow, count: int) -> Any:
        """Return an array or tensor for embeddings (count, d), with those that are known."""
        room = np.empty((count, self.dim), np.float32)
        room[: len(window.known)] = np.reshape(window.known, (-1, self.dim))
        return room

    @abstractmethod
    def embed(self, window: TextWindow, rows: slice) -> Any:
        """Return the embeddings of some of the different texts, as one batch."""

    def _drive(self, batches: "Batches", advance: Callable[[int], None]) -> None:
        while (rows := batches.step()) is not None:
            advance(rows)

    def collect(self, ran: "Batches") -> Encoded:
        """Return the embeddings of a window in the order of its texts."""
        if ran.arrived is not None:
            ran.arrived()
        window, found = ran.window, ran.embeddings
        tokens, places, first = window.tokens, window.places, len(window.known)
        finite = np.asarray(np.isfinite(found).all(axis=1))
        if not finite.all():
            broken = window.texts[int(np.argmin(finite[places]))]
            raise RefusedTextError(
                f"model {self.spec.model} in {self.spec.dtype} gives NaN or infinity for "
                f"{broken[:60]!r}; use "
                f"{'another model' if self.spec.dtype == 'float32' else '--dtype float32'}",
                broken,
            )
        return Encoded(
            embeddings=found[places],
            truncated=np.zeros(len(places), np.bool_) if tokens is None else tokens.truncated,
            known=int((places < first).sum()),
            tokens=0 if tokens is None else len(tokens.ids) - int(tokens.offsets[first]),
            padded_tokens=0 if tokens is None else ran.padded_tokens,
            distinct=len(found),
        )


class Batches:
    """Batches of one window, longest texts first; several threads may take them."""

    def __init__(self, window: TextWindow, encoder: BatchEncoder) -> None:
        """Cut ``window`` into batches of the encoder's tokens, or of ``most`` if that is less."""
        self.window, self._encoder = window, encoder
        self.most: int | None = None
        tokens, ones = window.tokens, np.ones(len(window.distinct), np.int64)
        self.lengths = ones if tokens is None else tokens.lengths
        self._lock = threading.Lock()
        count, first = len(self.lengths), len(window.known)
        self._left = [slice(first, count)] if first < count else []
        self._done = np.arange(count + 1) < first
        self.padded_tokens = 0
        self.out_of_memory = 0  # batches that were tried again in halves
        self.embeddings = encoder.room(window, count)
        self.arrived: Callable[[], None] | None = None  # waits for the device

    def step(self) -> int | None:
        """Encode one batch and return its number of rows, None at the end."""
        rows = self._take()
        if rows is None:
            return None
        lengths = self.lengths[rows]
        tokens = int(lengths.sum() if self._encoder.packs else lengths[0] * len(lengths))
        try:
            self.embeddings[rows] = self._encoder.embed(self.window, rows)
        except Exception as error:
            if is_out_of_memory(error):
                self._requeue(rows, tokens, error)
                return 0
            if (of_system := unforeseen(error, step="encode")) is not None:
                raise of_system from error
            raise
        with self._lock:
            self.padded_tokens += tokens
            self._done[rows] = True
        return int(rows.stop - rows.start)

    def finished(self) -> Any:
        """Return the embeddings of the first rows, up to the first one that has none yet."""
        return self.embeddings[: self._done.argmin()]

    def _take(self) -> slice | None:
        most = self._encoder.batch_tokens
        asked = most if self.most is None else min(most, self.most)
        mixed = self.window.queries and self._encoder.pads
        with self._lock:
            if not self._left:
                return None
            left = self._left.pop()
            longest = int(self.lengths[left.start])
            least = 0.0 if mixed else longest * self._encoder.shortest
            shorter = int(np.searchsorted(self.lengths[::-1], least))
            rows = max(asked // longest, 1)
            stop = min(left.start + rows, left.stop, len(self.lengths) - shorter)
            if stop < left.stop:
                self._left.append(slice(stop, left.stop))
            return slice(left.start, stop)

    def _requeue(self, rows: slice, tokens: int, error: Exception) -> None:
        """Put the rows of a batch that did not fit back, to be tried with half the budget."""
        if rows.stop - rows.start == 1:
            raise StorageError(
                f"one text of {tokens} tokens does not fit into the memory of "
                f"{self._encoder.device}, which is out of memory; use a smaller --max-length, a "
                "smaller model or another --device"
            ) from error
        if (torch := sys.modules.get("torch")) is not None:
            torch.cuda.empty_cache()
        with self._lock:
            self._left.append(rows)
            self.out_of_memory += 1
            self._encoder.batch_tokens = min(self._encoder.batch_tokens, max(tokens // 2, 1))
