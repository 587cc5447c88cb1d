"""An update by ids in FAISS, and one that copies codes, for kinds of which codes can be copied.

Run ``python -m benchmarks.stable_ids [ROWS]``: rows of 128 dims, of which a night changes 1 %,
brings 0.5 % and takes 0.5 %.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from benchmarks.clustered import clustered_rows
from benchmarks.results_file import write
from whiten_index.index.codes import _flat, list_codes, list_ids, remove_rows, reuse_codes

_DIM, _ROUNDS = 128, 5
_CODES = ("Flat", "SQfp16", "SQ8", "RaBitQ")
CHANGED, NEW, GONE = 0.01, 0.005, 0.005


def measure(rows: int) -> Iterator[dict[str, Any]]:
    """Yield a line for each kind and way: seconds of CPU, and equal codes."""
    vectors = np.concatenate(list(clustered_rows(rows + round(rows * (CHANGED + NEW)), dim=_DIM)))
    lists = f"IVF{4 * int(rows**0.5)},"
    for name in (*_CODES, *(lists + code for code in _CODES)):
        made = faiss.index_factory(_DIM, name, faiss.METRIC_INNER_PRODUCT)
        made.train(vectors[:rows])
        trained = faiss.clone_index(made)
        made.add(vectors[:rows])
        rng = np.random.default_rng(0)
        out = rng.choice(rows, round(rows * (CHANGED + GONE)), replace=False)
        for way, old in ((_by_ids, _with_ids(trained, vectors[:rows])), (_by_copies, made)):
            spent, equal = [], None
            for _ in range(_ROUNDS):
                seconds, after, ids = way(old, vectors[rows:], np.sort(out), rows)
                spent.append(seconds)
                equal = _kept(made, after, np.delete(np.arange(rows), out), ids)
            yield {
                "index": name, "way": way.__name__.lstrip("_"), "rows": rows,
                "cpu_seconds": spent, "codes_kept": equal,
            }  # fmt: skip


Ids = NDArray[np.int64]
Found = tuple[float, Any, Ids]  # seconds of CPU, the index, its ids of the rows that stay


def _with_ids(trained: Any, vectors: NDArray[np.float32]) -> Any:
    """Return an index of rows by their ids; flat kinds need a map."""
    index = trained if isinstance(trained, faiss.IndexIVF) else faiss.IndexIDMap2(trained)
    index.add_with_ids(vectors, np.arange(len(vectors)))
    return index


def _by_ids(made: Any, new: NDArray[np.float32], out: Ids, rows: int) -> Found:
    """Remove rows by their ids and add others."""
    index = faiss.clone_index(made)
    start = time.process_time()
    index.remove_ids(faiss.IDSelectorBatch(out))
    index.add_with_ids(new, np.arange(rows, rows + len(new)))
    return time.process_time() - start, index, np.delete(np.arange(rows), out)


def _by_copies(made: Any, new: NDArray[np.float32], out: Ids, rows: int) -> Found:
    """Copy the codes of the rows that stay into an emptied index, with new rows behind them."""
    empty = faiss.clone_index(made)
    whole = SimpleNamespace(index=empty)
    remove_rows(whole)
    start = time.process_time()
    stay = np.delete(np.arange(rows), out)
    old_rows = np.concatenate([stay, np.full(len(new), -1)])
    reuse_codes(SimpleNamespace(index=made), whole, old_rows, [new])
    return time.process_time() - start, empty, np.arange(len(stay))


def _kept(made: Any, after: Any, rows: Ids, ids: Ids) -> bool:
    """Return whether rows of an index have the same codes in another, which knows them by ids."""
    before, codes = _codes(made), _codes(after)
    pairs = zip(rows.tolist(), ids.tolist(), strict=True)
    return all(before[row] == codes[name] for row, name in pairs)


def _codes(index: Any) -> dict[int, bytes]:
    """Return the code of each row, by its id or number."""
    if isinstance(index, faiss.IndexIDMap2):
        codes = _codes(faiss.downcast_index(index.index))
        return {
            int(name): codes[row] for row, name in enumerate(faiss.vector_to_array(index.id_map))
        }
    if isinstance(index, faiss.IndexIVF):
        found = {}
        for number in range(index.nlist):
            ids = list_ids(index, number).tolist()
            for row, code in zip(ids, list_codes(index, number, np.arange(len(ids))), strict=True):
                found[row] = code.tobytes()
        return found
    return {number: code.tobytes() for number, code in enumerate(_flat(index))}


def main(rows: str = "200000") -> int:
    """Write the results of one run."""
    faiss.omp_set_num_threads(1)
    print(write("stable_ids", measure(int(rows))))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
