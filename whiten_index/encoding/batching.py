"""One window on its way through the model: batches taken one by one, their embeddings put down."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from whiten_index.artifacts.limits import load_json
from whiten_index.artifacts.manifest import fingerprint, write_json
from whiten_index.encoding.tokenization import TokenWindow
from whiten_index.encoding.transformer import Transformer
from whiten_index.errors import EncoderError, StorageError

_TRIES_OF_ONE_TEXT = 3
_SECONDS_BETWEEN_TRIES = 0.2


@dataclass(frozen=True, slots=True)
class PreparedWindow:
    """Tokenised texts, on the device where they will be encoded.

    Attributes:
        texts: n texts.
        tokens: of the m texts that differ.
        ids: (total,) int32, their token ids on the device.
        offsets: (m + 1,) int64, where each begins, on the device.
        prompt_tokens: tokens at the front of every text that are not pooled.
        hurried: whether an answer is waited for, so that one text may have all cores; texts that
            are not get the same bits in any company, where the model runs without padding on a CPU
            and each lane has one core (as measured: MKL with AVX-512).
        ready: what a device waits for before it uses them, None where there is nothing to wait for.
    """

    texts: Sequence[str]
    tokens: TokenWindow
    ids: Tensor
    offsets: Tensor
    prompt_tokens: int
    hurried: bool
    ready: torch.cuda.Event | None


class Batches:
    """The batches of one window, longest texts first; several threads may take them.

    Attributes:
        embeddings: (m, d) float32 on the device, in the order of the window's tokens.
        padded_tokens: tokens encoded so far, padding counted.
    """

    def __init__(
        self,
        window: PreparedWindow,
        transformer: Transformer,
        budget: TokenBudget,
        *,
        dim: int,
        most: int | None,
        clock: Callable[[], float],
    ) -> None:
        """Cut ``window`` into batches of ``budget`` tokens, or of ``most`` where that is less.

        Args:
            window: tokenised.
            transformer: encodes.
            budget: told how long full batches took while it is being found.
            dim: width d of the embeddings.
            most: tokens a batch, whatever the budget; None for no such limit.
            clock: gives seconds.
        """
        self._window = window
        self._transformer = transformer
        self._budget = budget
        self._most = most
        self._clock = clock
        self._lengths = window.tokens.lengths
        self._lock = threading.Lock()
        self._failures: Counter[int] = Counter()
        self._left = [slice(0, len(self._lengths))] if len(self._lengths) else []
        self.padded_tokens = 0
        self.embeddings = torch.empty(
            (len(self._lengths), dim), dtype=torch.float32, device=transformer.device
        )

    def step(self) -> int | None:
        """Encode one batch and return how many rows it held, None when none is left.

        Raises:
            EncoderError: a single text does not fit into the memory.
        """
        asked = self._budget.ask(self._most)
        rows = self._take(asked)
        if rows is None:
            return None
        finding = self._budget.chosen is None
        started = self._clock()
        tokens = self._tokens_of(rows)
        try:
            self.embeddings[rows] = self._embed(rows)
            if finding:
                _wait_for(self._transformer.device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self._give_back(rows, tokens, error)
            return 0
        width = int(self._lengths[rows.start])
        if finding and (rows.stop - rows.start + 1) * width > asked:
            # Tokens of padding are no work done.
            real = self._real_tokens(rows)
            spent = self._clock() - started
            self._budget.tell(asked, tokens=real, seconds=spent, most=self._most)
        with self._lock:
            self.padded_tokens += tokens
        return int(rows.stop - rows.start)

    def _take(self, asked: int) -> slice | None:
        with self._lock:
            if not self._left:
                return None
            left = self._left.pop()
            rows = max(asked // int(self._lengths[left.start]), 1)
            stop = min(left.start + rows, left.stop)
            if stop < left.stop:
                self._left.append(slice(stop, left.stop))
            return slice(left.start, stop)

    def _give_back(self, rows: slice, tokens: int, error: Exception) -> None:
        """Put the rows of a batch that did not fit back, to be tried with half the budget."""
        device = self._transformer.device
        if rows.stop - rows.start == 1:
            # Other lanes, or other programs, may have held the memory just then.
            with self._lock:
                self._failures[rows.start] += 1
                failures = self._failures[rows.start]
            if failures < _TRIES_OF_ONE_TEXT:
                time.sleep(_SECONDS_BETWEEN_TRIES * failures)
        if self._failures[rows.start] >= _TRIES_OF_ONE_TEXT:
            raise EncoderError(
                f"one text of {tokens} tokens does not fit into the memory of {device}; use a "
                "smaller --max-length, a smaller model or another --device"
            ) from error
        self._budget.halve(tokens)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        with self._lock:
            self._left.append(rows)

    def _tokens_of(self, rows: slice) -> int:
        """Return the tokens that a batch computes, those of padding counted."""
        if self._transformer.packs:
            return self._real_tokens(rows)
        return int((rows.stop - rows.start) * self._lengths[rows.start])

    def _real_tokens(self, rows: slice) -> int:
        offsets = self._window.tokens.offsets
        return int(offsets[rows.stop] - offsets[rows.start])

    def _embed(self, rows: slice) -> Tensor:
        window, transformer = self._window, self._transformer
        skipped = window.prompt_tokens
        if not transformer.packs:
            return transformer.padded(*self._padded(rows), prompt_tokens=skipped)
        start, stop = (int(window.tokens.offsets[row]) for row in (rows.start, rows.stop))
        ids, offsets = window.ids[start:stop], window.offsets[rows.start : rows.stop + 1] - start
        if not window.hurried and len(ids) < transformer.fewest_rows:
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


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that the memory of a device ran out."""
    # The allocators of CPUs and of MPS have no exception of their own.
    told = ("DefaultCPUAllocator", "MPS backend out of memory")
    return isinstance(error, torch.OutOfMemoryError) or any(part in str(error) for part in told)


