"""Texts a second of a model behind an API, beside what the limits of its endpoint allow.

Run ``python -m benchmarks.api``. The endpoint is another process that answers each request after
50 ms, takes so many texts a request and so many requests at once, and refuses others with 429. Its
limit is texts × requests / 50 ms; the first second, in which the number of requests grows, counts.
Beside it, threads that ask the same by the client of openai and do nothing else.
"""

from __future__ import annotations

import asyncio
import base64
import json
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openai

from benchmarks.results_file import write
from whiten_index import load_encoder

LATENCY, DIM, ROUNDS, SECONDS = 0.05, 384, 3, 6
LIMITS = ((16, 4), (16, 8), (16, 16), (64, 8))  # texts a request, requests at once


def endpoint(texts_at_once: int, requests_at_once: int, port: Any) -> None:
    """Answer on a free port, which is put into ``port``."""
    row = np.random.default_rng(0).standard_normal(DIM).astype("<f4")
    packed, under_way = base64.b64encode(row.tobytes()).decode(), 0

    def answer(texts: list[str]) -> bytes:
        data = [{"object": "embedding", "index": n, "embedding": packed} for n in range(len(texts))]
        usage = {"prompt_tokens": len(texts), "total_tokens": len(texts)}
        return json.dumps({"object": "list", "data": data, "model": "m", "usage": usage}).encode()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal under_way
        while head := await _head(reader):
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            texts = json.loads(await reader.readexactly(length))["input"]
            under_way += 1
            status, body = b"429 Too Many Requests", b"{}"
            if len(texts) > texts_at_once:
                status = b"413 Content Too Large"
            elif under_way <= requests_at_once:
                status, body = b"200 OK", answer(texts)
                await asyncio.sleep(LATENCY)
            under_way -= 1
            writer.write(
                b"HTTP/1.1 %b\r\ncontent-type: application/json\r\nretry-after: 0.05\r\n"
                b"content-length: %d\r\n\r\n%b" % (status, len(body), body)
            )

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


async def _head(reader: asyncio.StreamReader) -> bytes:
    """Return the head of the next request, nothing at the end of a connection."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


def client_alone(url: str, texts: list[str], requests_at_once: int) -> float:
    """Return texts a second of threads that send the same request again and again."""
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
    body = {"input": texts, "model": "m", "encoding_format": "base64"}
    until = time.perf_counter() + SECONDS

    def ask(_: int) -> int:
        count = 0
        while time.perf_counter() < until:
            client.post("/embeddings", cast_to=object, body=body)
            count += len(texts)
        return count

    started = time.perf_counter()
    with ThreadPoolExecutor(requests_at_once) as pool:
        total = sum(pool.map(ask, range(requests_at_once)))
    return total / (time.perf_counter() - started)


def measure() -> Iterator[dict[str, Any]]:
    """Yield a row for each pair of limits."""
    for texts_at_once, requests_at_once in LIMITS:
        port: Any = multiprocessing.Queue()
        args = texts_at_once, requests_at_once, port
        process = multiprocessing.Process(target=endpoint, args=args, daemon=True)
        process.start()
        url = f"http://127.0.0.1:{port.get()}/v1"
        most, rates = texts_at_once * requests_at_once / LATENCY, list[float]()
        for number in range(ROUNDS):
            encoder = load_encoder("openai:m", base_url=url)
            texts = [f"text {number} {row} of some words" for row in range(int(SECONDS * most))]
            started = time.perf_counter()
            encoder.encode(texts)
            rates.append(len(texts) / (time.perf_counter() - started))
        alone = client_alone(url, texts[:texts_at_once], requests_at_once)
        process.terminate()
        yield {
            "texts_at_once": texts_at_once, "requests_at_once": requests_at_once, "limit": most,
            "texts_a_second": statistics.median(rates), "rounds": rates,
            "client_alone": alone,
        }  # fmt: skip


if __name__ == "__main__":
    write("api", measure())
