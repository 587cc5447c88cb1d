"""An endpoint that speaks OpenAI's protocol: one request, its retries and its errors.

The client of openai keeps connections, reads variables and parses answers. It would try again by
itself, but reports neither a 429, by which the number of requests at once is chosen, nor tries
that may have been charged; so it makes one try, and tries are counted here.
"""

import base64
import contextlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.limits import VECTOR_NUMBERS
from whiten_index.artifacts.prefetch import blocks
from whiten_index.encoding.canary import CANARY, encode_canary
from whiten_index.encoding.encoder_config import REMOTE, EncoderConfig
from whiten_index.encoding.spec import BASE_URL, OPENAI_URL, RemoteSpec
from whiten_index.errors import (
    ConfigError,
    EncoderError,
    EndpointError,
    RefusedTextError,
    first_line,
    require_installed,
)

_KEY = "OPENAI_API_KEY"
# Servers without keys take any word, such as the name of their host or of the model.
_KEY_FORM, _LONG = re.compile(r"(?=.*\d)(?=.*[A-Za-z]).{8,}"), 20
_SESSION_SECONDS = 300  # for which a model counts as the one that was asked
_TIMEOUT_SECONDS, _TRIES, _MOST_WAITED = 300, 8, 600.0
_MOST_WAITED_OPENING = 60.0
_QUERY_SECONDS = 30
_FIRST_PAUSE, _MOST_PAUSE = 0.25, 8.0
# Bytes of an answer: of a number, which JSON writes with up to 25, and of everything else.
_A_NUMBER, _MOST_ELSE = 32, 1 << 20
_MOST_CHARGED = 1 << 40  # tokens of a request
_REFUSED = (400, 413, 422)


class TooMuchError(EncoderError):
    """Texts that the endpoint does not take together."""


def _waited(pause: float, _limited: bool, _charged: bool) -> bool:
    time.sleep(pause)
    return False


