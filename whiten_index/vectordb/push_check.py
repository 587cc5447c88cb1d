"""Comparison of the rows in a database with those that were pushed."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.corpus.arrow_types import times_as_numbers
from whiten_index.corpus.batches import ID
from whiten_index.index.exact import exact_neighbours
from whiten_index.paths import cut
from whiten_index.vectordb.database_writer import DatabaseWriter
from whiten_index.vectordb.push_config import PushConfig
from whiten_index.vectordb.push_source import PushSource
from whiten_index.vectordb.pushed_table import VECTOR, Layout, vectors_of

TOP_K, QUERIES = 10, 20
# Rounding of a coordinate of a unit vector.
_LOST = {"float32": 1e-6, "float16": 5e-4}
# Rounding of a score, a sum of k products.
_TIED = {"float32": 1e-5, "float16": 2e-3}
# Characters of a value in a fault.
_SHOWN = 120


def check_rows(
    source: PushSource,
    writer: DatabaseWriter,
    config: PushConfig,
    *,
    pending: bool,
    among: NDArray[np.int64] | None = None,
) -> tuple[dict[str, Any], list[str]]:
    """Compare a sample of rows, and search a pending table against brute force.

    Return counts and recalls for the report, and the faults, one sentence each.
    """
    found: dict[str, Any] = {"rows": writer.count(pending=pending)}
    faults = []
    if found["rows"] != len(source):
        faults.append(f"it counts {found['rows']:,} rows and should have {len(source):,}")
    total: NDArray[np.int64] | int = len(source) if among is None else among
    size = min(config.check, len(source) if among is None else len(among))
    rng = np.random.default_rng(0)
    rows = np.sort(rng.choice(total, size, replace=False)) if size else np.empty(0, np.int64)
    if not len(rows):
        return found, faults
    sent = pa.Table.from_batches(source.batches_of(rows))
    ids = list(dict.fromkeys(sent[ID].to_pylist()))
    there = writer.fetch(ids, source.layout, pending=pending)
    found["compared"] = len(rows)
    faults += differences(sent, there, source.layout)
    if pending:
        vectors = np.concatenate([vectors_of(batch) for batch in sent.to_batches()])
        # Vectors of zeros have no neighbours.
        queries = vectors[rng.permutation(np.flatnonzero(vectors.any(axis=1)))[:QUERIES]]
        found |= _searched(source, writer, queries)
        if found.get("exact_recall", 1) < 1:
            faults.append(
                f"exact search finds {found['exact_recall']:.0%} of the nearest rows of brute force"
            )
    return found, faults


def differences(sent: pa.Table, there: pa.Table, layout: Layout) -> list[str]:
    """Return the faults of rows that came back, one sentence a column."""
    mine, theirs = (
        {key: row for row, key in enumerate(_keys(each, layout))} for each in (sent, there)
    )
    lacking = [key for key in mine if key not in theirs]
    if lacking:
        return [f"{len(lacking):,} of {len(mine):,} rows are not there, such as {lacking[0]!r}"]
    there = there.take(pa.array([theirs[key] for key in mine], pa.int64()))
    faults = []
    for name in layout.kept:
        # Python knows fewer dates and times than Arrow.
        ours, came = (
            times_as_numbers(each[name].combine_chunks()).to_pylist() for each in (sent, there)
        )
        pairs = [pair for pair in zip(ours, came, strict=True) if not _same(*pair)]
        if pairs:
            was, now = (cut(repr(each), most=_SHOWN) for each in pairs[0])
            faults.append(
                f"column {name!r} of {len(pairs):,} rows came back changed: {now} for {was}"
            )
    one, two = (np.asarray(each[VECTOR].combine_chunks().flatten()) for each in (sent, there))
    lost = np.abs(one.astype(np.float64) - two).reshape(len(sent), -1).max(axis=1, initial=0)
    if off := np.count_nonzero(~(lost <= _LOST[layout.dtype])):
        faults.append(
            f"the vectors of {off:,} rows came back changed, by up to {np.nanmax(lost):.1e}"
        )
    return faults


def _same(one: Any, two: Any) -> bool:
    """Return whether a value came back; NaN may do so as null, at any depth."""
    if isinstance(one, float) and one != one:
        return two is None or two != two
    if isinstance(one, dict) and isinstance(two, dict):
        return one.keys() == two.keys() and all(_same(one[name], two[name]) for name in one)
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)):
        return len(one) == len(two) and all(map(_same, one, two))
    return bool(one == two)


def _keys(rows: pa.Table, layout: Layout) -> Iterator[Any]:
    columns = [rows[name].to_pylist() for name in layout.key]
    return iter(columns[0]) if len(columns) == 1 else zip(*columns, strict=True)


def _searched(
    source: PushSource, writer: DatabaseWriter, queries: NDArray[np.float32]
) -> dict[str, Any]:
    """Compare exact and approximate search with brute force over all vectors."""
    zeros = 0

    def vectors() -> Iterator[NDArray[np.float32]]:
        nonlocal zeros
        for block in source.vectors():
            live = block.any(axis=1)
            zeros += int(np.count_nonzero(~live))
            # Engines differ in how they rank zeros.
            if live.any():
                yield block if live.all() else block[live]

    found: dict[str, Any] = {"queries": len(queries)}
    best, _ = exact_neighbours(vectors(), queries, TOP_K)
    if zeros:
        found["zero_vectors"] = zeros
    if not len(queries):
        return found
    top_k = min(TOP_K, len(source) - zeros)
    least, tied = best[:, top_k - 1 : top_k], _TIED[source.layout.dtype]

    def recall(*, exact: bool) -> float:
        scores = -np.sort(-writer.search(queries, top_k, exact=exact, pending=True))
        # An exact score is that of its rank; a row of zeros may have any.
        most = best[:, :top_k] if exact and not zeros else np.inf
        return float(np.mean((scores >= least - tied) & (scores <= most + tied)))

    return found | {"exact_recall": recall(exact=True), "recall": recall(exact=False)}
