"""Keep or refit: what a new version takes over of the published one, and why."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.errors import ConfigError
from whiten_index.index.build_local import CodeReuse
from whiten_index.index.choice import FactoryChoice, IndexPlan
from whiten_index.index.code_reuse import why_not_reusable
from whiten_index.index.tuning import OperatingPoint
from whiten_index.pipeline.build import index_plan
from whiten_index.pipeline.changes import Changes, apart, digests_of
from whiten_index.pipeline.encode import EncodeReport
from whiten_index.pipeline.fit import fit_moments, fit_whitening, read_labels
from whiten_index.pipeline.gate_checks import run_gates
from whiten_index.pipeline.gates import Base as GateBase
from whiten_index.pipeline.gates import CanaryFile, Gate, require_passed
from whiten_index.pipeline.publish import Settled, settle, write_version
from whiten_index.pipeline.shard_encoding import LazyEncoder
from whiten_index.pipeline.update_base import Base, named_config
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.progress import Stages
from whiten_index.store.digest_index import DigestIndex
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusRecord
from whiten_index.versions.bundle import open_unsealed, read_index
from whiten_index.versions.published import CANDIDATES, CHANGES, WHITENING, publish_candidate
from whiten_index.whitening.drift import Drift, decide

# Lists trained for so many times fewer or more rows are still good ones.
_LISTS_RATIO = 2.0


@dataclass(frozen=True, eq=False)
class Decided:
    """What a new version takes over, and the numbers that say why.

    Attributes:
        settled: what is to be made.
        facts: decision and drift, as its manifest tells them.
    """

    settled: Settled
    facts: dict[str, Any]

    @property
    def keeps(self) -> bool:
        """Whether transform and index are those of the base."""
        return self.settled.reuse is not None


def decide_update(
    config: UpdateConfig, base: Base, encoded: EncodeReport, stages: Stages
) -> Decided:
    """Measure the drift, and settle what is kept.

    Raises:
        WhiteningError: the embeddings no longer allow the transform.
        ConfigError: no index fits the memory budget any more.
    """
    old_rows = carried_rows(encoded.store, base.record, encoded.record)
    shared = _shared(base, old_rows)
    named = named_config(base.config, base.fitted.whitening)
    today, _ = fit_moments(named, encoded, stages)
    with stages.stage("measure drift", encoded.record.rows) as watcher:
        # Of rows with weights, moments count the sum of these, which rounding may leave below.
        both = min(shared, base.fitted.moments.count, today.count)
        drift = Drift.measure(base.fitted.whitening, base.fitted.moments, today, shared=both)
        watcher.advance(encoded.record.rows)
    decision = decide(drift, threshold=config.drift_threshold, order=config.order)
    facts: dict[str, Any] = {"drift": drift.to_json(), "shared": shared}
    said = {"whitening": decision.whitening, "why": decision.why, "threshold": decision.threshold}
    if decision.refits:
        again = base.config if config.choose_again else named
        labels = read_labels(again)
        fitted = fit_whitening(again, encoded, labels, stages)
        if base.fitted.choice is not None and fitted.choice is None:
            fitted = replace(fitted, choice=base.fitted.choice)
        plan = index_plan(again, rows=encoded.record.rows, whitening=fitted.whitening)
        settled = settle(again, encoded, fitted, plan)
        facts["shared"] = float(encoded.record.rows)
        return Decided(settled, {**facts, "decision": {**said, "index": "train", "index_why": ""}})
    settled, index_why = _kept(base, encoded, old_rows)
    settled = replace(settled, kept=base.source)
    index = "train" if settled.reuse is None else "keep"
    trained = None if settled.reuse is None else _trained(base)
    decided = {**said, "index": index, "index_why": index_why}
    return Decided(settled, {**facts, "decision": decided, "trained": trained})


def carried_rows(
    store: EmbeddingStore, before: CorpusRecord, now: CorpusRecord
) -> NDArray[np.int64]:
    """Return for each row (n,) the row with the same text of the record before, −1 where new.

    Raises:
        ArtifactError: a shard cannot be read.
    """
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
        at = known.find(store.shards.digests(part.shard))
        rows = np.full(part.rows, -1, dtype=np.int64)
        rows[at.known] = begins[at.shard[at.known]] + at.row[at.known]
        found.append(rows)
    return np.concatenate(found)


def _shared(base: Base, old_rows: NDArray[np.int64]) -> float:
    """Return how many rows at least are as they were when the transform was fitted."""
    gone = base.record.rows - len(np.unique(old_rows[old_rows >= 0]))
    fitted_on = float(base.update.get("shared", base.record.rows))
    return max(fitted_on - gone, 0.0)


def _kept(base: Base, encoded: EncodeReport, old_rows: NDArray[np.int64]) -> tuple[Settled, str]:
    """Return what is made with the transform as it is, and why its index is not, if it is not."""
    fitted, rows = base.fitted, encoded.record.rows
    plan = _same_index(base, rows)
    why = "" if plan is not None else "another index suits so many rows"
    if plan is not None:
        current = read_index(base.source, mapped=True)
        why = why_not_reusable(current) or ""
    transform = base.fields["files"][WHITENING]["sha256"]
    if why or plan is None:
        plan = plan or index_plan(base.config, rows=rows, whitening=fitted.whitening)
        return settle(base.config, encoded, fitted, plan, kept={"whitening": transform}), why
    factory = base.fields["factory"]
    # Versions of earlier releases do not tell.
    tuned = OperatingPoint(**factory.get("tuned") or {})
    reuse = CodeReuse(
        partial(read_index, base.source, mapped=True),
        old_rows,
        tuned,
        factory.get("rerank"),
    )
    kept = {"whitening": transform, "index": _trained(base)}
    return settle(base.config, encoded, fitted, plan, kept=kept, reuse=reuse), ""


def _trained(base: Base) -> str:
    """Return what tells the training of the base's index: of the version where it was trained."""
    return str(base.update.get("trained") or base.source.sha256)


