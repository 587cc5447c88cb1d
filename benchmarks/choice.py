"""What ``--whiten auto`` chooses, beside the best of a grid that only the judgements know.

Run ``WHITEN_INDEX_DATA=… python -m benchmarks.choice WORK_FOLDER [SET …]``. Every set is encoded
into a store in the work folder, from the last layer and from layer 1, and its transform chosen for
four widths by the product's own code. The rule has two knobs, how much each kind of piece counts
and how many standard errors a gentler transform may stay behind; the results say for each of their
values what was lost, so that they can be tuned on two sets and shown on the third.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.intervals import interval_over_sets
from benchmarks.judged_sets import GROUPS, JudgedSet, judged_set, ndcg, ndcg_each
from benchmarks.results_file import data_folder, write
from benchmarks.spectral_tempering import spectral_tempering
from whiten_index import BuildConfig
from whiten_index.pipeline.encode import EncodeReport, encode_corpus
from whiten_index.pipeline.fit import choose_setting, piece_evidence
from whiten_index.pipeline.pseudo_queries import Sample, sample_pieces
from whiten_index.progress import Progress, Stages
from whiten_index.store.sampling import CorpusEmbeddings
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.selection import (
    Setting,
    choose_by_scores,
    choose_by_spectrum,
    score_settings,
    settings,
)
from whiten_index.whitening.transform import Whitening
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig

LAYERS, WIDTHS = (None, 1), (32, 64, 128, 256)
GRID_EXPONENTS = (0.0, 0.25, 0.5, 0.75, 1.0)
# How much the sentences count, the windows having the rest.
TASKS = {"sentences": 1.0, "2 to 1": 2 / 3, "1 to 1": 1 / 2, "windows": 0.0}
ERRORS = (0.0, 0.5, 1.0, 2.0)


@dataclass(frozen=True, eq=False)
class Case:
    """A judged set, encoded from one layer."""

    judged: JudgedSet
    layer: int | None
    config: BuildConfig
    encoded: EncodeReport

    @classmethod
    def of(cls, name: str, layer: int | None, work: Path) -> Case:
        """Encode a set, or find it encoded."""
        judged = judged_set(data_folder(), name)
        config = BuildConfig(
            corpus=(str(judged.corpus),),
            text_columns=("title", "text"),
            id_column="id",
            row_filter=judged.row_filter,
            model="all-MiniLM-L6-v2",
            pooling="mean",
            layers=None if layer is None else (layer,),
            max_length=256,
            store=str(work / name),
        )
        return cls(judged, layer, config, encode_corpus(config))

    @cached_property
    def moments(self) -> Moments:
        """Moments of the whole corpus."""
        store, record = self.encoded.store, self.encoded.record
        return store.total_moments(part for part in record.parts if part.rows)

    @cached_property
    def documents(self) -> NDArray[np.float64]:
        """Embeddings (n, d) of the documents, as stored."""
        record = self.encoded.record
        return CorpusEmbeddings(self.encoded.store, record).at(np.arange(record.rows))

    @cached_property
    def ids(self) -> list[str]:
        """Ids of the documents."""
        record, store = self.encoded.record, self.encoded.store
        tables = (store.documents(part) for part in record.parts if part.rows)
        return [str(name) for table in tables for name in table["id"].to_pylist()]

    @cached_property
    def queries(self) -> NDArray[np.float64]:
        """Embeddings (q, d) of the queries."""
        assert self.encoded.work is not None
        encoder = self.encoded.work.encoder()
        return encoder.encode_queries(list(self.judged.queries.values())).astype(np.float64)

    def quality(self, setting: Setting) -> float:
        """Return nDCG@10 × 100 under a setting."""
        return float(self.of_each(setting).mean())

    def of_each(self, setting: Setting) -> NDArray[np.float64]:
        """Return nDCG@10 × 100 of each query (q,) under a setting."""
        config = WhiteningConfig(k=setting.k, exponent=setting.exponent, center=setting.center)
        fitted = Whitening.fit(self.moments, config)
        pair = (fitted.apply(rows) for rows in (self.documents, self.queries))
        return ndcg_each(self.judged, self.ids, *pair)


def measure(work: Path, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield a row for each set, layer and width, and then one for each group of sets and layer."""
    lost = defaultdict[tuple[str, int | None], list[dict[str, NDArray[np.float64]]]](list)
    for name, layer in itertools.product(names, LAYERS):
        case = Case.of(name, layer, work)
        stages = Stages(Progress())
        sample = sample_pieces(replace(case.encoded, stages=stages), 1_000, 0)
        assert isinstance(sample, Sample)
        pca = WhiteningConfig(kind=Kind.PCA, k="full")
        whole = Whitening.fit(case.moments, pca)
        held_out = Whitening.fit(case.moments - Moments.of(case.documents[sample.rows]), pca)
        facts = {
            "set": name,
            "layer": layer,
            "rows": len(case.ids),
            "sample": len(sample),
            "raw": ndcg(case.judged, case.ids, case.documents, case.queries),
        }
        for k in WIDTHS:
            # The product's way too where the others span fewer directions.
            fits = whole, held_out if held_out.k >= k else whole
            row, each = _row(case, sample, fits, k, stages)
            lost[name, layer].append(each)
            yield {**facts, "k": k, **row}
        yield {**facts, "k": None, **_free_width(case, stages)}
    for (group, sets), layer in itertools.product(GROUPS.items(), LAYERS):
        # A query is drawn with all of its widths.
        measured = [lost[name, layer] for name in sets if (name, layer) in lost]
        intervals = {}
        for rule in measured[0][0] if measured else ():
            means = [np.mean([each[rule] for each in widths], axis=0) for widths in measured]
            figures = [(len(each), functools.partial(_mean_at, each)) for each in means]
            intervals[rule] = interval_over_sets(figures)
        if measured:
            yield {"group": group, "layer": layer, "lost": intervals}


