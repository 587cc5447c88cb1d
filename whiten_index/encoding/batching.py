"""Batches: a window cut by a token budget, and the threads that encode them.

On a CPU several threads encode a batch each. Two batches at once on one core each take 7 to 13 %
less time than one batch at a time on two cores (MiniLM, 2 cores, measured): no core waits for the
others after every matrix product.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from whiten_index.encoding.tokenization import TokenWindow
from whiten_index.errors import EncoderError

if TYPE_CHECKING:
    from whiten_index.encoding.transformer import Transformer


@dataclass(frozen=True, slots=True)
class PreparedWindow:
    """Tokenised texts, on the device where they will be encoded.

    With ``low_latency`` one text may use all cores. Otherwise embeddings do not depend on how texts
    are batched, if the model runs without padding on a CPU with one core a thread (measured: MKL
    with AVX-512 and AVX2).
    """

    texts: Sequence[str]
    tokens: TokenWindow
    ids: Tensor  # of the tokens, on the device
    offsets: Tensor
    prompt_tokens: int  # at the front of every text, not pooled
    low_latency: bool
    ready: torch.cuda.Event | None  # the device waits for it first
    # (m, d), of the first m distinct texts, which an interrupted run had encoded.
    known: NDArray[np.float32] | tuple[()] = ()

    @property
    def places(self) -> NDArray[np.int64]:
        """(n,), the number of each text among the distinct ones."""
        return self.tokens.places


class Batches:
    """Batches of one window, longest texts first; several threads may take them.

    ``embeddings`` (m, d) float32 on the device are in the order of the window's tokens.
    """

    def __init__(
        self, window: PreparedWindow, transformer: "Transformer", *, dim: int, most: int | None
    ) -> None:
        """Cut ``window`` into the batches of ``transformer``, or of ``most`` tokens if less."""
        self._window = window
        self._transformer = transformer
        self._most = most
        self._lengths = window.tokens.lengths
        self._lock = threading.Lock()
        count, first = len(self._lengths), len(window.known)
        self._left = [slice(first, count)] if first < count else []
        self._done = np.arange(count + 1) < first
        self.padded_tokens = self.out_of_memory = 0
        self.embeddings = torch.empty((count, dim), dtype=torch.float32, device=transformer.device)
        self.embeddings[:first] = torch.tensor(window.known).view(first, dim)

    def step(self) -> int | None:
        """Encode one batch and return its number of rows, None at the end."""
        rows = self._take()
        if rows is None:
            return None
        offsets, width = self._window.tokens.offsets, int(self._lengths[rows.start])
        real, full = int(offsets[rows.stop] - offsets[rows.start]), (rows.stop - rows.start) * width
        tokens = real if self._transformer.packs else full
        try:
            self.embeddings[rows] = self._embed(rows)
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            self._requeue(rows, tokens, error)
            return 0
        with self._lock:
            self.padded_tokens += tokens
            self._done[rows] = True
        return int(rows.stop - rows.start)

    def finished(self) -> NDArray[np.float32]:
        """Return the embeddings of the first rows, up to the first one that has none yet."""
        return self.embeddings[: self._done.argmin()].cpu().numpy()

    def _take(self) -> slice | None:
        most = self._transformer.batch_tokens
        asked = most if self._most is None else min(most, self._most)
        with self._lock:
            if not self._left:
                return None
            left = self._left.pop()
            rows = max(asked // int(self._lengths[left.start]), 1)
            stop = min(left.start + rows, left.stop)
            if self._transformer.one_length:
                shorter = np.searchsorted(self._lengths[::-1], self._lengths[left.start])
                stop = min(stop, len(self._lengths) - int(shorter))
            if stop < left.stop:
                self._left.append(slice(stop, left.stop))
            return slice(left.start, stop)

    def _requeue(self, rows: slice, tokens: int, error: Exception) -> None:
        """Put the rows of a batch that did not fit back, to be tried with half the budget."""
        device = self._transformer.device
        if rows.stop - rows.start == 1:
            raise EncoderError(
                f"one text of {tokens} tokens does not fit into the memory of {device}; use a "
                "smaller --max-length, a smaller model or another --device"
            ) from error
        if device.type == "cuda":
            torch.cuda.empty_cache()
        half = max(tokens // 2, 1)
        with self._lock:
            self._left.append(rows)
            self.out_of_memory += 1
            self._transformer.batch_tokens = min(self._transformer.batch_tokens, half)

    def _embed(self, rows: slice) -> Tensor:
        window, transformer = self._window, self._transformer
        skipped = window.prompt_tokens
        if not transformer.packs:
            return transformer.padded(*self._padded(rows), prompt_tokens=skipped)
        start, stop = (int(window.tokens.offsets[row]) for row in (rows.start, rows.stop))
        ids, offsets = window.ids[start:stop], window.offsets[rows.start : rows.stop + 1] - start
        if not window.low_latency and len(ids) < transformer.fewest_rows:
            # Texts of one token, which have a place in every model.
            filler = torch.arange(len(ids) + 1, transformer.fewest_rows + 1, device=ids.device)
            ids, offsets = pad(ids, (0, len(filler))), torch.cat([offsets, filler])
        longest, offsets = int(self._lengths[rows.start]), offsets.int()
        embeddings = transformer.packed(
            ids, offsets.diff(), offsets, longest, prompt_tokens=skipped
        )
        return embeddings[: rows.stop - rows.start]

    def _padded(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Return token ids and mask, (r, longest); no mask where all are equally long."""
        count, width = rows.stop - rows.start, int(self._lengths[rows.start])
        window = self._window
        if self._lengths[rows.stop - 1] == width:
            start = int(window.tokens.offsets[rows.start])
            return window.ids[start : start + count * width].view(count, width).long(), None
        offsets = window.offsets[rows.start : rows.stop + 1]
        positions = torch.arange(width, device=window.ids.device)
        mask = positions < offsets.diff().unsqueeze(1)
        places = (offsets[:-1].unsqueeze(1) + positions).clamp_(max=len(window.ids) - 1)
        ids = window.ids[places].long().masked_fill_(~mask, self._transformer.pad)
        return ids, mask.long()