LADDERS = {
    "cpu": (512, 1024, 2048, 4096, 8192),
    "other": (16_384, 32_768, 65_536, 131_072, 262_144),
}
_ROUNDS = 4
_CLOSE = 0.98


class TokenBudget:
    """The padded tokens of a batch; safe to share between threads.

    Attributes:
        halvings: how often memory ran out.
        thorough: whether every rung was tried before one was chosen, and memory sufficed: only then
            the choice is worth remembering.
    """

    def __init__(self, ladder: Sequence[int], *, known: int | None = None) -> None:
        """Start on a ``ladder`` of rising budgets, or with the one ``known`` to be good."""
        self._lock = threading.Lock()
        self._ladder = list(ladder)
        self._chosen = known
        self._asked = 0
        self._rates: dict[int, list[float]] = {rung: [] for rung in self._ladder}
        self.halvings = 0
        self.thorough = False

    @property
    def chosen(self) -> int | None:
        """The budget settled on, None while it is being found."""
        return self._chosen

    def ask(self, most: int | None = None) -> int:
        """Return the budget of the next batch, ``most`` at most."""
        with self._lock:
            if self._chosen is not None:
                return self._chosen if most is None else min(self._chosen, most)
            rungs = self._rungs(most)
            if not rungs:
                return self._ladder[0] if most is None else most
            self._asked += 1
            return rungs[(self._asked - 1) % len(rungs)]

    def tell(self, budget: int, *, tokens: int, seconds: float, most: int | None = None) -> None:
        """Hear how long a full batch took; when every rung up to ``most`` was heard, choose."""
        with self._lock:
            if self._chosen is not None or budget not in self._rates:
                return
            self._rates[budget].append(tokens / max(seconds, 1e-9))
            rungs = self._rungs(most)
            if any(len(self._rates[rung]) < _ROUNDS for rung in rungs):
                return
            medians = {rung: statistics.median(self._rates[rung]) for rung in rungs}
            good = _CLOSE * max(medians.values())
            self._chosen = min(rung for rung, rate in medians.items() if rate >= good)
            self.thorough = rungs == self._ladder and not self.halvings

    def _rungs(self, most: int | None) -> list[int]:
        return [rung for rung in self._ladder if most is None or rung <= most]

    def halve(self, budget: int) -> None:
        """Hear that a batch of ``budget`` was too much for the memory."""
        with self._lock:
            self.halvings += 1
            # Memory may be short for a moment only: nothing of this is remembered.
            self.thorough = False
            most = max(budget // 2, 1)
            if self._chosen is not None:
                self._chosen = min(self._chosen, most)
                return
            self._ladder = [rung for rung in self._ladder if rung <= most]
            if not self._ladder:
                self._chosen = most


def remembered(facts: Mapping[str, Any]) -> int | None:
    """Return the budget found before for the same model and device, None where none was."""
    try:
        value = load_json(_file(facts).read_bytes())["token_budget"]
    except (OSError, RuntimeError, ValueError, KeyError, TypeError):
        return None
    lowest, highest = LADDERS["cpu"][0], LADDERS["other"][-1]
    # Anything else was not written by ``remember``.
    sane = isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest
    return value if sane else None


def remember(facts: Mapping[str, Any], budget: int) -> None:
    """Keep a budget for later runs on this machine; one that cannot be kept is found again."""
    try:
        path = _file(facts)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, {"token_budget": budget, "facts": dict(facts)})
    except (OSError, RuntimeError, StorageError):
        # RuntimeError: this user has no home.
        return


