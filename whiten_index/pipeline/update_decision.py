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
from whiten_index.pipeline.changes import apart, part_digests
from whiten_index.pipeline.early_checks import index_plan
from whiten_index.pipeline.encode import EncodeReport
from whiten_index.pipeline.fit import fit_moments, fit_whitening
from whiten_index.pipeline.labels import read_labels
from whiten_index.pipeline.publish import VersionSpec, version_identity
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.store.digest_index import DigestIndex
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusRecord
from whiten_index.store.sampling import row_starts
from whiten_index.versions.bundle import read_index
from whiten_index.versions.published import WHITENING
from whiten_index.whitening.drift import Drift, decide
from whiten_index.whitening.spectrum import WidthSpec
from whiten_index.whitening.transform import Whitening

# Lists trained for so many times fewer or more rows are still good ones.
_LISTS_RATIO = 2.0
_LISTS = re.compile(r"IVF(\d+)")


def decide_update(
    config: UpdateConfig, base: BaseVersion, encoded: EncodeReport
) -> tuple[VersionSpec, dict[str, Any]]:
    """Measure the drift, and decide what is kept of the published version.

    The new version keeps the index if it reuses codes. Decision and drift are returned as its
    manifest records them.
    """
    old_rows = _carried_rows(encoded.store, base.record, encoded.record)
    # Rows that are as they were when the transform was fitted, at least.
    gone = base.record.rows - len(np.unique(old_rows[old_rows >= 0]))
    shared = max(float(base.update.get("shared", base.record.rows)) - gone, 0.0)
    named = _named_config(base.config, base.fitted.whitening)
    today, _ = fit_moments(named, encoded)
    with encoded.stages.stage("measure drift", encoded.record.rows) as watcher:
        # Of rows with weights, moments count the sum of these, which rounding may leave below.
        both = min(shared, base.fitted.moments.count, today.count)
        drift = Drift.measure(base.fitted.whitening, base.fitted.moments, today, shared=both)
        watcher.advance(encoded.record.rows)
    decision = decide(drift, threshold=config.drift_threshold, order=config.order)
    said, facts = asdict(decision), {"drift": drift.to_json(), "shared": shared}
    if decision.whitening == "refit":
        again = base.config if config.choose_again else named
        fitted = fit_whitening(again, encoded, read_labels(again))
        if base.fitted.choice is not None and fitted.choice is None:
            fitted = replace(fitted, choice=base.fitted.choice)
        plan = index_plan(again, rows=encoded.record.rows, whitening=fitted.whitening)
        spec = VersionSpec(fitted, plan, version_identity(again, encoded, fitted, plan))
        facts |= {"shared": float(encoded.record.rows)}
        return spec, {**facts, "decision": {**said, "index": "train", "index_why": ""}}
    spec, why = _kept(base, encoded, old_rows)
    index, trained = ("train", None) if spec.reuse is None else ("keep", _trained(base))
    decided = {**said, "index": index, "index_why": why}
    return spec, {**facts, "decision": decided, "trained": trained}


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
    new, old = set(map(id, came)), set(map(id, gone))
    starts = row_starts(before)[:-1].tolist()
    begins = [start for part, start in zip(before.parts, starts, strict=True) if id(part) in old]
    known = DigestIndex(part_digests(store, gone))
    begins = [start for part, start in zip(gone, begins, strict=True) if part.rows]
    # A part that is in both states has its rows in their order.
    places: dict[tuple[str, str], list[int]] = {}
    for part, start in zip(before.parts, starts, strict=True):
        places.setdefault((part.shard, part.documents), []).append(start)
    found = list[NDArray[np.int64]]()
    for part in now.parts:
        if id(part) not in new:
            start = places[part.shard, part.documents].pop(0)
            found.append(np.arange(start, start + part.rows, dtype=np.int64))
        elif part.rows:
            at = known.find(store.digests(part.shard))
            rows = np.full(part.rows, -1, dtype=np.int64)
            rows[at.known] = np.array(begins)[at.shard[at.known]] + at.row[at.known]
            found.append(rows)
    return np.concatenate(found)


def _kept(
    base: BaseVersion, encoded: EncodeReport, old_rows: NDArray[np.int64]
) -> tuple[VersionSpec, str]:
    """Return the version with the same transform, and why its index is not kept, if so."""
    fitted, factory = base.fitted, base.fields["factory"]
    kept = {"whitening": base.fields["files"][WHITENING]["sha256"]}
    reuse, read = None, partial(read_index, base.source, mapped=True)
    plan = _similar_plan(base, rows=encoded.record.rows)
    if plan.built != factory["built"]:
        why = "another index suits so many rows"
    elif not (why := why_not_reusable(read()) or ""):
        reuse = CodeReuse(read, old_rows, OperatingPoint(**factory["tuned"]), factory["rerank"])
        kept["index"] = _trained(base)
    identity = version_identity(base.config, encoded, fitted, plan, kept=kept)
    return VersionSpec(fitted, plan, identity, reuse, kept=base.source), why


def _trained(base: BaseVersion) -> str:
    """Return the identity of the version whose index was trained last."""
    return str(base.update.get("trained") or base.source.sha256)


def _similar_plan(base: BaseVersion, *, rows: int) -> IndexPlan:
    """Return the plan of an index for so many rows, with the base's number of lists if it fits."""
    built, whitening = str(base.fields["factory"]["built"]), base.fitted.whitening
    wanted = index_plan(base.config, rows=rows, whitening=whitening)
    ours, theirs = _LISTS.search(built), _LISTS.search(wanted.built)
    if ours is None or theirs is None or _LISTS.sub("", built) != _LISTS.sub("", wanted.built):
        return wanted
    if not 1 / _LISTS_RATIO <= int(ours[1]) / int(theirs[1]) <= _LISTS_RATIO:
        return wanted
    try:
        same = index_plan(replace(base.config, factory=built), rows=rows, whitening=whitening)
    except ConfigError:
        # It no longer fits the budget.
        return wanted
    why = wanted.choice.why
    if built != wanted.built:
        why = f"the lists of version {base.version} are kept"
    choice = replace(wanted.choice, built=built, why=why, expected=same.choice.expected)
    return replace(wanted, choice=choice)
