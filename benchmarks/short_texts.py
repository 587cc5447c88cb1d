"""What mean and spectrum alone choose for single sentences, on semantic textual similarity.

Run ``WHITEN_INDEX_DATA=… python -m benchmarks.short_texts``. Every set is fitted on its own
sentences, both sides, and scored by Spearman's correlation × 100 over all of its pairs at once.
"""

from __future__ import annotations

import functools
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.choice import constant_rules
from benchmarks.intervals import Figure, interval_over_sets
from benchmarks.results_file import data_folder, write
from benchmarks.spectral_tempering import spectral_tempering
from whiten_index import Moments, Whitening, load_encoder
from whiten_index.evaluation.metrics import spearman
from whiten_index.whitening.selection import Setting, choose_by_spectrum, settings
from whiten_index.whitening.spectrum import unit_rows
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig

SETS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STSB", "SICKR")
LAYERS, WIDTHS = (None, 1), (32, 64, 128, 256)
GRID_EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)

Pair = tuple[NDArray[np.floating], NDArray[np.floating]]
# Cosines (n,) of the pairs under the best setting of the grid, and by rule under the one it takes.
Cosines = tuple[NDArray[np.float64], dict[str, NDArray[np.float64]]]


def measure() -> Iterator[dict[str, Any]]:
    """Yield a row for each layer, set and width, and after each layer one of all its sets."""
    table = pq.read_table(data_folder() / "sts" / "sts_raw.parquet")
    table = table.filter(pc.and_(pc.equal(table["split"], "test"), pc.is_valid(table["score"])))
    for layer in LAYERS:
        options = {} if layer is None else {"layers": (layer,)}
        encoder = load_encoder("all-MiniLM-L6-v2", pooling="mean", max_length=256, **options)
        figures = defaultdict[str, list[tuple[int, Figure]]](list)
        for name in SETS:
            rows = table.filter(pc.equal(table["dataset"], name))
            first, second = (encoder.encode(rows[f"sentence{side}"].to_pylist()) for side in (1, 2))
            gold = rows["score"].to_numpy()
            distinct = np.unique(np.concatenate([first, second]), axis=0)
            raw = 100 * spearman(gold, _cosines((first, second)))
            facts = {"set": name, "layer": layer, "pairs": len(gold), "raw": raw}
            of_widths = list[Cosines]()
            for k in WIDTHS:
                row, cosines = _row((first, second), gold, Moments.of(distinct), k)
                of_widths.append(cosines)
                yield {**facts, "k": k, **row}
            for rule in of_widths[0][1]:
                figure = functools.partial(_lost, gold, of_widths, rule)
                figures[rule].append((len(gold), figure))
        intervals = {rule: interval_over_sets(each) for rule, each in figures.items()}
        yield {"group": "seven STS sets", "layer": layer, "lost": intervals}


def _lost(
    gold: NDArray[np.float64], of_widths: Sequence[Cosines], rule: str, at: NDArray[np.int64]
) -> float:
    """Return how far a rule's settings are below the best, on average, on pairs (m,) drawn."""
    found = [(spearman(gold[at], b[at]), spearman(gold[at], r[rule][at])) for b, r in of_widths]
    return 100 * statistics.mean(best - chosen for best, chosen in found)


def _row(
    pair: Pair, gold: NDArray[np.float64], moments: Moments, k: int
) -> tuple[dict[str, Any], Cosines]:
    def cosines(setting: Setting) -> NDArray[np.float64]:
        config = WhiteningConfig(k=k, exponent=setting.exponent, center=setting.center)
        fitted = Whitening.fit(moments, config)
        first, second = map(fitted.apply, pair)
        return _cosines((first, second))

    grid = [each for each in settings([k]) if each.exponent in GRID_EXPONENTS]
    figures = {each: 100 * spearman(gold, cosines(each)) for each in grid}
    whole = Whitening.fit(moments, WhiteningConfig(kind=Kind.PCA, k="full"))
    chosen, tempered = choose_by_spectrum(whole, k), spectral_tempering(whole.eigenvalues, k)
    best = max(figures, key=figures.__getitem__)
    by_rule = {
        "mean and spectrum": cosines(chosen),
        "Spectral Tempering": cosines(Setting(k, tempered, True)),
        **{rule: cosines(setting) for rule, setting in constant_rules(k).items()},
    }
    lost = {rule: figures[best] - 100 * spearman(gold, each) for rule, each in by_rule.items()}
    return {
        "best": figures[best],
        "lost": lost,
        "chosen": {"exponent": chosen.exponent, "center": chosen.center},
        "tempering_exponent": tempered,
    }, (cosines(best), by_rule)


def _cosines(pair: Pair) -> NDArray[np.float64]:
    first, second = (unit_rows(rows.astype(np.float64)) for rows in pair)
    found: NDArray[np.float64] = np.einsum("nk,nk->n", first, second)
    return found


if __name__ == "__main__":
    print(write("short_texts", measure()))