def _file(facts: Mapping[str, Any]) -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(home) / "whiten-index" / "token-budgets" / f"{fingerprint(dict(facts))}.json"


_MOST_LANES = 16


class Lanes:
    """Calls a step over and over until nothing is left, in one thread or in several.

    Attributes:
        count: how many steps run at once.
        clock: gives the seconds by which batches of one lane are compared.
    """

    def __init__(self, device: torch.device, threads: int | None) -> None:
        """Choose the lanes of a device; ``threads`` of a CPU, None for torch's own choice."""
        on_cpu = device.type == "cpu"
        # None leaves the caller's threads as they are.
        self._callers = threads if on_cpu else None
        threads = threads or torch.get_num_threads()
        self.count = _lanes_for(threads) if on_cpu else 1
        # Cores that each of them has.
        self._threads_each = threads // self.count
        self._lock = threading.Lock()
        # A lane of one thread is timed by what it computed itself, whatever else the machine does.
        alone = on_cpu and self._threads_each == 1
        self.clock: Callable[[], float] = time.thread_time if alone else time.perf_counter
        self._pool: ThreadPoolExecutor | None = None

    def run(
        self,
        step: Callable[[], int | None],
        advance: Callable[[int], None],
        *,
        alone: bool = False,
    ) -> None:
        """Call ``step`` until it returns None.

        Args:
            step: does one batch and returns how many rows it held.
            advance: told these, in the caller's thread; whatever it raises stops the lanes.
            alone: call it in the caller's thread, with all its cores.
        """
        if alone or self.count == 1:
            if self._callers is not None:
                torch.set_num_threads(self._callers)
            while (rows := step()) is not None:
                advance(rows)
        else:
            self._run_threads(step, advance)

    def _run_threads(self, step: Callable[[], int | None], advance: Callable[[int], None]) -> None:
        told: SimpleQueue[int | BaseException | None] = SimpleQueue()
        stop = threading.Event()

        def lane() -> None:
            try:
                while not stop.is_set() and (rows := step()) is not None:
                    told.put(rows)
                told.put(None)
            except BaseException as error:
                told.put(error)

        with self._lock:
            pool = self._start()
        lanes = [pool.submit(lane) for _ in range(self.count)]
        try:
            running = self.count
            while running:
                heard = told.get()
                if isinstance(heard, BaseException):
                    raise heard
                if heard is None:
                    running -= 1
                else:
                    advance(heard)
        finally:
            stop.set()
            for each in lanes:
                each.result()

    def _start(self) -> ThreadPoolExecutor:
        """Return the threads, each with its share of the cores; the caller's keep theirs."""
        if self._pool is None:
            callers = torch.get_num_threads()
            self._pool = ThreadPoolExecutor(
                self.count, "encode", _take_threads, (self._threads_each,)
            )
            # The barrier makes every thread start now; torch's default for threads to come, which
            # each of them changed, is set back after it.
            barrier = threading.Barrier(self.count + 1)
            for _ in range(self.count):
                self._pool.submit(barrier.wait)
            barrier.wait()
            torch.set_num_threads(callers)
        return self._pool


def _lanes_for(threads: int) -> int:
    """Return how many lanes leave the fewest threads over: 16 at most, and half that at least."""
    most = min(threads, _MOST_LANES)
    counts = range((most + 1) // 2, most + 1)
    return max(counts, key=lambda count: (count * (threads // count), count))


def _take_threads(count: int) -> None:
    torch.set_num_threads(count)
    # torch settles a thread's number when the thread first asks for it: before it is set back.
    torch.get_num_threads()
