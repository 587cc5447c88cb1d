"""An encoder behind an API that speaks OpenAI's protocol: many requests at once, and their cost."""

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from whiten_index.encoding.canary import CANARY, encode_canary, is_alike, require_alike
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.endpoint import Endpoint, TooMuchError
from whiten_index.encoding.spec import RemoteSpec
from whiten_index.encoding.window_encoder import Encoded, TextWindow, WindowEncoder, listed
from whiten_index.errors import EncoderError

_LOG = logging.getLogger(__name__)
# A request has so many texts and tokens at most: OpenAI takes 2,048 and 300,000, others 32 texts,
# and then the half is tried.
_MOST_TEXTS, _MOST_TOKENS = 128, 16_384
_TOKENS_A_BYTE = 1 / 3  # until an answer says how many
_FIRST_AT_ONCE, _MOST_AT_ONCE, _BUILT_AHEAD = 8, 64, 4
_LEAST_ROUNDS, _MOST_ROUNDS = 8, 64
# A request that takes longer waits in a queue, which more requests make no shorter.
_LONG_SECONDS = 10
# What came of a window is saved after so many texts, if that takes a fifth of the time at most: a
# process that is killed loses little, and segments stay large.
_SAVED_EVERY, _SAVING_SHARE = 1024, 0.2
_ASKED_AGAIN, _MOST_AGAIN = 64, 32  # of so many known texts one, and so many at most
_STOPPING_SECONDS = 20.0


@dataclass(slots=True, eq=False, weakref_slot=True)
class RemoteRun:
    """A window whose requests are sent, or being sent; ``stops`` is where each one's texts end."""

    window: TextWindow
    embeddings: NDArray[np.float32]
    stops: list[int]
    save: Callable[[NDArray[np.float32]], None] | None  # what came, in order
    stopped: threading.Event = field(default_factory=threading.Event)
    until: float = math.inf  # when tries in vain end, once it is stopped
    requests: list[Future[int]] = field(default_factory=list)  # tokens of each
    done: int = 0  # requests, from the first on, whose answers came
    out_of_memory: int = 0
    thread: int = field(default_factory=threading.get_ident)  # that sends them

    def look(self) -> int:
        """Return how many texts have come in order, and raise the error of the next one."""
        while self.done < len(self.requests) and self.requests[self.done].done():
            self.requests[self.done].result()
            self.done += 1
        return self.stops[self.done]

    def stop(self, *, within: float) -> None:
        """Let tries in vain end after so many seconds, and longer pauses now."""
        self.until = min(self.until, time.monotonic() + within)
        self.stopped.set()

    def pause(self, seconds: float) -> bool:
        """Wait, and return whether there should be no more tries."""
        end = time.monotonic() + seconds
        if self.stopped.wait(seconds):
            if end > self.until:
                return True
            time.sleep(max(end - time.monotonic(), 0.0))
        return False

    def rescue(self, saved: int) -> None:
        """Wait for what is under way, which is paid for, and save what came."""
        self.stop(within=0)
        wait(self.requests)
        with contextlib.suppress(Exception):
            self.look()
        if self.save is not None and (here := self.stops[self.done]) > saved:
            self.save(self.embeddings[:here])