def _same_index(base: Base, rows: int) -> IndexPlan | None:
    """Return the plan of the same FAISS index for so many rows, None where another suits them."""
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
    choice: FactoryChoice = replace(
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


class Examination:
    """The gates of one update, and what they found."""

    def __init__(
        self,
        config: UpdateConfig,
        base: Base,
        encoded: EncodeReport,
        changes: Changes,
        canaries: CanaryFile | None,
        stages: Stages,
    ) -> None:
        self.config, self.base, self.encoded = config, base, encoded
        self.changes, self.canaries, self.stages = changes, canaries, stages
        self.gates: tuple[Gate, ...] = ()

    def __call__(self, folder: Path, fields: dict[str, Any]) -> list[dict[str, Any]]:
        """Look at a version's files before its manifest is sealed."""
        counts = self.changes.to_json()
        # With passages it is documents that are counted, and rows that the index has.
        known = not self.base.passages
        rows = GateBase(
            self.base.record.rows,
            new=counts["new"] if known else None,
            deleted=counts["deleted"] if known else None,
        )
        self.gates = run_gates(
            open_unsealed(folder, fields),
            self.encoded.store,
            self.encoded.record,
            config=self.config.gates(),
            stages=self.stages,
            base=rows,
            canaries=self.canaries,
            encode=self._encode,
            seed=self.base.config.seed,
        )
        return [gate.to_json() for gate in self.gates]

    @property
    def _encode(self) -> Callable[[Any], NDArray[np.floating]] | None:
        if self.canaries is None or not self.canaries.needs_encoder:
            return None
        return LazyEncoder(self.base.config.encoder_config())().encode_queries


def make_candidate(
    version: str,
    encoded: EncodeReport,
    decided: Decided,
    facts: Mapping[str, Any],
    examine: Examination,
) -> None:
    """Write the candidate, and refuse to go on where a gate does.

    Raises:
        GateError: a gate did not pass; the candidate is kept.
    """
    config = examine.base.config

    def finish(folder: Path, fields: dict[str, Any]) -> dict[str, Any]:
        whitening = facts["decision"]["whitening"]
        examine.changes.save(folder / CHANGES, base=examine.base.version, whitening=whitening)
        return {"update": dict(facts), "gates": examine(folder, fields)}

    write_version(
        config,
        encoded,
        decided.settled,
        version,
        examine.stages,
        publish_candidate,
        finish=finish,
    )
    out = Path(str(config.out))
    require_passed(examine.gates, candidate=out / CANDIDATES / version)
