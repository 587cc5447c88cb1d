"""The server beside calls of the library in process, with wrk as the load.

Run ``WHITEN_INDEX_DATA=… python -m benchmarks.serving WORK_FOLDER [--soak]`` on a calm machine with
Debian's package wrk. 237,766 sentences of Wikinews are indexed at k = 128 in the work folder; then
client and library take turns. ``--soak`` keeps 64 clients busy for ten minutes while 50 versions
are published.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import json
import re
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.results_file import data_folder, write
from whiten_index import BuildConfig, build_index, open_index
from whiten_index.index.library import INDEX, load_faiss
from whiten_index.search.search_index import SearchIndex
from whiten_index.versions.retention import prune

QUERIES, ROUNDS, SECONDS, CLIENTS = 1_000, 5, 6, 64
ENCODED = 250  # texts that the encoder alone is given at once
SOAK_ROWS, SOAK_VERSIONS, SOAK_SECONDS = 5_000, 50, 600
_SCRIPT = """
local bodies, n = {}, 0
for line in io.lines("BODIES") do bodies[#bodies + 1] = line end
wrk.method, wrk.headers["content-type"] = "POST", "application/json"
request = function() n = n % #bodies + 1; return wrk.format(nil, nil, nil, bodies[n]) end
done = function(summary, latency)
  local e = summary.errors
  io.write(string.format("FOUND %d %d %d %d %d\\n", summary.requests, summary.duration,
    latency:percentile(50), latency:percentile(99),
    e.connect + e.read + e.write + e.status + e.timeout))
end
"""


def indexed(work: Path, texts: Path, **options: Any) -> Path:
    """Build an index of texts in a folder, whose store is shared."""
    given: dict[str, Any] = {
        "k": 128, "exponent": 0.25, "center": False, "max_length": 256, "pooling": "mean",
        "store": str(work / "store"), **options,
    }  # fmt: skip
    config = BuildConfig(
        corpus=(str(texts),), text_columns=("text",), model="all-MiniLM-L6-v2", **given
    )
    return Path(build_index(config).out)


@contextlib.contextmanager
def server(index: Path, *options: str) -> Iterator[tuple[str, int]]:
    """Serve an index in another process; give its address and its process number."""
    command = [sys.executable, "-c", "from whiten_index.cli import main; main()", "serve", "-q"]
    process = subprocess.Popen(
        [*command, str(index), "--port", "0", *options], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        yield process.stderr.readline().split()[0], process.pid
    finally:
        process.terminate()
        process.wait()


def load(work: Path, url: str, bodies: Sequence[Any], clients: int, seconds: int) -> dict[str, Any]:
    """Send bodies by turns from so many clients; return requests a second and latencies."""
    (work / "bodies.jsonl").write_text("\n".join(map(json.dumps, bodies)) + "\n")
    script = work / "load.lua"
    script.write_text(_SCRIPT.replace("BODIES", str(work / "bodies.jsonl")))
    done = subprocess.run(
        ["wrk", "-t1", f"-c{clients}", f"-d{seconds}s", "-s", str(script), url],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    found = re.search(r"FOUND (\d+) (\d+) (\d+) (\d+) (\d+)", done.stdout)
    assert found is not None, done.stdout
    requests, duration, half, most, errors = map(int, found.groups())
    rate = 1e6 * requests / duration
    return {"rate": rate, "p50_ms": half / 1e3, "p99_ms": most / 1e3, "errors": errors,
            "requests": requests}  # fmt: skip


def in_process(index: SearchIndex, texts: Sequence[str], seconds: float) -> dict[str, float]:
    """Search one text after another; return the latencies."""
    spent, end, number = list[float](), time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        started = time.perf_counter()
        index.search(texts[number % len(texts)])
        spent.append(1000 * (time.perf_counter() - started))
        number += 1
    half, most = np.percentile(spent, [50, 99])
    return {"p50_ms": float(half), "p99_ms": float(most)}


def rate_of(run: Any, pieces: Sequence[Any], seconds: float) -> float:
    """Return items a second that ``run`` does, given pieces by turns."""
    done, started, number = 0, time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        piece = pieces[number % len(pieces)]
        run(piece)
        done, number = done + len(piece), number + 1
    return done / (time.perf_counter() - started)


def measure(work: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each comparison, measured in rounds by turns."""
    texts = data_folder() / "sentences" / "wikinews_en.parquet"
    out = indexed(work, texts, out=str(work / "index"))
    asked = pq.read_table(data_folder() / "sentences" / "wikipedia_en.parquet")["text"]
    drawn = np.random.default_rng(0).choice(len(asked), QUERIES, replace=False)
    queries = [" ".join(asked[int(n)].as_py().split()[:12]) for n in drawn]
    index = open_index(out, preload=True)
    raw = index.encode(queries)
    faiss = load_faiss()
    threads = faiss.omp_get_max_threads()
    bare = faiss.read_index(str(index.bundle.source.file(INDEX)))
    one_text = [{"texts": text} for text in queries]
    one_vector = [{"embeddings": [row.tolist()]} for row in raw.astype(float).round(6)]
    reduced = [{"model": out.name, "input": text} for text in queries]
    packed = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in raw]
    many = [{"embeddings": packed[n : n + CLIENTS]} for n in range(0, 900, CLIENTS)]
    batches = [queries[at : at + ENCODED] for at in range(0, QUERIES, ENCODED)]
    alone = [raw[n : n + 1] for n in range(QUERIES)]
    together = [raw[n : n + CLIENTS] for n in range(0, 900, CLIENTS)]
    rounds: dict[str, list[dict[str, Any]]] = {}
    with server(out) as (url, _):
        found, made = url + "/v1/search", url + "/v1/embeddings"

        def served(path: str, bodies: list[Any], clients: int) -> dict[str, Any]:
            return load(work, path, bodies, clients, SECONDS)

        def faiss_rate(pieces: list[Any]) -> float:
            # For one query, one thread is the quickest.
            faiss.omp_set_num_threads(1 if len(pieces[0]) == 1 else threads)
            return rate_of(lambda piece: bare.search(piece, 10), pieces, SECONDS)

        pairs: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
            "one client's text": (
                lambda: served(found, one_text, 1),
                lambda: in_process(index, queries, SECONDS),
            ),
            "texts of 64 clients": (
                lambda: served(found, one_text, CLIENTS),
                lambda: rate_of(index.encode, batches, SECONDS),
            ),
            "texts of 64 clients to vectors": (
                lambda: served(made, reduced, CLIENTS),
                lambda: rate_of(index.encode, batches, SECONDS),
            ),
            "one client's embedding": (
                lambda: served(found, one_vector, 1),
                lambda: faiss_rate(alone),
            ),
            "embeddings of 64 clients": (
                lambda: served(found, one_vector, CLIENTS),
                lambda: faiss_rate(together),
            ),
            "64 embeddings a request, 4 clients": (
                lambda: served(found, many, 4),
                lambda: faiss_rate(together),
            ),
        }
        served(found, one_text, CLIENTS)
        for _ in range(ROUNDS):
            for name, (ours, library) in pairs.items():
                rounds.setdefault(name, []).append({"server": ours(), "library": library()})
    kind, rows = index.bundle.manifest["factory"]["built"], len(index)
    for name, each in rounds.items():
        yield {"what": name, "rows": rows, "factory": kind, "rounds": each}


