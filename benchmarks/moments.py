"""Our moments beside plain matrix products and scikit-learn's IncrementalPCA, by turns in one run.

Run ``python -m benchmarks.moments [--rows N] [--rounds R] [--threads T]``: float32 rows of 768
dims, as embeddings come. Matrix products are BLAS's general ones, XᵀY of two arrays that have the
right type beforehand, 2nd² operations; ours know that XᵀX is symmetric, so a speed above theirs is
no mistake. IncrementalPCA keeps every component, and so the whole covariance.
"""

from __future__ import annotations

import argparse
import importlib
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.encoding import Rounds, Spent, ratio, timed
from benchmarks.results_file import write
from whiten_index.whitening.moments import Moments

DIM, RATIO_OF_MEAN = 768, 100.0
OURS, GEMM = "ours, float64", "dgemm"
# Five times the dims is what scikit-learn takes by itself. The longer the batch, the quicker, up to
# one batch of all rows: that is the singular value decomposition of them, no longer incremental.
# It computes in the type it is given: in float64 it is as exact as ours, in float32 not.
PEER, PEER_AT_ONCE = "IncrementalPCA, batches of 5 d", "IncrementalPCA, one batch"
PEER_FLOAT64 = "IncrementalPCA in float64, batches of 5 d"
PEER_STREAM, _STREAM_ROWS = "IncrementalPCA in float64, batches of 1,024", 1024
_ROWS, _ROUNDS, _ACCURACY_ROWS = 24_576, 5, 8192
_GEMM_ROWS = 4096
_WAYS = ("whole", f"blocks of {_GEMM_ROWS:,}")

Contenders = Mapping[str, Callable[[], Any]]


def made_rows(n: int, d: int, *, ratio_of_mean: float) -> NDArray[np.float32]:
    """Return correlated float32 rows (n, d) whose mean is so many times their spread."""
    rng = np.random.default_rng(0)
    mixing = rng.standard_normal((d, d)) / d**0.5
    rows: NDArray[np.float64] = rng.standard_normal((n, d)) @ mixing + ratio_of_mean
    return rows.astype(np.float32)


def incremental_pca(rows: NDArray[np.floating], batch: int) -> NDArray[np.float64]:
    """Return the covariance that scikit-learn's IncrementalPCA makes of rows (n, d)."""
    fitted = _peer(rows, batch)
    components = np.asarray(fitted.components_, np.float64)
    return (components.T * np.asarray(fitted.explained_variance_, np.float64)) @ components


def contenders(rows: NDArray[np.float32]) -> dict[str, Callable[[], Any]]:
    """Return what takes part, by name; each works on all rows (n, d) whenever it is called."""
    n, d = rows.shape
    found: dict[str, Callable[[], Any]] = {OURS: partial(Moments.of, rows)}
    left, right = (rows.astype(np.float64) for _ in range(2))
    for way, step in zip(_WAYS, (n, _GEMM_ROWS), strict=True):
        found[f"{GEMM}, {way}"] = partial(_gemm, left, right, step)
    found[PEER] = partial(_peer, rows, 5 * d)
    found[PEER_AT_ONCE] = partial(_peer, rows, n)
    double = rows.astype(np.float64)
    found[PEER_FLOAT64] = partial(_peer, double, 5 * d)
    found[PEER_STREAM] = partial(_peer, double, _STREAM_ROWS)
    return found


def rounds_of(taking_part: Contenders, rounds: int) -> Rounds:
    """Return what each took in each round, after one that does not count; who begins changes."""
    for run in taking_part.values():
        run()
    spent: Rounds = {name: [] for name in taking_part}
    names = list(taking_part)
    for number in range(rounds):
        at = number % len(names)
        for name in names[at:] + names[:at]:
            spent[name].append(timed(taking_part[name], "cpu")[1])
    return spent