class Endpoint:
    """A model at its endpoint, whose key is in the environment alone."""

    def __init__(
        self,
        config: EncoderConfig,
        *,
        enter: Callable[[], None] = lambda: None,
        leave: Callable[[], None] = lambda: None,
    ) -> None:
        """Make the client; ``enter`` is called before a request is sent, ``leave`` after it."""
        self._leave = leave
        require_installed("openai", by=f"--model {config.model}", extra="api")
        import openai

        self.url, self._key = _url_of(config), os.environ.get(_KEY, "").strip()
        if not (self._key.isascii() and (self._key.isprintable())):
            raise ConfigError(f"the key in the variable {_KEY} has other than printable letters")
        if not self._key and self.url == OPENAI_URL:
            raise ConfigError(
                f"{config.model} needs a key of OpenAI in the variable {_KEY}; set it, or name "
                "another endpoint with --base-url"
            )
        address, key = unquote(self.url), self._key
        path = address.partition("://")[2].partition("/")[2]
        if (_KEY_FORM.fullmatch(key) and key in path) or (len(key) >= _LONG and key in address):
            raise ConfigError(
                f"the address of the endpoint has the key in the variable {_KEY}, and would be "
                f"stored and shown; leave the key out of --base-url, or of {BASE_URL}"
            )
        self._name, self._config = str(config.model).removeprefix(REMOTE), config

        def received(answer: Any) -> None:
            answer.read()
            leave()

        try:
            self._client = openai.OpenAI(
                base_url=self.url,
                api_key=self._key or "none",
                max_retries=0,
                # A few packed bytes can be gigabytes.
                default_headers={"Accept-Encoding": "identity"},
                # Texts go to no other place than the one named.
                http_client=openai.DefaultHttpxClient(
                    follow_redirects=False,
                    event_hooks={
                        "request": [lambda _: enter()],
                        "response": [self._limit, received],
                    },
                ),
            )
        except Exception as error:
            # httpx raises errors of all kinds for bad addresses, proxies and certificates.
            raise ConfigError(
                f"no requests can be sent to {self.url!r} ({first_line(error)}); check --base-url "
                f"and the variables {BASE_URL}, HTTPS_PROXY, ALL_PROXY and SSL_CERT_FILE"
            ) from None

    def ask(
        self,
        texts: Sequence[str],
        *,
        queries: bool,
        dim: int | None = None,
        failed: Callable[[float, bool, bool], bool] = _waited,
        most_waited: float = _MOST_WAITED,
    ) -> tuple[NDArray[np.float32], int, str]:
        """Return the embeddings (n, d), the tokens charged (0 if unsaid) and the model's name.

        Args:
            texts: of one request.
            queries: whether they get prompt and input type of queries, or those of documents.
            dim: their width, if it is known.
            failed: after a try in vain, waits for the seconds given, and returns whether there
                should be no more; also given whether there were too many requests, and whether the
                try may have been charged.
            most_waited: seconds of all pauses; fewer for queries.

        Raises:
            RefusedTextError: the endpoint does not take the one text.
            TooMuchError: it does not take the texts together.
            EncoderError: it cannot be asked.
        """
        tried = faults = 0
        waited = 0.0
        # Somebody waits for queries, and a server's other queries wait behind them.
        tries, most_waited = (2, 10.0) if queries else (_TRIES, most_waited)
        while True:
            try:
                return self._answer(texts, queries=queries, dim=dim)
            except Exception as error:
                # What an answer is made of raises errors of all kinds.
                self._leave()
                status = getattr(error, "status_code", None)
                if status in _REFUSED and dim is not None:
                    raise self._refusal(texts, error) from None
                again = status is None or status in (408, 409, 429) or status >= 500
                if not again or getattr(error, "code", None) == "insufficient_quota":
                    raise self._unreachable(status, error) from None
                limited = status in (429, 503)
                own = min(_FIRST_PAUSE * 2 ** min(tried, 9), _MOST_PAUSE)
                asked = _asked_pause(getattr(error, "response", None))
                pause = max(asked, own)
                tried, faults, waited = tried + 1, faults + (not limited), waited + pause
                over = faults >= tries or waited > most_waited
                if over or failed(pause, limited, status is None):
                    raise self._unreachable(status, error, asked) from None

    def ask_canary(self, dim: int | None = None, **how: Any) -> tuple[NDArray[np.float32], str]:
        """Return the embeddings (12, d) of the fixed texts, and the model's name; see ``ask``."""
        # Few take less than six texts together.
        answers = [self.ask(some, queries=False, dim=dim, **how) for some in blocks(CANARY, 6)]
        if len(widths := {each.shape[1] for each, _, _ in answers}) > 1:
            raise EncoderError(
                f"{self._config.model} at {self.url} gives embeddings of {sorted(widths)} dims by "
                "turns; ask its operator for one model"
            )
        return np.concatenate([each for each, _, _ in answers]), answers[0][2]

    def _answer(
        self, texts: Sequence[str], *, queries: bool, dim: int | None
    ) -> tuple[NDArray[np.float32], int, str]:
        config = self._config
        prompt = (config.query_prompt if queries else config.document_prompt) or ""
        asked = {
            "model": self._name,
            "input": [prompt + text for text in texts],
            "encoding_format": "base64",
            "dimensions": config.dimensions,
            "input_type": config.input_types[queries] if config.input_types else None,
        }
        self._most_bytes = _MOST_ELSE + _A_NUMBER * (dim * 128 if dim else VECTOR_NUMBERS * 6)
        # Half the time of `embeddings.create`, which copies texts and answers to other classes.
        answer: Any = self._client.post(
            "/embeddings",
            cast_to=object,
            body={name: value for name, value in asked.items() if value is not None},
            options={"timeout": _QUERY_SECONDS if queries else _TIMEOUT_SECONDS},
        )
        data = answer.get("data") if isinstance(answer, dict) else None
        if not data:
            raise ValueError("the answer is no JSON object with data")
        rows = sorted(data, key=lambda each: each["index"])
        if [each["index"] for each in rows] != [*range(len(texts))]:
            raise ValueError(f"{len(rows)} embeddings for {len(texts)} texts")
        found = np.stack([_numbers(each["embedding"]) for each in rows])
        width = found.shape[-1]
        fits = found.ndim == 2 and 1 <= width <= VECTOR_NUMBERS and dim in (None, width)
        if not fits or not np.isfinite(found).all():
            raise ValueError(f"embeddings of shape {found.shape}, or that are not finite")
        tokens = max(int((answer.get("usage") or {}).get("total_tokens") or 0), 0)
        if tokens > _MOST_CHARGED:
            raise ValueError(f"{tokens:.3g} tokens are charged")
        return found, tokens, first_line(answer.get("model") or self._name)

    def _limit(self, response: Any) -> None:
        """Let an answer end after so many bytes and seconds, before it is read."""
        if response.headers.get("content-encoding", "identity") != "identity":
            raise ValueError("the answer is packed, though it was asked for as it is")
        most, stream = self._most_bytes, response.stream
        until = time.monotonic() + response.request.extensions["timeout"]["read"]

        def parts() -> Iterator[bytes]:
            size = 0
            with contextlib.closing(stream):
                for part in stream:
                    size += len(part)
                    if size > most or time.monotonic() > until:
                        raise ValueError(f"above {most:,} bytes, or too slow")
                    yield part

        response.stream = type(response)(200, content=parts()).stream

    def _refusal(self, texts: Sequence[str], error: Exception) -> EncoderError:
        why = f"{self.url} refuses the text {texts[0][:60]!r} ({self._explained(error)})"
        if len(texts) > 1:
            return TooMuchError(why)
        return RefusedTextError(f"{why}; cut it into shorter rows, or leave it out", texts[0])

    def _unreachable(
        self, status: int | None, error: Exception, asked: float = 0.0
    ) -> EncoderError:
        remedy = "check --base-url and the endpoint, and run this again, which keeps what came"
        if status in (401, 403):
            remedy = f"check the key in the variable {_KEY}"
        elif status == 404:
            remedy = "check the model's name and --base-url, which ends in /v1 for most"
        elif asked:
            remedy = f"run this again in {asked:g} seconds, as it asks for"
        kind = type(error).__name__
        told, plain = (
            f"the model {self._name} at {self.url} cannot be asked ({why}); {remedy}"
            for why in (self._explained(error), f"{kind}, status {status}" if status else kind)
        )
        away = status not in (None, 500) or kind in ("APIConnectionError", "APITimeoutError")
        return EndpointError(told, plain=plain, of_any_text=away)

    def _explained(self, error: Exception) -> str:
        text = first_line(getattr(error, "message", error))
        return text + (f" ({first_line(error.__cause__)})" if error.__cause__ else "")