class _Gate:
    """Limit of the requests in flight: one more for each success, one less for each 429.

    After a 429 it grows only after eight rounds, and after twice as many each time that it grew too
    far. A thread holds a place from the sending of
    its request to the end of the answer; requests are built and answers read outside, so some more
    threads than places are at work.
    """

    def __init__(self) -> None:
        self.limit, self._good, self._rounds, self._grew = _FIRST_AT_ONCE, 0, 0, False
        self._in_flight = self._at_work = 0
        self._changed = threading.Condition()
        self._held = threading.local()

    def admit(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._at_work < self.limit + _BUILT_AHEAD)
            self._at_work += 1

    def finish(self) -> None:
        self.leave()
        with self._changed:
            self._at_work -= 1
            self._changed.notify_all()

    def enter(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._in_flight < self.limit)
            self._in_flight += 1
        self._held.place, self._held.since = True, time.monotonic()

    def leave(self) -> None:
        if getattr(self._held, "place", False):
            self._held.place = False
            with self._changed:
                self._in_flight -= 1
                self._changed.notify_all()

    def shrink(self) -> None:
        """Count an answer that there were too many requests."""
        with self._changed:
            self.limit, self._good = max(self.limit - 1, 1), 0
            self._rounds = max(min(self._rounds << self._grew, _MOST_ROUNDS), _LEAST_ROUNDS)
            self._grew = False

    def grow(self) -> None:
        """Count the answer to this thread's last request."""
        seconds = time.monotonic() - self._held.since
        with self._changed:
            self._good += 1
            wanted = max(self._rounds * self.limit, 1)
            if self._good >= wanted and seconds < _LONG_SECONDS:
                self.limit, self._good = min(self.limit + 1, _MOST_AT_ONCE), 0
                self._grew = True
                self._changed.notify_all()