def _is_out_of_memory(error: BaseException) -> bool:
    # The allocators of CPUs and of MPS raise a plain RuntimeError.
    messages = ("DefaultCPUAllocator", "MPS backend out of memory")
    return isinstance(error, torch.OutOfMemoryError) or any(m in str(error) for m in messages)


_MOST_THREADS = 16


class InferenceThreads:
    """Threads that encode batches: several on a CPU, the caller's on a device."""

    def __init__(self, device: torch.device, threads: int | None, *, alone: bool = False) -> None:
        """Choose them, of ``threads`` or torch's own number; ``alone``: one batch at a time."""
        on_cpu = device.type == "cpu"
        self._callers = threads if on_cpu else None
        threads = threads or torch.get_num_threads()
        # The number of workers, 8 to 16 where possible, that leaves the fewest cores over.
        most = min(threads, _MOST_THREADS)
        counts = range((most + 1) // 2, most + 1) if on_cpu and not alone else [1]
        self.count = max(counts, key=lambda count: (count * (threads // count), count))
        self._threads_each = threads // self.count
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def run(
        self, step: Callable[[], int | None], advance: Callable[[int], None], *, alone: bool = False
    ) -> None:
        """Call ``step`` until it returns None; ``advance`` gets each result in this thread.

        An exception of ``advance`` stops the threads. With ``alone``, the caller's thread does all
        steps with all cores.
        """
        if alone or self.count == 1:
            if self._callers is not None:
                torch.set_num_threads(self._callers)
            while (rows := step()) is not None:
                advance(rows)
            return
        results: SimpleQueue[int | BaseException | None] = SimpleQueue()
        stop = threading.Event()

        def work() -> None:
            try:
                while not stop.is_set() and (rows := step()) is not None:
                    results.put(rows)
                results.put(None)
            except BaseException as error:
                results.put(error)

        with self._lock:
            pool = self._start()
        working = [pool.submit(work) for _ in range(self.count)]
        try:
            running = self.count
            while running:
                result = results.get()
                if isinstance(result, BaseException):
                    raise result
                if result is None:
                    running -= 1
                else:
                    advance(result)
        finally:
            stop.set()
            for each in working:
                each.result()

    def _start(self) -> ThreadPoolExecutor:
        """Return the pool, each thread with its share of the cores."""
        if self._pool is None:
            callers = torch.get_num_threads()
            self._pool = ThreadPoolExecutor(
                self.count, "encode", _take_threads, (self._threads_each,)
            )
            # Every thread starts now, since each changes torch's default for later threads, which
            # is then set back.
            barrier = threading.Barrier(self.count + 1)
            for _ in range(self.count):
                self._pool.submit(barrier.wait)
            barrier.wait()
            torch.set_num_threads(callers)
        return self._pool


def _take_threads(count: int) -> None:
    torch.set_num_threads(count)
    # torch fixes a thread's number when the thread first asks for it.
    torch.get_num_threads()