def _mean_at(values: NDArray[np.float64], at: NDArray[np.int64]) -> float:
    return float(values[at].mean())


def _free_width(case: Case, stages: Stages) -> dict[str, Any]:
    """Return what is chosen where the width is left open too."""
    setting = choose_setting(stages, case.encoded, case.config, None, case.moments).chosen
    widest = max(WIDTHS)
    return {
        "chosen": {"k": setting.k, "exponent": setting.exponent, "center": setting.center},
        "auto": case.quality(setting),
        "best_at_widest": max(case.quality(each) for each in settings([widest])),
        "widest": widest,
    }


def _row(
    case: Case, sample: Sample, fits: tuple[Whitening, Whitening], k: int, stages: Stages
) -> tuple[dict[str, Any], dict[str, NDArray[np.float64]]]:
    """Return the row of a width, and what each rule loses of each query (q,)."""
    whole, held_out = fits
    each = {setting: case.of_each(setting) for setting in settings([k])}
    true = {setting: float(values.mean()) for setting, values in each.items()}
    tempered = Setting(k, spectral_tempering(whole.eigenvalues, k), True)
    grid = {s: value for s, value in true.items() if s.exponent in GRID_EXPONENTS}
    config = replace(case.config, k=k)
    choice = choose_setting(stages, case.encoded, config, None, case.moments)
    variants = {}
    trials = piece_evidence(case.encoded, sample).trials
    sentences, windows = (score_settings(held_out, [trial], list(true)) for trial in trials)
    for task, share in TASKS.items():
        scored = share * sentences + (1 - share) * windows
        for errors in ERRORS:
            chosen, _ = choose_by_scores(list(true), scored, errors=errors)
            variants[f"{task}, {errors:g}"] = true[chosen]
    best = max(grid, key=grid.__getitem__)
    by_rule = {
        "auto": each[choice.chosen],
        "mean and spectrum alone": each[choose_by_spectrum(whole, k)],
        "Spectral Tempering": case.of_each(tempered),
        **{rule: each[setting] for rule, setting in constant_rules(k).items()},
    }
    lost = {rule: each[best] - values for rule, values in by_rule.items()}
    lost["PCA, of auto"] = each[Setting(k, 0.0, True)] - each[choice.chosen]
    means = {rule: float(values.mean()) for rule, values in lost.items()}
    return {
        "best": grid[best],
        "pca": grid[Setting(k, 0.0, True)],
        "lost": means,
        "chosen": {"exponent": choice.chosen.exponent, "center": choice.chosen.center},
        "auto": true[choice.chosen],
        "tempering_exponent": tempered.exponent,
        "variants": variants,
    }, lost


def constant_rules(k: int) -> dict[str, Setting]:
    """Return the settings of rules that look at nothing."""
    return {
        "γ = .25 always, centred": Setting(k, 0.25, True),
        "γ = .25 always, not centred": Setting(k, 0.25, False),
        "γ = .5 always, centred": Setting(k, 0.5, True),
        "γ = .5 always, not centred": Setting(k, 0.5, False),
        "PCA always": Setting(k, 0.0, True),
        "whitening always": Setting(k, 1.0, True),
    }


def main(given: Sequence[str] | None = None) -> None:
    """Measure the sets that the arguments name."""
    parser = argparse.ArgumentParser("python -m benchmarks.choice", description=__doc__)
    parser.add_argument("work", type=Path)
    parser.add_argument("sets", nargs="*", default=list(itertools.chain(*GROUPS.values())))
    asked = parser.parse_args(given)
    print(write("choice", measure(asked.work, asked.sets)))


if __name__ == "__main__":
    main()