class _Meter:
    """Tokens and money; no request is sent that could cost more than is left."""

    def __init__(self, price: float | None, most: float | None, canary: int) -> None:
        self.price, self._most = price, most / price * 1e6 if price and most is not None else None
        self.tokens = self.bytes = self.requests = self.repeated = 0
        # Tokens that may have been charged too, first those of the canary, now and at the next
        # check; and those of requests under way.
        self._canary, self._lost, self._held = canary, 2 * canary, 0
        self._changed = threading.Condition()

    @property
    def a_byte(self) -> float:
        """Tokens of a byte of text."""
        return self.tokens / self.bytes if self.bytes else _TOKENS_A_BYTE

    def cost(self, tokens: float) -> float | None:
        return None if self.price is None else tokens * self.price / 1e6

    def hold(self, most: int) -> None:
        """Set ``most`` tokens aside, once those under way leave room for them.

        Raises:
            EncoderError: there is no room, and nothing under way that could leave any.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._fits(most) or not self._held)
            self._require(most)
            self._held += most

    def repeat(self, most: int, *, charged: bool) -> None:
        """Count a try in vain, that may have been ``charged``; raises like ``hold``."""
        with self._changed:
            self.repeated += 1
            self._lost += most if charged else 0
            self._require(0)

    def check(self) -> None:
        """Count a check of the canary, for which there was room, and leave room for the next."""
        with self._changed:
            self._lost += self._canary

    def _fits(self, more: int) -> bool:
        spent = self.tokens + self._lost + self._held
        return self._most is None or spent + more <= self._most

    def _require(self, more: int) -> None:
        if not self._fits(more):
            spent = self.tokens + self._lost
            raise EncoderError(
                f"the next request could pass --max-cost: up to {spent:,} tokens are spent, which "
                f"cost {self.cost(spent):.4g}; what came is kept: raise --max-cost, and run this "
                "again"
            )

    def settle(self, most: int, *, size: int = 0, tokens: int = 0) -> None:
        """Give back what was set aside, and count what was charged for ``size`` bytes."""
        with self._changed:
            self._held -= most
            self.tokens, self.bytes = self.tokens + tokens, self.bytes + size
            self.requests += size > 0
            self._changed.notify_all()


class RemoteEncoder(WindowEncoder):
    """A model behind an API that speaks OpenAI's protocol.

    Attributes:
        spec: identity of the model, with its embeddings of twelve texts.

    Examples:
        >>> encoder = load_encoder("openai:text-embedding-3-small", dimensions=512)
        >>> encoder.encode(["A cat sat on the mat."]).shape
        (1, 512)
    """

    requests_at_once = _FIRST_AT_ONCE

    def __init__(self, spec: RemoteSpec, config: EncoderConfig) -> None:
        self.spec = spec
        canary = sum(_size(spec.document_prompt + text) for text in CANARY)
        self._gate, self.meter = _Gate(), _Meter(config.price, config.max_cost, canary)
        self._endpoint = Endpoint(config, enter=self._gate.enter, leave=self._gate.leave)
        self._pool = ThreadPoolExecutor(_MOST_AT_ONCE + _BUILT_AHEAD, "request")
        self._most_texts = _MOST_TEXTS
        self._runs = WeakSet[RemoteRun]()

    def __repr__(self) -> str:
        return f"RemoteEncoder({self.spec.model!r}, {self.spec.dim} dims, {self._endpoint.url})"

    @property
    def runtime(self) -> dict[str, str]:
        """The protocol; what computes embeddings is not known."""
        return {"inputs": "openai's API"}

    @property
    def note(self) -> str | None:
        """Requests, tokens and money so far."""
        meter = self.meter
        cost = meter.cost(meter.tokens)
        repeated = f", {meter.repeated:,} tries in vain" if meter.repeated else ""
        money = "" if cost is None else f", cost {cost:.4g}"
        return f"note: {meter.requests:,} requests{repeated}, {meter.tokens:,} tokens{money}"

    def charge(self, size: int) -> tuple[int | None, float | None]:
        """Return about how many tokens and how much money ``size`` bytes cost, by the answers."""
        tokens = round(self.meter.a_byte * size)
        return tokens, self.meter.cost(tokens)

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Return about how many tokens queries have, by the answers so far."""
        return round(self.meter.a_byte * sum(map(_size, listed(texts))))

    def run(
        self,
        prepared: TextWindow,
        *,
        advance: Callable[[int], None] | None = None,
        stopped: Callable[[NDArray[np.float32]], None] | None = None,
    ) -> RemoteRun:
        """Send the requests of a window; the last ones may be answered later.

        ``stopped`` is given what came, in order, after each thousand texts and at an error.
        """
        texts, saved = prepared.distinct, len(prepared.known)
        found = np.empty((len(texts), self.dim), np.float32)
        found[:saved] = np.reshape(prepared.known, (saved, self.dim))
        ran = RemoteRun(prepared, found, [saved], stopped)
        self._runs.add(ran)
        saved = self._still_known(ran, saved)
        tell, told = advance or (lambda _: None), 0
        rows, saving = len(prepared.texts), 0.0
        since = time.monotonic()
        try:
            while ran.stops[-1] < len(texts):
                asked = self._cut(texts, ran.stops[-1])
                most = self._hold(prepared, asked)
                try:
                    self._gate.admit()
                except BaseException:
                    self.meter.settle(most)
                    raise
                try:
                    here = ran.look()
                    tell(here * rows // len(texts) - told)
                    told = here * rows // len(texts)
                    began = time.monotonic()
                    if (
                        ran.save
                        and here - saved >= _SAVED_EVERY
                        and saving <= _SAVING_SHARE * (began - since)
                    ):
                        ran.save(found[:here])
                        saved, since = here, time.monotonic()
                        saving = since - began
                    ran.requests.append(self._send(ran, asked, most))
                    ran.stops.append(asked.stop)
                except BaseException:
                    self.meter.settle(most)
                    self._gate.finish()
                    raise
        except BaseException:
            # Its requests may wait for the places of a window before, which pauses.
            for each in list(self._runs):
                if each.thread == ran.thread:
                    self.stop(each)
            ran.rescue(saved)
            raise
        tell(rows - told)
        return ran

    def stop(self, ran: RemoteRun) -> None:
        """Let a window under way, which is paid for, end within seconds."""
        ran.stop(within=_STOPPING_SECONDS)

    def _still_known(self, ran: RemoteRun, known: int) -> int:
        """Return how many of the first texts are known, after asking for some of them again.

        A model that had changed when the run was interrupted may be the old one by now.
        """
        step = max(_ASKED_AGAIN, -(-known // _MOST_AGAIN))
        rows, asked = range((known - 1) % step, known, step) if known else range(0), 0
        before = ran.embeddings[rows].copy()
        while asked < len(rows):
            cut = self._cut([ran.window.distinct[row] for row in rows], asked)
            part, asked = rows[cut], cut.stop
            some = slice(part.start, part.stop, part.step)
            most = self._hold(ran.window, some)
            try:
                self._ask(ran, some, most)
            finally:
                self._gate.leave()
                self.meter.settle(most)
        if known and not is_alike(before, ran.embeddings[rows]):
            _LOG.warning("%s had changed: %s texts are asked for again", self.spec.model, known)
            ran.window, ran.stops, known = replace(ran.window, known=()), [0], 0
        return known

    def collect(self, ran: RemoteRun) -> Encoded:
        """Wait for the last requests of a window; return its embeddings in order.

        Rows that are kept (``stopped`` was given) are those of one model, which is asked for its
        canary again.
        """
        window, again = ran.window, self.spec
        try:
            tokens = sum(each.result() for each in ran.requests)
            if ran.save is not None and ran.requests:
                self.meter.check()
                found, _ = self._endpoint.ask_canary(
                    self.dim, failed=lambda pause, *_: ran.pause(pause)
                )
                again = replace(self.spec, canary=encode_canary(found))
        except BaseException:
            ran.rescue(len(window.known))
            raise
        try:
            require_alike(self.spec, again)
        except EncoderError:
            if ran.save is not None:
                ran.save(ran.embeddings[:0])  # forget them: some may be of the other model
            raise
        return Encoded(
            embeddings=ran.embeddings[window.places],
            truncated=np.zeros(len(window.places), np.bool_),
            known=int((window.places < len(window.known)).sum()),
            tokens=tokens,
            padded_tokens=tokens,
            distinct=len(window.distinct),
        )

    def _cut(self, texts: Sequence[str], start: int) -> slice:
        stop, room = start, _MOST_TOKENS / self.meter.a_byte
        while stop < min(start + self._most_texts, len(texts)):
            room -= _size(texts[stop])
            if room < 0 and stop > start:
                break
            stop += 1
        return slice(start, stop)

    def _hold(self, window: TextWindow, rows: slice) -> int:
        """Set aside the most tokens that a request can cost, and return how many."""
        texts = window.distinct[rows]
        prompt = self.spec.query_prompt if window.queries else self.spec.document_prompt
        # A token has a byte at least; special ones come on top.
        most = sum(map(_size, texts)) + (_size(prompt) + 8) * len(texts)
        self.meter.hold(most)
        return most

    def _send(self, ran: RemoteRun, rows: slice, most: int) -> Future[int]:
        def work() -> int:
            try:
                return self._ask(ran, rows, most)
            finally:
                self.meter.settle(most)
                self._gate.finish()

        return self._pool.submit(work)

    def _ask(self, ran: RemoteRun, rows: slice, most: int) -> int:
        """Ask for texts, or for halves of what is too much at once; return the tokens charged."""
        window, texts = ran.window, ran.window.distinct[rows]

        def failed(pause: float, limited: bool, charged: bool) -> bool:
            self.meter.repeat(most, charged=charged)
            # It holds a place meanwhile, so that an endpoint that takes nothing is left alone.
            self._gate.enter()
            stopped = ran.pause(pause)
            if limited:
                self._gate.shrink()
            self._gate.leave()
            return stopped

        try:
            ran.embeddings[rows], tokens, _ = self._endpoint.ask(
                texts, queries=window.queries, dim=self.dim, failed=failed
            )
        except TooMuchError:
            half = (len(texts) + 1) // 2
            self._most_texts = min(self._most_texts, half)
            middle = rows.start + half * (rows.step or 1)
            parts = slice(rows.start, middle, rows.step), slice(middle, rows.stop, rows.step)
            return sum(self._ask(ran, part, most) for part in parts)
        self._gate.grow()
        size = sum(map(_size, texts))
        tokens = tokens or size
        self.meter.settle(0, size=size, tokens=tokens)
        return tokens


def _size(text: str) -> int:
    return len(text.encode())
