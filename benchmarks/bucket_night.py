"""Bytes that a night moves to and from a bucket, beside the bytes of what it puts there.

Run ``python -m benchmarks.bucket_night WORK [ROWS]``: rows of 384 dims in a column of embeddings,
of which a night changes 1 %, brings 0.5 % and takes 0.5 %. The server is moto's, on this machine.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
from moto.server import ThreadedMotoServer

from benchmarks.clustered import clustered_rows
from benchmarks.nightly import _next, _timed, _write_embeddings
from benchmarks.results_file import write

_DIM, _PIECE = 384, 1 << 16
_BUCKET = "nights"


class CountingProxy:
    """Passes bytes on to a server, and counts those sent there and received."""

    def __init__(self, host: str, port: int) -> None:
        self._server, self._listener = (host, port), socket.create_server(("127.0.0.1", 0))
        self.port, self.moved = int(self._listener.getsockname()[1]), Counter[str]()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            server = socket.create_connection(self._server)
            for name, one, other in (("sent", client, server), ("received", server, client)):
                threading.Thread(target=self._pass, args=(name, one, other), daemon=True).start()

    def _pass(self, name: str, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(_PIECE):
                self.moved[name] += len(data)
                other.sendall(data)
            other.shutdown(socket.SHUT_WR)
        except OSError:
            one.close()
            other.close()


def measure(work: Path, rows: int) -> Iterator[dict[str, Any]]:
    """Yield a line for the build, and for a night on its machine and on one with an empty cache."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    proxy = CountingProxy(host, port)
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}", "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }  # fmt: skip
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
    client.create_bucket(Bucket=_BUCKET)
    embeddings = np.concatenate(list(clustered_rows(2 * rows, dim=_DIM))).astype(np.float16)
    rng, index = np.random.default_rng(0), f"s3://{_BUCKET}/index"
    kept = {row: embeddings[row] for row in range(rows)}
    column = ("--embedding-column", "embedding", "--id-column", "id", "--k", 128)
    build = ("build", work / "corpus", *column, "--whiten", "whitening", "--out", index)
    steps = (("build", "one", build), ("night", "one", ()), ("night", "another", ()))
    for what, machine, command in steps:
        if what == "night":
            first = max(kept) + 1
            kept = _next(kept, rng, lambda used, first=first: embeddings[first + used])
        _write_embeddings(work / "corpus", kept)
        os.environ["WHITEN_INDEX_CACHE"] = str(work / machine)
        before = _objects(client)
        proxy.moved.clear()
        done = _timed(*(command or ("update", index)))
        after = _objects(client)
        new = {name: size for name, size in after.items() if name not in before}
        yield {
            "what": what, "machine": machine, "rows": rows, **proxy.moved,
            "new_objects": len(new), "new_bytes": sum(new.values()),
            "bytes_there": sum(before.values()), "decision": done["report"].get("decision"),
        }  # fmt: skip
    server.stop()


def _objects(client: Any) -> dict[str, int]:
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=_BUCKET)
    return {each["Key"]: each["Size"] for page in pages for each in page.get("Contents", ())}


def main(work: str, rows: str = "100000") -> int:
    """Write the results of one run."""
    folder = Path(work)
    folder.mkdir(parents=True, exist_ok=True)
    print(write("bucket_night", measure(folder, int(rows))))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
