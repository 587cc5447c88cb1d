"""Models behind an API that speaks OpenAI's protocol: asked in parallel, tried again, counted.

The client of openai keeps connections, reads variables and parses answers. It would try again by
itself, but without telling of a 429, by which the requests at once are chosen, nor of tries that
may have been charged; so it makes one try, and tries are counted here.
"""

import base64
import contextlib
import functools
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.encoding.encoder_config import REMOTE, EncoderConfig
from whiten_index.encoding.spec import BASE_URL, OPENAI_URL, RemoteSpec, recorded_spec
from whiten_index.encoding.window_encoder import Encoded, WindowEncoder, listed
from whiten_index.errors import ConfigError, EncoderError, first_line, require_installed

_LOG = logging.getLogger(__name__)
_KEY = "OPENAI_API_KEY"
# Texts whose embeddings tell one model from another: languages, code, numbers, short and long.
_CANARY = (
    "A cat sat on the mat.", "The central bank raised its interest rate by half a point.",
    "Wie spät ist es in Tokio?", "東京は日本の首都です。", "def add(a, b): return a + b",
    "SELECT name FROM users WHERE age > 30;", "3.14159265358979", "hello",
    "Mitochondria release the energy that is stored in glucose.", "¿Dónde está la biblioteca?",
    "The contract may be terminated by either party with thirty days' written notice.",
    "How do I reset my password?",
)  # fmt: skip
_SAME, _NEARLY = 0.999, 0.9999
_SESSION_SECONDS = 300  # for which a model counts as the one that was asked
# A request has so many texts and tokens at most: OpenAI takes 2,048 and 300,000, others 32 texts,
# and then the half is tried.
_MOST_TEXTS, _MOST_TOKENS = 128, 16_384
_TOKENS_A_BYTE = 1 / 3  # until answers tell
_FIRST_AT_ONCE, _MOST_AT_ONCE = 8, 64
# A request that takes longer waits in a queue, which more requests make no shorter.
_LONG_SECONDS, _TIMEOUT_SECONDS = 10, 300
_TRIES, _MOST_WAITED = 8, 600.0
_FIRST_PAUSE, _MOST_PAUSE = 0.25, 8.0
# What came of a window is saved so often, so that a process that is killed loses little.
_SAVED_EVERY = 1024
_REFUSED = (400, 413, 422)


class RefusedTextError(EncoderError):
    """A text that the endpoint does not take; ``text`` is it."""

    def __init__(self, message: str, text: str = "") -> None:
        super().__init__(message)
        self.text = text


@dataclass(frozen=True, slots=True)
class RemoteWindow:
    """Texts to ask for: ``places`` (n,) of the texts among the ``distinct`` ones."""

    texts: Sequence[str]
    distinct: list[str]
    places: NDArray[np.int64]
    queries: bool
    # (m, d), of the first distinct texts, which an interrupted run was given.
    known: NDArray[np.float32] | tuple[()] = ()


@dataclass(slots=True)
class RemoteRun:
    """A window whose requests are sent, or being sent; ``stops`` is where each one's texts end."""

    window: RemoteWindow
    embeddings: NDArray[np.float32]
    stops: list[int]
    save: Callable[[NDArray[np.float32]], None]  # what came, in order
    requests: list[Future[int]] = field(default_factory=list)  # tokens of each
    done: int = 0  # requests, from the first on, whose answers came
    out_of_memory: int = 0

    def look(self) -> int:
        """Return how many texts have come in order, and raise the error of the next one."""
        while self.done < len(self.requests) and self.requests[self.done].done():
            self.requests[self.done].result()
            self.done += 1
        return self.stops[self.done]

    def rescue(self, saved: int) -> None:
        """Wait for what is under way, which is paid for, and save what came."""
        wait(self.requests)
        with contextlib.suppress(Exception):
            self.look()
        if (here := self.stops[self.done]) > saved:
            self.save(self.embeddings[:here])


