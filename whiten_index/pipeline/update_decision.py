"""Decision of an update: keep the transform and the index, or make them again."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ConfigError
from whiten_index.index.build_local import CodeReuse
from whiten_index.index.choice import IndexPlan
from whiten_index.index.code_reuse import why_not_reusable
from whiten_index.index.tuning import OperatingPoint
from whiten_index.pipeline.base_version import BaseVersion
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.changes import apart, digests_of
from whiten_index.pipeline.early_checks import index_plan
from whiten_index.pipeline.encode import EncodeReport
from whiten_index.pipeline.fit import fit_moments, fit_whitening
from whiten_index.pipeline.labels import read_labels
from whiten_index.pipeline.publish import VersionSpec, version_identity
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.progress import Stages
from whiten_index.store.digest_index import DigestIndex
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusRecord
from whiten_index.versions.bundle import read_index
from whiten_index.versions.published import WHITENING
from whiten_index.whitening.drift import Drift, decide
from whiten_index.whitening.spectrum import WidthSpec
from whiten_index.whitening.transform import Whitening

# Lists trained for so many times fewer or more rows are still good ones.
_LISTS_RATIO = 2.0


def decide_update(
    config: UpdateConfig, base: BaseVersion, encoded: EncodeReport, stages: Stages
) -> tuple[VersionSpec, dict[str, Any]]:
    """Measure the drift, and decide what is kept of the published version.

    The new version keeps the index if it reuses codes. Decision and drift are returned as its
    manifest records them.

    Raises:
        WhiteningError: the embeddings no longer allow the transform.
        ConfigError: no index fits the memory budget any more.
    """
    old_rows = _carried_rows(encoded.store, base.record, encoded.record)
    # Rows that are as they were when the transform was fitted, at least.
    gone = base.record.rows - len(np.unique(old_rows[old_rows >= 0]))
    shared = max(float(base.update.get("shared", base.record.rows)) - gone, 0.0)
    named = _named_config(base.config, base.fitted.whitening)
    today, _ = fit_moments(named, encoded, stages)
    with stages.stage("measure drift", encoded.record.rows) as watcher:
        # Of rows with weights, moments count the sum of these, which rounding may leave below.
        both = min(shared, base.fitted.moments.count, today.count)
        drift = Drift.measure(base.fitted.whitening, base.fitted.moments, today, shared=both)
        watcher.advance(encoded.record.rows)
    decision = decide(drift, threshold=config.drift_threshold, order=config.order)
    said = asdict(decision)
    if decision.whitening == "refit":
        again = base.config if config.choose_again else named
        fitted = fit_whitening(again, encoded, read_labels(again), stages)
        if base.fitted.choice is not None and fitted.choice is None:
            fitted = replace(fitted, choice=base.fitted.choice)
        plan = index_plan(again, rows=encoded.record.rows, whitening=fitted.whitening)
        spec = VersionSpec(fitted, plan, version_identity(again, encoded, fitted, plan))
        return spec, {
            "drift": drift.to_json(),
            "shared": float(encoded.record.rows),
            "decision": {**said, "index": "train", "index_why": ""},
        }
    spec, index_why = _kept(base, encoded, old_rows)
    index = "train" if spec.reuse is None else "keep"
    return spec, {
        "drift": drift.to_json(),
        "shared": shared,
        "decision": {**said, "index": index, "index_why": index_why},
        "trained": None if spec.reuse is None else _trained(base),
    }


def _named_config(config: BuildConfig, whitening: Whitening) -> BuildConfig:
    """Return the build that fits what was chosen, without choosing again."""
    if not config.chooses:
        wish = WidthSpec.parse(config.k)
        # Without a number or a share, k is the rank, which may change.
        stays = wish.number is not None or wish.variance is not None
        return replace(config, k=whitening.k) if stays else config
    return replace(
        config,
        whiten=whitening.kind.value,
        k=whitening.k,
        exponent=whitening.exponent,
        center=whitening.center,
        queries=None,
        qrels=None,
        qrels_split=None,
        pairs=None,
        choose_sample=BuildConfig.choose_sample,
    )


def _carried_rows(
    store: EmbeddingStore, before: CorpusRecord, now: CorpusRecord
) -> NDArray[np.int64]:
    """Return for each row (n,) the row with the same text of the record before, −1 if it is new."""
    gone, came, _ = apart(before, now)
    starts = np.cumsum([0, *(part.rows for part in before.parts)])
    # A part that is in both states has its rows in their order.
    places: dict[tuple[str, str], list[int]] = {}
    for part, start in zip(before.parts, starts, strict=False):
        places.setdefault((part.shard, part.documents), []).append(int(start))
    new, old = set(map(id, came)), set(map(id, gone))
    lost = [start for part, start in zip(before.parts, starts, strict=False) if id(part) in old]
    known = DigestIndex((part.shard, digests_of(store, part)) for part in gone if part.rows)
    begins = np.array([start for part, start in zip(gone, lost, strict=True) if part.rows])
    found = list[NDArray[np.int64]]()
    for part in now.parts:
        if not part.rows:
            continue
        if id(part) not in new:
            start = places[part.shard, part.documents].pop(0)
            found.append(np.arange(start, start + part.rows, dtype=np.int64))
            continue
        at = known.find(store.digests(part.shard))
        rows = np.full(part.rows, -1, dtype=np.int64)
        rows[at.known] = begins[at.shard[at.known]] + at.row[at.known]
        found.append(rows)
    return np.concatenate(found)


def _kept(
    base: BaseVersion, encoded: EncodeReport, old_rows: NDArray[np.int64]
) -> tuple[VersionSpec, str]:
    """Return the version with the same transform, and why its index is not kept, if so."""
    config, fitted, rows = base.config, base.fitted, encoded.record.rows
    kept = {"whitening": base.fields["files"][WHITENING]["sha256"]}
    reuse = None
    if (plan := _same_index(base, rows)) is None:
        plan = index_plan(config, rows=rows, whitening=fitted.whitening)
        why = "another index suits so many rows"
    elif not (why := why_not_reusable(read_index(base.source, mapped=True)) or ""):
        factory = base.fields["factory"]
        read = partial(read_index, base.source, mapped=True)
        tuned = OperatingPoint(**factory["tuned"])
        reuse = CodeReuse(read, old_rows, tuned, factory["rerank"])
        kept["index"] = _trained(base)
    identity = version_identity(config, encoded, fitted, plan, kept=kept)
    return VersionSpec(fitted, plan, identity, reuse, kept=base.source), why


def _trained(base: BaseVersion) -> str:
    """Return the identity of the version whose index was trained last."""
    return str(base.update.get("trained") or base.source.sha256)


def _same_index(base: BaseVersion, rows: int) -> IndexPlan | None:
    """Return the plan of the same FAISS index for so many rows, None if another suits them."""
    config, fitted = base.config, base.fitted
    built = str(base.fields["factory"]["built"])
    wanted = index_plan(config, rows=rows, whitening=fitted.whitening)
    if wanted.built == built:
        return wanted
    if not _alike(built, wanted.built):
        return None
    try:
        named = replace(config, factory=built)
        same = index_plan(named, rows=rows, whitening=fitted.whitening)
    except ConfigError:
        return None  # it no longer fits the budget
    choice = replace(
        same.choice,
        asked=config.factory,
        rerank=wanted.choice.rerank,
        why=f"the lists of version {base.version} are kept",
        expected_recall=wanted.choice.expected_recall,
    )
    return replace(same, choice=choice)


def _alike(built: str, wanted: str) -> bool:
    """Tell whether two factories differ by the number of lists alone, and not by much."""
    lists = re.compile(r"IVF(\d+)")
    ours, theirs = lists.search(built), lists.search(wanted)
    if ours is None or theirs is None or lists.sub("", built) != lists.sub("", wanted):
        return False
    ratio = int(ours[1]) / int(theirs[1])
    return 1 / _LISTS_RATIO <= ratio <= _LISTS_RATIO
