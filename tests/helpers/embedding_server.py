"""A server of OpenAI's /v1/embeddings that takes nothing else, limits requests, and fails."""

import base64
import functools
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

DIM = 32
MODEL = "words"
_KNOWN = {"input", "model", "encoding_format", "dimensions", "input_type"}


def embedding(text: str, *, dim: int = DIM, turn: float = 0.0) -> np.ndarray:
    """Return a sum of a random vector for each word; ``turn`` mixes in another model's."""
    found = np.zeros(dim)
    for word in text.lower().split() or [""]:
        found += _vector(word, dim)
        if turn:
            found += turn * _vector(f"other{word}", dim)
    return (found / np.linalg.norm(found)).astype("<f4")


@functools.cache
def _vector(word: str, dim: int) -> np.ndarray:
    seed = int.from_bytes(hashlib.blake2b(word.encode()).digest()[:8], "big")
    return np.random.default_rng(seed).standard_normal(dim)


class EmbeddingServer:
    """Answers on a port of this machine.

    ``fault`` gets the number of a request and returns how it fails, or None: a status, ``cut``,
    ``slow``, ``malformed``, ``short``, ``twice``, ``nan``, or the bytes to send. ``hear`` gets
    what is asked and ``change`` what is answered, and may change it. ``answered`` counts the texts
    that clients were given, ``charged`` the tokens.
    """

    def __init__(
        self,
        fault: Callable[[int], Any] = lambda _: None,
        *,
        at_once: int = 1000,
        most_texts: int = 2048,
        most_words: int = 2000,
        latency: float = 0.0,
        retry_after: str = "0.05",
        base64_too: bool = True,
        turn: float = 0.0,
        key: str | None = None,
        model: str = MODEL,
    ) -> None:
        self.fault, self.at_once, self.most_texts = fault, at_once, most_texts
        self.most_words, self.latency, self.retry_after = most_words, latency, retry_after
        self.base64_too, self.turn, self.key, self.model = base64_too, turn, key, model
        self.hear: Callable[[dict[str, Any]], Any] = lambda _: None
        self.change: Callable[[dict[str, Any]], Any] = lambda _: None
        self.answered, self.failed = Counter[str](), Counter[str]()
        self.requests = self.refused = self.busy = self.most_busy = self.charged = 0
        self.began = 0.0
        self.lock = threading.Lock()
        self._cache: dict[Any, np.ndarray] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def __enter__(self) -> "EmbeddingServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _embedding(self, text: str, dim: int) -> np.ndarray:
        key = (text, dim, self.turn)
        if key not in self._cache:
            self._cache[key] = embedding(text, dim=dim, turn=self.turn)
        return self._cache[key]

    def answer(self, asked: dict[str, Any]) -> tuple[int, Any]:
        """Return the status and the body for a request."""
        texts = asked.get("input")
        if asked.get("model") != self.model:
            return 404, _error("model_not_found")
        if set(asked) - _KNOWN or not isinstance(texts, list) or not texts:
            return 400, _error("a field is unknown or missing")
        if len(texts) > self.most_texts:
            return 422, _error(f"batch size {len(texts)} > maximum {self.most_texts}")
        if any(not isinstance(each, str) or not each for each in texts):
            return 400, _error("'$.input' is invalid")
        words = [len(text.split()) for text in texts]
        if max(words) > self.most_words:
            return 400, _error(f"maximum context length is {self.most_words} tokens")
        data = []
        for index, text in enumerate(texts):
            row = self._embedding(text, asked.get("dimensions") or DIM)
            packed = self.base64_too and asked.get("encoding_format") == "base64"
            given = base64.b64encode(row.tobytes()).decode() if packed else row.tolist()
            data.append({"object": "embedding", "index": index, "embedding": given})
        usage = {"prompt_tokens": sum(words), "total_tokens": sum(words)}
        return 200, {"object": "list", "data": data, "model": self.model, "usage": usage}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True
            wbufsize = 1 << 20

            def log_message(self, *_: object) -> None:
                pass

            def do_POST(self) -> None:
                with server.lock:
                    server.requests += 1
                    number, server.began = server.requests, server.began or time.monotonic()
                    server.busy += 1
                    server.most_busy = max(server.most_busy, server.busy)
                    full = server.busy > server.at_once
                    server.refused += full
                try:
                    self._answer(number, full=full)
                finally:
                    with server.lock:
                        server.busy -= 1

            def _answer(self, number: int, *, full: bool) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path != "/v1/embeddings":
                    self._send(404, _error("no such path"))
                    return
                if server.key and self.headers["Authorization"] != f"Bearer {server.key}":
                    self._send(401, _error(f"Incorrect key: {self.headers['Authorization']}"))
                    return
                fault = 429 if full else server.fault(number)
                asked = json.loads(body)
                if isinstance(fault, bytes):
                    self.close_connection = True
                    self.wfile.write(fault)
                    return
                if isinstance(fault, int):
                    server.failed[str(fault)] += 1
                    self._send(fault, _error("try again"))
                    return
                time.sleep(server.latency)
                server.hear(asked)
                status, found = server.answer(asked)
                server.change(found)
                if fault and status == 200:
                    server.failed[fault] += 1
                    data = found["data"]
                    if fault == "slow":
                        time.sleep(0.3)
                    elif fault == "short":
                        data.pop()
                    elif fault == "nan":
                        data[0]["embedding"] = [float("nan")] * DIM
                    elif fault == "twice":
                        data[-1]["index"] = 0 if len(data) > 1 else 1
                if status == 200 and fault in (None, "slow"):
                    with server.lock:
                        server.answered.update(asked["input"])
                        server.charged += found["usage"]["total_tokens"]
                self._send(status, found, cut=fault == "cut", broken=fault == "malformed")

            def _send(
                self, status: int, found: Any, *, cut: bool = False, broken: bool = False
            ) -> None:
                data = json.dumps(found).encode()
                data = data[: len(data) // 2] if broken else data
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                if status in (429, 503):
                    self.send_header("Retry-After", server.retry_after)
                self.end_headers()
                self.wfile.write(data[: len(data) // 2] if cut else data)
                self.close_connection = cut
                self.wfile.flush()

        return Handler


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": None}}