class _Endpoint:
    """A model at its endpoint: one request, its answer, and what to do about an error."""

    def __init__(self, config: EncoderConfig) -> None:
        require_installed("openai", by=f"--model {config.model}", extra="api")
        import openai

        url = config.base_url or os.environ.get(BASE_URL) or OPENAI_URL
        self.url, self._key = url.rstrip("/"), os.environ.get(_KEY, "")
        if not self._key and self.url == OPENAI_URL:
            raise ConfigError(
                f"{config.model} needs a key of OpenAI in the variable {_KEY}; set it, or name "
                "another endpoint with --base-url"
            )
        self.name, self._config = str(config.model).removeprefix(REMOTE), config
        try:
            self._client = openai.OpenAI(
                base_url=self.url, api_key=self._key or "none", max_retries=0,
                timeout=_TIMEOUT_SECONDS,
            )  # fmt: skip
        except Exception as error:
            raise ConfigError(
                f"--base-url {self.url} cannot be used ({first_line(error)}); write it as "
                "http://host:8080/v1"
            ) from error

    def ask(
        self, texts: Sequence[str], *, queries: bool, dim: int | None = None
    ) -> tuple[NDArray[np.float32], int, str]:
        """Return the embeddings (n, d), the tokens charged (0 if unsaid) and the model's name.

        Raises:
            ValueError: the answer has other embeddings than were asked for.
        """
        config, more = self._config, dict[str, Any]()
        if config.dimensions is not None:
            more["dimensions"] = config.dimensions
        if config.input_types is not None:
            more["extra_body"] = {"input_type": config.input_types[queries]}
        prompt = (config.query_prompt if queries else config.document_prompt) or ""
        asked = [prompt + text for text in texts]
        answer = self._client.embeddings.create(
            input=asked, model=self.name, encoding_format="base64", **more
        )
        rows = sorted(answer.data, key=lambda each: each.index)
        if [each.index for each in rows] != [*range(len(texts))]:
            raise ValueError(f"{len(rows)} embeddings for {len(texts)} texts")
        found = np.stack([_numbers(each.embedding) for each in rows])
        if (dim is not None and found.shape[1] != dim) or not np.isfinite(found).all():
            raise ValueError(f"embeddings of {found.shape[1]} dims, or that are not finite")
        usage = getattr(answer, "usage", None)
        return found, int(getattr(usage, "total_tokens", 0) or 0), str(answer.model or self.name)

    def explained(self, error: Exception) -> str:
        """Return an error in a line, without the key."""
        text = first_line(getattr(error, "message", error))
        if cause := error.__cause__:
            text += f" ({first_line(cause)})"
        return text.replace(self._key, "***") if self._key else text


def _numbers(embedding: Any) -> NDArray[np.float32]:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), "<f4").astype(np.float32)
    return np.array(embedding, np.float32)


class _Gate:
    """Requests at once: one more for each success, one less for each 429.

    After the first 429 it tries one more only after eight rounds.
    """

    def __init__(self) -> None:
        self.at_once, self._busy, self._good, self._limited = _FIRST_AT_ONCE, 0, 0, False
        self.changed = threading.Condition()

    def enter(self) -> None:
        """Wait for a place."""
        with self.changed:
            self.changed.wait_for(lambda: self._busy < self.at_once)
            self._busy += 1

    def leave(self) -> None:
        """Give the place back."""
        with self.changed:
            self._busy -= 1
            self.changed.notify_all()

    def fewer(self) -> None:
        """Count an answer that the endpoint has too much to do."""
        with self.changed:
            self.at_once, self._good, self._limited = max(self.at_once - 1, 1), 0, True

    def succeeded(self, seconds: float) -> None:
        """Count an answer that came."""
        with self.changed:
            self._good += 1
            wanted = 8 * self.at_once if self._limited else 1
            if self._good >= wanted and seconds < _LONG_SECONDS:
                self.at_once, self._good = min(self.at_once + 1, _MOST_AT_ONCE), 0
                self.changed.notify_all()