def resident(pid: int) -> int:
    """Return the bytes in memory that belong to a process alone."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(1024 * int(n) for n in re.findall(r"Private_\w+:\s+(\d+) kB", text))


def soak(work: Path) -> Iterator[dict[str, Any]]:
    """Yield what ten minutes of 64 clients found while versions came and went."""
    texts = pq.read_table(data_folder() / "sentences" / "wikinews_en.parquet")["text"]
    corpus = work / "soak.parquet"

    def publish(release: int) -> Path:
        kept = {"text": texts[:SOAK_ROWS], "release": pa.array([release] * SOAK_ROWS)}
        pq.write_table(pa.table(kept), corpus)
        return indexed(work, corpus, out=str(work / "soak"), keep=("release",), force=True)

    out, stop, seen = publish(0), threading.Event(), dict[str, set[int]]()
    wrong = list[str]()
    with server(out, "--reload-seconds", "1") as (url, pid):

        def check() -> None:
            body = json.dumps({"texts": "a storm in the north", "top_k": 20}).encode()
            asked = urllib.request.Request(
                url + "/v1/search", body, {"content-type": "application/json"}
            )
            while not stop.is_set():
                try:
                    with urllib.request.urlopen(asked) as answer:
                        value = json.load(answer)
                except OSError as error:
                    wrong.append(str(error))
                    continue
                releases = {hit["columns"]["release"] for hit in value["results"][0]["hits"]}
                seen.setdefault(value["version"], set()).update(releases)

        checker = threading.Thread(target=check)
        loads: dict[str, Any] = {}
        bodies = [{"texts": str(texts[n])[:80]} for n in range(1_000)]
        loading = threading.Thread(
            target=lambda: loads.update(
                load(work, url + "/v1/search", bodies, CLIENTS - 1, SOAK_SECONDS)
            )
        )
        started = time.monotonic()
        checker.start()
        loading.start()
        memory = list[int]()
        for release in range(1, SOAK_VERSIONS + 1):
            publish(release)
            prune(out, keep=2)
            memory.append(resident(pid))
            due = started + release * SOAK_SECONDS / SOAK_VERSIONS
            time.sleep(max(due - time.monotonic(), 0))
        loading.join()
        stop.set()
        checker.join()
    yield {
        "what": "soak",
        "seconds": SOAK_SECONDS,
        "clients": CLIENTS,
        "published": SOAK_VERSIONS,
        "versions_seen": len(seen),
        "mixed": sum(len(releases) != 1 for releases in seen.values()),
        "requests": loads["requests"],
        "errors": loads["errors"] + len(wrong),
        "memory_first_mb": statistics.median(memory[5:15]) / 1e6,
        "memory_last_mb": statistics.median(memory[-10:]) / 1e6,
    }


def main(given: Sequence[str] | None = None) -> None:
    """Measure."""
    parser = argparse.ArgumentParser("python -m benchmarks.serving", description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("--soak", action="store_true")
    arguments = parser.parse_args(given)
    arguments.work.mkdir(parents=True, exist_ok=True)
    if arguments.soak:
        write("serving_soak", soak(arguments.work))
    else:
        write("serving", measure(arguments.work))


if __name__ == "__main__":
    main()