def results(spent: Rounds, shape: tuple[int, int]) -> Iterator[dict[str, Any]]:
    """Yield what each contender took, and the ratios by round."""
    n, d = shape
    for name, each in spent.items():
        cpu, wall = ([getattr(one, clock) for one in each] for clock in ("cpu", "wall"))
        median = statistics.median(wall)
        yield {
            "figure": "contender",
            "contender": name,
            "cpu_seconds": cpu,
            "wall_seconds": wall,
            "rows_per_second": n / median,
            "gigaflops_as_gemm": 2 * n * d * d / median / 1e9,
        }
    pairs = [(GEMM, _quicker(*(spent[f"{GEMM}, {way}"] for way in _WAYS)))]
    pairs += [(peer, spent[peer]) for peer in (PEER_STREAM, PEER_FLOAT64, PEER, PEER_AT_ONCE)]
    for other, theirs in pairs:
        for clock in ("cpu", "wall"):
            taken = [[getattr(one, clock) for one in each] for each in (theirs, spent[OURS])]
            yield ratio(f"speed of {OURS} / {other}", *taken, of=OURS, to=other, clock=clock)


def accuracy(n: int, d: int) -> Iterator[dict[str, Any]]:
    """Yield the errors of the covariance, where the mean is a hundred times the spread."""
    rows = made_rows(n, d, ratio_of_mean=RATIO_OF_MEAN)
    truth = covariance_by_definition(rows)
    found = {OURS: Moments.of(rows).covariance(), PEER: incremental_pca(rows, 5 * d)}
    found[PEER_FLOAT64] = incremental_pca(rows.astype(np.float64), 5 * d)
    for name, covariance in found.items():
        error = np.linalg.norm(covariance - truth) / np.linalg.norm(truth)
        yield {
            "figure": "accuracy",
            "contender": name,
            "rows": n,
            "dims": d,
            "mean_to_spread": RATIO_OF_MEAN,
            "frobenius_error": float(error),
        }


def covariance_by_definition(rows: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return the covariance of rows (n, d) in two passes, centred in extended precision."""
    extended = rows.astype(np.longdouble)
    centred = (extended - extended.mean(axis=0)).astype(np.float64)
    covariance: NDArray[np.float64] = centred.T @ centred / (len(rows) - 1)
    return covariance


def _gemm(a: NDArray[np.floating], b: NDArray[np.floating], step: int) -> None:
    product = np.empty((a.shape[1], b.shape[1]), a.dtype)
    for i in range(0, len(a), step):
        np.matmul(a[i : i + step].T, b[i : i + step], out=product)


def _quicker(one: Sequence[Spent], other: Sequence[Spent]) -> list[Spent]:
    """Return the better figures of every round."""
    pairs = zip(one, other, strict=True)
    return [Spent(min(a.cpu, b.cpu), min(a.wall, b.wall)) for a, b in pairs]


def _peer(rows: NDArray[np.floating], batch: int) -> Any:
    return _sklearn().IncrementalPCA(n_components=None, batch_size=batch).fit(rows)


def _sklearn() -> Any:
    return importlib.import_module("sklearn.decomposition")


def _setup(shape: tuple[int, int], rounds: int) -> dict[str, Any]:
    _sklearn()
    pools = importlib.import_module("threadpoolctl").threadpool_info()
    return {
        "figure": "setup",
        "rows": shape[0],
        "dims": shape[1],
        "dtype": "float32",
        "rounds": rounds,
        "load_average": os.getloadavg()[0],
        "scikit-learn": version("scikit-learn"),
        "blas": [
            {key: pool.get(key) for key in ("prefix", "version", "architecture", "num_threads")}
            for pool in pools
            if pool["user_api"] == "blas"
        ],
    }


def measure(n: int, d: int, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield all results."""
    yield _setup((n, d), rounds)
    rows = made_rows(n, d, ratio_of_mean=1.0)
    yield from results(rounds_of(contenders(rows), rounds), (n, d))
    yield from accuracy(min(n, _ACCURACY_ROWS), d)


def main(given: Sequence[str] | None = None) -> None:
    """Measure what the arguments ask for and write the results."""
    parser = argparse.ArgumentParser("python -m benchmarks.moments", description=__doc__)
    parser.add_argument("--rows", type=int, default=_ROWS, help="more than 3,840 (%(default)s)")
    parser.add_argument("--rounds", type=int, default=_ROUNDS, help="%(default)s")
    parser.add_argument("--threads", type=int, help="of BLAS; all cores by default")
    asked = parser.parse_args(given)
    _sklearn()  # its BLAS, which is not numpy's, has to be there to be limited
    limits = importlib.import_module("threadpoolctl").threadpool_limits
    with limits(asked.threads, user_api="blas"):
        print(write("moments", measure(asked.rows, DIM, asked.rounds)))


if __name__ == "__main__":
    main()