class _Meter:
    """Tokens and money; no request is sent that could cost more than is left."""

    def __init__(self, price: float | None, most: float | None) -> None:
        self.price, self._most = price, most / price * 1e6 if price and most is not None else None
        self.tokens = self.bytes = self.requests = self.repeated = 0
        # Tokens that may have been charged beside, first those of the canary, and that are asked.
        self._lost, self._held = sum(map(_size, _CANARY)), 0
        self._changed = threading.Condition()

    @property
    def a_byte(self) -> float:
        """Tokens of a byte of text."""
        return self.tokens / self.bytes if self.bytes else _TOKENS_A_BYTE

    def cost(self, tokens: float) -> float | None:
        """Return the price of tokens, None if it is not known."""
        return None if self.price is None else tokens * self.price / 1e6

    def hold(self, most: int) -> None:
        """Set ``most`` tokens aside, once those under way leave room for them.

        Raises:
            EncoderError: there is no room, and nothing under way that could leave any.
        """

        def fits() -> bool:
            spent = self.tokens + self._lost + self._held
            return self._most is None or spent + most <= self._most

        with self._changed:
            self._changed.wait_for(lambda: fits() or not self._held)
            if not fits():
                spent = self.cost(self.tokens + self._lost) or 0.0
                raise EncoderError(
                    f"the next request could pass --max-cost: {self.tokens + self._lost:,} tokens "
                    f"({spent:.4g}) are spent; what came is kept: raise --max-cost, and run this "
                    "again"
                )
            self._held += most

    def repeat(self, most: int, *, charged: bool) -> None:
        """Count a try in vain, that may have been ``charged``."""
        with self._changed:
            self.repeated += 1
            self._lost += most if charged else 0

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
        >>> encoder = RemoteEncoder.load("openai:text-embedding-3-small", dimensions=512)
        >>> encoder.encode(["A cat sat on the mat."]).shape
        (1, 512)
    """

    def __init__(self, spec: RemoteSpec, config: EncoderConfig) -> None:
        self.spec = spec
        self._endpoint = _Endpoint(config)
        self._gate, self.meter = _Gate(), _Meter(config.price, config.max_cost)
        self._pool = ThreadPoolExecutor(_MOST_AT_ONCE, "ask")
        self._most_texts = _MOST_TEXTS

    def __repr__(self) -> str:
        return f"RemoteEncoder({self.spec.model!r}, {self.spec.dim} dims, {self._endpoint.url})"

    @classmethod
    def load(cls, model: str, **options: Any) -> "RemoteEncoder":
        """Ask an endpoint for a model, by ``openai:NAME``.

        Args:
            model: the name.
            options: the other fields of ``EncoderConfig``, such as ``base_url`` and ``price``.

        Raises:
            EncoderError: the endpoint cannot be reached, or does not answer as it should.
            ConfigError: an option does not fit a model behind an API, or a key is missing.
        """
        config = EncoderConfig(model=model, **options)
        if not config.remote:
            raise ConfigError(f"{model!r} is behind no API; write {REMOTE}NAME, or use Encoder")
        return cls(ask_spec(config), config)

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

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings of queries, (n, d): with prompt or input type of queries."""
        return self.collect(self.run(self._prepare(listed(texts), queries=True))).embeddings

    def count_tokens(self, texts: Sequence[str]) -> int:
        """Return about how many tokens queries have, by the answers so far."""
        return round(self.meter.a_byte * sum(map(_size, listed(texts))))

    def prepare(self, texts: Sequence[str]) -> RemoteWindow:
        """Find the distinct texts of a window of documents."""
        return self._prepare(listed(texts), queries=False)

    def _prepare(self, texts: Sequence[str], *, queries: bool) -> RemoteWindow:
        first: dict[str, int] = {}
        places = [first.setdefault(text, len(first)) for text in texts]
        return RemoteWindow(texts, list(first), np.array(places, np.int64), queries)

    def run(
        self,
        prepared: RemoteWindow,
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
        ran = RemoteRun(prepared, found, [saved], stopped or (lambda _: None))
        tell, told, stop = advance or (lambda _: None), 0, threading.Event()
        rows = len(prepared.texts)
        try:
            while ran.stops[-1] < len(texts):
                self._gate.enter()
                try:
                    here = ran.look()
                    tell(here * rows // len(texts) - told)
                    told = here * rows // len(texts)
                    if here - saved >= _SAVED_EVERY:
                        ran.save(found[:here])
                        saved = here
                    asked = self._cut(texts, ran.stops[-1])
                    ran.requests.append(self._send(prepared, asked, found, stop))
                    ran.stops.append(asked.stop)
                except BaseException:
                    self._gate.leave()
                    raise
        except BaseException:
            stop.set()
            ran.rescue(saved)
            raise
        tell(rows - told)
        return ran

    def collect(self, ran: RemoteRun) -> Encoded:
        """Wait for the last requests of a window; return its embeddings in order."""
        window = ran.window
        try:
            tokens = sum(each.result() for each in ran.requests)
        except EncoderError:
            ran.rescue(len(window.known))
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
        """Return the rows of the next request."""
        stop, room = start, _MOST_TOKENS / self.meter.a_byte
        while stop < min(start + self._most_texts, len(texts)):
            room -= _size(texts[stop])
            if room < 0 and stop > start:
                break
            stop += 1
        return slice(start, stop)

    def _send(
        self, window: RemoteWindow, rows: slice, found: NDArray[np.float32], stop: threading.Event
    ) -> Future[int]:
        texts = window.distinct[rows]
        prompt = self.spec.query_prompt if window.queries else self.spec.document_prompt
        # A token has a byte at least; special ones come on top.
        most = sum(map(_size, texts)) + (_size(prompt) + 8) * len(texts)
        self.meter.hold(most)

        def work() -> int:
            size = tokens = 0
            try:
                found[rows], tokens = self._ask(texts, window.queries, most, stop)
                size = sum(map(_size, texts))
            finally:
                self.meter.settle(most, size=size, tokens=tokens)
                self._gate.leave()
            return tokens

        return self._pool.submit(work)

    def _ask(
        self, texts: Sequence[str], queries: bool, most: int, stop: threading.Event
    ) -> tuple[NDArray[np.float32], int]:
        """Ask until an answer comes, for halves of what is too much at once."""
        tried = faults = 0
        waited = 0.0
        while True:
            began = time.monotonic()
            try:
                found, tokens, _ = self._endpoint.ask(texts, queries=queries, dim=self.dim)
            except Exception as error:
                if getattr(error, "status_code", None) in _REFUSED:
                    if len(texts) == 1:
                        raise RefusedTextError(
                            f"{self._endpoint.url} refuses the text {texts[0][:60]!r} "
                            f"({self._endpoint.explained(error)}); cut it into shorter rows, or "
                            "leave it out",
                            texts[0],
                        ) from error
                    half = (len(texts) + 1) // 2
                    self._most_texts = min(self._most_texts, half)
                    halves = [
                        self._ask(some, queries, most, stop)
                        for some in (texts[:half], texts[half:])
                    ]
                    return np.concatenate([each for each, _ in halves]), sum(t for _, t in halves)
                pause, limited, charged = _pause(self._endpoint, error, tried)
                self.meter.repeat(most, charged=charged)
                tried, faults, waited = tried + 1, faults + (not limited), waited + pause
                if limited:
                    self._gate.fewer()
                if faults >= _TRIES or waited > _MOST_WAITED or stop.wait(pause):
                    raise _unreachable(self._endpoint, error) from error
            else:
                self._gate.succeeded(time.monotonic() - began)
                return found, tokens or sum(map(_size, texts)) // 4


def _size(text: str) -> int:
    return len(text.encode())


def _pause(endpoint: _Endpoint, error: Exception, tried: int) -> tuple[float, bool, bool]:
    """Return the seconds until the next try, and whether there were too many requests.

    The third value tells whether the try may have been charged.

    Raises:
        EncoderError: another try would not help.
    """
    import openai

    status = getattr(error, "status_code", None)
    known = isinstance(
        error, openai.OpenAIError | ValueError | TypeError | AttributeError | KeyError
    )
    again = status is None or status in (408, 409, 429) or status >= 500
    if not known or not again or getattr(error, "code", None) == "insufficient_quota":
        raise _unreachable(endpoint, error) from error
    headers = getattr(getattr(error, "response", None), "headers", {})
    asked = _retry_after(headers.get("retry-after-ms"), headers.get("retry-after"))
    pause = min(_FIRST_PAUSE * 2 ** min(tried, 9), _MOST_PAUSE) if asked is None else asked
    return pause, status in (429, 503), status is None


def _retry_after(milliseconds: str | None, text: str | None) -> float | None:
    """Return the seconds that an answer asks to wait, None if it does not."""
    try:
        if milliseconds is not None:
            return max(float(milliseconds) / 1000, 0.0)
        return None if text is None else max(float(text), 0.0)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(str(text)).timestamp() - time.time(), 0.0)
    except ValueError:
        return None


def _unreachable(endpoint: _Endpoint, error: Exception) -> EncoderError:
    status = getattr(error, "status_code", None)
    remedy = "check --base-url and the endpoint, and run this again, which keeps what came"
    if status in (401, 403):
        remedy = f"check the key in the variable {_KEY}"
    elif status == 404:
        remedy = "check the model's name and --base-url, which ends in /v1 for most"
    return EncoderError(
        f"the model {endpoint.name} at {endpoint.url} cannot be asked "
        f"({endpoint.explained(error)}); {remedy}"
    )


def ask_spec(config: EncoderConfig) -> RemoteSpec:
    """Ask a model for the embeddings of the canary's texts, by which it is known again.

    Within a session it is asked once.

    Raises:
        EncoderError: it cannot be asked, or refuses the texts.
    """
    same = tuple((name, getattr(config, name)) for name in _ASKED)
    environment = os.environ.get(BASE_URL), hash(os.environ.get(_KEY))
    return _asked(same, environment, int(time.monotonic() // _SESSION_SECONDS))


_ASKED = ("model", "base_url", "dimensions", "input_types", "document_prompt", "query_prompt")


@functools.lru_cache(maxsize=16)
def _asked(options: tuple[tuple[str, Any], ...], _environment: Any, _session: int) -> RemoteSpec:
    config = EncoderConfig(**dict(options))
    endpoint, tried = _Endpoint(config), 0
    while True:
        try:
            found, _, served = endpoint.ask(_CANARY, queries=False)
            break
        except Exception as error:
            pause = _pause(endpoint, error, tried)[0]
            tried += 1
            if tried >= _TRIES:
                raise _unreachable(endpoint, error) from error
            time.sleep(pause)
    return RemoteSpec(
        model=str(config.model),
        endpoint=endpoint.url,
        served=served,
        dim=found.shape[1],
        dimensions=config.dimensions,
        document_prompt=config.document_prompt or "",
        query_prompt=config.query_prompt or "",
        input_types=config.input_types or (),
        canary=base64.b64encode(found.astype("<f2").tobytes()).decode(),
    )


def keeping_canary(
    encoder: Mapping[str, Any], recorded: Mapping[str, Any] | None
) -> Mapping[str, Any]:
    """Return a store's encoder with the canary that was recorded first; see ``require_alike``."""
    now, known = recorded_spec(encoder), None if recorded is None else recorded_spec(recorded)
    if not isinstance(now, RemoteSpec) or not isinstance(known, RemoteSpec):
        return encoder
    if now.fingerprint != known.fingerprint:
        return encoder
    require_alike(known, now)
    kept = replace(now, canary=known.canary).to_json()
    return kept if encoder["kind"] == "api" else {**encoder, "query_encoder": kept}


def require_alike(recorded: RemoteSpec, now: RemoteSpec) -> None:
    """Compare the canaries of one model at two times; a small difference is logged.

    Raises:
        EncoderError: the model has changed.
    """
    before, after = (
        np.frombuffer(base64.b64decode(each.canary), "<f2").reshape(-1, each.dim).astype(float)
        for each in (recorded, now)
    )
    lengths = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
    cosine = float(((before * after).sum(axis=1) / lengths).min())
    if not cosine >= _SAME:
        raise EncoderError(
            f"{now.model} at {now.endpoint} is not the model that it was: of twelve fixed texts "
            f"one has a cosine of {cosine:.4f} with its recorded embedding; ask an endpoint that "
            f"has the old one ({recorded.served} at {recorded.endpoint}), or build a new index and "
            "store with the new one"
        )
    if cosine < _NEARLY:
        _LOG.warning(
            "%s at %s has changed a little: of twelve fixed texts one has a cosine of %.5f with "
            "its recorded embedding",
            now.model,
            now.endpoint,
            cosine,
        )
