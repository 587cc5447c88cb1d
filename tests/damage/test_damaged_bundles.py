"""Damage to an index with its lists on disk is refused with an error that says what to do.

This file is the child too: run with a folder, it opens and searches the index there once for
every damage, each in a separate fork, and prints a line for each.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PLACES, FLIPS = 20, 120
# Where FAISS would read what nobody has checked.
CHECKS: dict[str, dict[str, Any]] = {"full": {}, "sizes": {"verify": "manifest"}}


def files_of(out: Path) -> list[Path]:
    """Return ``CURRENT`` and the files of the published version, those without bytes left out."""
    version = json.loads((out / "CURRENT").read_text())["version"]
    files = [out / "CURRENT", *sorted((out / "versions" / version).iterdir())]
    return [path for path in files if path.stat().st_size]


def cuts(files: list[Path]) -> Iterator[tuple[Path, int]]:
    """Yield a file and how long it is left, ``PLACES`` times: each file is cut at its very end."""
    random = np.random.default_rng(0)
    for number in range(PLACES):
        path = files[number % len(files)]
        size = path.stat().st_size
        yield path, size - 1 if number < len(files) else int(random.integers(size))


def flips(files: list[Path]) -> Iterator[tuple[Path, int]]:
    """Yield a file and the number of a bit, ``FLIPS`` times over all the bytes, each file in turn.

    By their sizes alone the small files, which say what the others are, would hardly be hit.
    """
    random = np.random.default_rng(1)
    for number in range(FLIPS):
        path = files[number % len(files)]
        yield path, int(random.integers(path.stat().st_size * 8))


def damages(out: Path) -> Iterator[tuple[Path, str, bytes]]:
    files = files_of(out)
    for path, size in cuts(files):
        yield path, f"cut to {size}", path.read_bytes()[:size]
    for path, bit in flips(files):
        data = bytearray(path.read_bytes())
        data[bit // 8] ^= 1 << bit % 8
        yield path, f"bit {bit}", bytes(data)


def child(folder: str) -> int:
    """Print, for each damage and check, what opening and searching the index comes to."""
    import faiss

    from whiten_index import open_index
    from whiten_index.errors import WhitenIndexError

    faiss.omp_set_num_threads(1)
    out = Path(folder)
    dim = open_index(out).dim
    queries = np.random.default_rng(2).standard_normal((5, dim)).astype(np.float32)

    def outcome(options: dict[str, Any]) -> dict[str, Any]:
        try:
            index = open_index(out, **options)
        except WhitenIndexError as error:
            return {"refused": type(error).__name__, "message": str(error)}
        try:
            index.search_embeddings(queries, top_k=3)
        except Exception as error:
            return {"opened": True, "search": repr(error)[:200]}
        return {"opened": True}

    for path, damage, data in damages(out):
        whole = path.read_bytes()
        path.write_bytes(data)
        for name, options in CHECKS.items():
            facts = {"file": path.name, "damage": damage, "check": name}
            print(json.dumps({**facts, **in_fork(outcome, options)}), flush=True)
        path.write_bytes(whole)
    open_index(out, verify="full").search_embeddings(queries)
    return 0


def in_fork(work: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return what the work finds, or how the process that did it died."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            answer = work(options)
        except BaseException as error:
            answer = {"leaked": repr(error)[:300]}
        os.write(writing, json.dumps(answer).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return json.loads(answer) if status == 0 and answer else {"died": status}


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    from tests.helpers.bad_input import run_python
    from tests.helpers.builds import build, put_lists_on_disk, random_rows, write_rows

    root = tmp_path_factory.mktemp("damaged")
    titles = [f"title {i}" for i in range(300)]
    corpus = write_rows(root / "c.parquet", random_rows(5, rows=300), title=titles)
    build(root / "out", corpus, factory="IVF4,PQ4x4", keep=("title",), k=8)
    put_lists_on_disk(root / "out")
    output = run_python(__file__, root / "out")
    return [json.loads(line) for line in output.splitlines()]


def test_every_damage_is_refused(lines: list[Any]) -> None:
    checked = [line for line in lines if line["check"] == "full"]
    assert len(checked) == PLACES + FLIPS
    for line in checked:
        assert line.get("refused") == "ArtifactError", line
        assert line["file"] in line["message"], line
        assert any(word in line["message"] for word in ("restore", "build", "rollback")), line


def test_sizes_alone_tell_cuts_and_damage_to_the_manifest(lines: list[Any]) -> None:
    """A flipped bit in another file may go unnoticed, or end the process."""
    small = {"CURRENT", "manifest.json"}
    seen = [line for line in lines if line["damage"].startswith("cut") or line["file"] in small]
    assert len(seen) > 2 * PLACES
    for line in seen:
        assert line.get("refused") == "ArtifactError", line
    passed = Counter(line["file"] for line in lines if line.get("opened"))
    assert passed["index.faiss"] > 0, "what is not read is not checked"


if __name__ == "__main__":
    sys.exit(child(sys.argv[1]))