def _numbers(embedding: Any) -> NDArray[np.float32]:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), "<f4").astype(np.float32)
    return np.array(embedding, np.float32)


def _url_of(config: EncoderConfig) -> str:
    return (config.base_url or os.environ.get(BASE_URL, "").strip() or OPENAI_URL).rstrip("/")


def _asked_pause(response: Any) -> float:
    """Return the seconds that an answer asks to wait, 0 without any."""
    headers: Any = getattr(response, "headers", {})
    milliseconds, text = headers.get("retry-after-ms"), headers.get("retry-after")
    ways: tuple[Callable[[], float], ...] = (
        lambda: float(milliseconds) / 1000,
        lambda: float(text),
        lambda: parsedate_to_datetime(text).timestamp() - time.time(),
    )
    for way in ways:
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if math.isfinite(pause := way()):
                return max(pause, 0.0)
    return 0.0


def ask_spec(config: EncoderConfig, *, opening: bool = False) -> RemoteSpec:
    """Ask a model for its embeddings of twelve fixed texts, by which it is known again.

    Within five minutes it is asked once. If an index is ``opening``, somebody waits.

    Raises:
        EncoderError: it cannot be asked, or refuses the texts.
    """
    same: dict[str, Any] = {name: getattr(config, name) or None for name in _ASKED}
    same["base_url"] = _url_of(config)
    session = int(time.monotonic() // _SESSION_SECONDS)
    key = (*same.items(), hash(os.environ.get(_KEY)), session)
    if (found := _ANSWERS.get(key)) is None:
        found = _asked(EncoderConfig(**same), _MOST_WAITED_OPENING if opening else _MOST_WAITED)
        if len(_ANSWERS) >= _MOST_ANSWERS:
            _ANSWERS.clear()
        _ANSWERS[key] = found
    return found


_ASKED = ("model", "dimensions", "input_types", "document_prompt", "query_prompt")
_ANSWERS, _MOST_ANSWERS = dict[tuple[Any, ...], RemoteSpec](), 16


def _asked(config: EncoderConfig, most_waited: float) -> RemoteSpec:
    endpoint = Endpoint(config)
    found, served = endpoint.ask_canary(most_waited=most_waited)
    if config.dimensions not in (None, found.shape[1]):
        raise EncoderError(
            f"{config.model} at {endpoint.url} gives {found.shape[1]} dims, whatever is asked; "
            "leave out --dimensions"
        )
    return RemoteSpec(
        model=str(config.model),
        endpoint=endpoint.url,
        served=served,
        dim=found.shape[1],
        dimensions=config.dimensions,
        document_prompt=config.document_prompt or "",
        query_prompt=config.query_prompt or "",
        input_types=config.input_types or (),
        canary=encode_canary(found),
    )
