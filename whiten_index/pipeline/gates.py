"""Gates that a new version must pass: counts, codes, canaries and size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from whiten_index.artifacts.files import walk_files
from whiten_index.corpus.batches import ID
from whiten_index.errors import CorpusError, GateError, StorageError, WhitenIndexError
from whiten_index.index.exact import exact_neighbours
from whiten_index.index.examine import examine
from whiten_index.index.factory import inner_of, is_exact, is_graph
from whiten_index.index.transforms import is_lossy
from whiten_index.index.vector_search import nearest
from whiten_index.pipeline.canary_file import CanaryFile
from whiten_index.pipeline.update_config import GateConfig
from whiten_index.progress import Progress, Stages
from whiten_index.search.rerank import Reranker
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusRecord
from whiten_index.store.sampling import CorpusEmbeddings, embeddings_of
from whiten_index.versions.bundle import Bundle
from whiten_index.whitening.spectrum import unit_rows

Encode = Callable[[Sequence[str]], NDArray[np.floating]]
Vectors = NDArray[np.float32]
Rows = NDArray[np.int64]

_TOP_K = 10
# How far below what the index was set to the canaries' recall may be. Of fewer canaries than are
# enough, or an index set by fewer, it may be further: the error of a mean goes with 1/√n.
_RECALL_MARGIN, _ENOUGH = 0.05, 200
# Share of the sampled rows that must find themselves if codes lose little, as a recall above the
# first bound shows. Graphs do not reach every row if many are copies of one.
_FINE_RECALL, _LEAST_SELF, _LEAST_SELF_OF_GRAPH = 0.85, 0.99, 0.95
# Cosines nearer than this are equal: float32 adds up k products.
_TIED = 1e-5


@dataclass(frozen=True)
class Gate:
    """Findings of a gate, the bounds set for them, and what failed, in sentences."""

    name: str
    found: dict[str, Any] = field(default_factory=dict)
    bound: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if nothing failed."""
        return not self.faults

    @property
    def why(self) -> str:
        """Everything that failed."""
        return "; ".join(self.faults)

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        said = {"name": self.name, "passed": self.passed}
        return {**said, "found": self.found, "bound": self.bound, "why": self.why}


def run_gates(
    candidate: Bundle,
    store: EmbeddingStore,
    record: CorpusRecord,
    *,
    config: GateConfig,
    stages: Stages,
    base_rows: int | None = None,
    expected_rows: int | None = None,
    canaries: CanaryFile | None = None,
    encode: Encode | None = None,
    seed: int = 0,
) -> tuple[Gate, ...]:
    """Run every gate on a version, its store and its corpus; one that fails does not raise.

    Every row of the index is read, and every row of the store projected. ``base_rows`` are those
    of the version before, and ``expected_rows`` what its changes make of them. ``encode`` gives the
    raw embeddings (n, d) of canary queries that are texts.
    """
    counts = _check_counts(candidate, store, record, expected_rows)
    with stages.stage("check codes", len(candidate)) as watcher:
        codes = _check_codes(candidate)
        watcher.advance(len(candidate))
    whole = len(candidate) == len(candidate.documents) == record.rows
    if whole and codes.passed:
        trial = _Trial(candidate, store, record, config, canaries, stages)
        tried = trial.gate(encode, np.random.default_rng(seed))
    else:
        # Rows that are not those of the store cannot be compared with it.
        why = "they were not tried, since rows or codes are not as they should be"
        tried = Gate("canaries", faults=[why])
    size = sum(path.stat().st_size for path in walk_files(candidate.folder))
    found = {"rows": len(candidate), "bytes": size}
    names = ("max_shrink", "max_growth", "max_bytes")
    bound = {"base_rows": base_rows, **{name: getattr(config, name) for name in names}}
    faults = size_faults(config, rows=len(candidate), size=size, base_rows=base_rows)
    return counts, codes, tried, Gate("size", found, bound, faults)


def require_passed(gates: Sequence[Gate], *, candidate: Path | str) -> None:
    """Refuse a version that did not pass; ``candidate`` is the folder in which it is kept aside.

    Raises:
        GateError: one of the gates was not passed.
    """
    failed = [gate for gate in gates if not gate.passed]
    if failed:
        raise GateError(
            "the new version is not published: "
            + "; ".join(f"gate {gate.name}: {gate.why}" for gate in failed)
            + f". It is kept in {candidate}; mend the cause, or move the bound, and run it again",
            gates=[gate.to_json() for gate in gates],
            candidate=str(candidate),
        )


def size_faults(config: GateConfig, *, rows: int, size: int, base_rows: int | None) -> list[str]:
    """Return how rows and bytes of a version are beyond the options."""
    faults = []
    if base_rows is not None and rows < base_rows * (1 - config.max_shrink):
        faults.append(
            f"{rows:,} rows are {1 - rows / base_rows:.1%} fewer than the {base_rows:,} before, "
            f"and --max-shrink is {config.max_shrink:g}"
        )
    if base_rows is not None and rows > base_rows * (1 + config.max_growth):
        faults.append(
            f"{rows:,} rows are too many after the {base_rows:,} before: --max-growth is "
            f"{config.max_growth:g}"
        )
    if config.most_bytes is not None and size > config.most_bytes:
        faults.append(f"the files take {size:,} bytes, and --max-bytes is {config.max_bytes}")
    return faults


def _check_counts(
    candidate: Bundle, store: EmbeddingStore, record: CorpusRecord, expected: int | None
) -> Gate:
    """Check that all rows read are accounted for, and that rows of the index have their own ids."""
    counts = candidate.manifest["counts"]
    skipped = sum(counts["skipped"].values())
    rows, indexed, documents = record.rows, len(candidate), len(candidate.documents)
    found = {
        **{name: counts[name] for name in ("read", "encoded", "reused")},
        "skipped": skipped,
        "corpus_rows": rows,
        "index_rows": indexed,
        "document_rows": documents,
    }
    used = counts["encoded"] + counts["reused"]
    kind, made = ("passages", counts["passages"]) if candidate.grouped else ("rows", used)
    wrong = {
        f"{counts['read']} rows were read, and {used + skipped} encoded, reused or skipped": (
            counts["read"] != used + skipped
        ),
        f"{made} {kind} were encoded or reused, and the corpus has {rows}": made != rows,
        f"the index holds {indexed} rows, and the corpus has {rows}": indexed != rows,
        f"the documents file holds {documents} rows, and the corpus has {rows}": documents != rows,
        f"{expected} rows are expected after the changes, and the corpus has {rows}": (
            expected not in (None, rows)
        ),
    }
    faults = [sentence for sentence, is_so in wrong.items() if is_so]
    if documents == rows:
        found["wrong_ids"] = _wrong_ids(candidate, store, record)
        if found["wrong_ids"]:
            faults.append(f"{found['wrong_ids']} rows have the id of another document")
    return Gate("counts", found, {"rows": rows if expected is None else expected}, faults)


def _wrong_ids(candidate: Bundle, store: EmbeddingStore, record: CorpusRecord) -> int:
    """Return how many rows have another id than in the store."""
    wrong = start = 0
    for part in record.parts:
        if part.rows:
            ours = candidate.documents.id_column(start, start + part.rows)
            theirs = store.documents(part)[ID]
            if not ours.equals(theirs):
                same = pc.equal(ours.cast(pa.large_string()), theirs.cast(pa.large_string()))
                wrong += part.rows - int(pc.sum(same).as_py() or 0)
            start += part.rows
    return wrong


def _check_codes(candidate: Bundle) -> Gate:
    """Check that the transform, codes and codebooks are finite, and each row is there once."""
    seen, whitening = examine(candidate.index), candidate.whitening
    arrays = sorted(
        name
        for name, value in {"scales": whitening.scales(), **vars(whitening)}.items()
        if isinstance(value, np.ndarray) and not name.startswith("_")
        if not np.isfinite(value).all()
    )
    names = ("rows", "decoded", "broken", "lost", "strange", "learned")
    found = {"broken_arrays": arrays, **{name: getattr(seen, name) for name in names}}
    broken = {
        f"the whitening holds NaN or infinity ({', '.join(arrays)})": arrays,
        f"the codes of {seen.broken} rows hold NaN or infinity": seen.broken,
        f"{seen.lost} of {seen.rows} rows are in none of the index's lists": seen.lost,
        f"{seen.strange} entries of the index's lists are no row, or one twice": seen.strange,
        "the index's centroids or codebooks hold NaN or infinity": not seen.learned,
    }
    faults = [sentence for sentence, is_so in broken.items() if is_so]
    return Gate("codes", found, {"broken": 0, "lost": 0, "strange": 0}, faults)


@dataclass(frozen=True, eq=False)
class _Trial:
    """Search of a version by sampled rows and canary queries, against exact search."""

    candidate: Bundle
    store: EmbeddingStore
    record: CorpusRecord
    config: GateConfig
    canaries: CanaryFile | None
    stages: Stages

    def gate(self, encode: Encode | None, rng: np.random.Generator) -> Gate:
        """Return the gate of sampled rows and of queries with known answers.

        Recall is the share of the ten nearest that is found, where every row counts that is as
        near as the tenth (as in ANN-Benchmarks, Aumüller, Bernhardsson and Faithfull 2020), so
        that an index may give any of several equal rows.
        """
        total = self.record.rows
        rows = np.sort(rng.choice(total, min(self.config.canaries, total), replace=False))
        least = self._least_recall(len(rows))
        inner = inner_of(self.candidate.index)
        bound = {"recall": least, "self_found": _least_self(inner, least)}
        if self.canaries is not None:
            bound["query_recall"] = self._least_recall(len(self.canaries))
        found: dict[str, Any] = {"sampled": len(rows)}
        try:
            faults = self._search(rows, encode, found, bound)
        except StorageError:
            # A failed read says nothing about the version.
            raise
        except WhitenIndexError as error:
            return Gate("canaries", {}, bound, [f"they could not be tried: {error}"])
        return Gate("canaries", found, bound, faults)

    def _search(
        self, rows: Rows, encode: Encode | None, found: dict[str, Any], bound: dict[str, Any]
    ) -> list[str]:
        """Search by all canaries; add figures to ``found`` and return the faults."""
        asked = np.empty((0, self.candidate.dim))
        if self.canaries is not None:
            raw = self.canaries.embeddings
            if raw is None:
                assert encode is not None
                assert self.canaries.texts is not None
                raw = encode(self.canaries.texts)
            asked = raw.astype(np.float64)
        if not len(rows) and not len(asked):
            return []
        every = np.concatenate([embeddings_of(self.store, self.record, rows), asked])
        with self.stages.stage("check canaries", self.record.rows) as watcher:
            best = self._exact(every, watcher)
            near, cosines = self._found(every)
        mine, theirs = slice(0, len(rows)), slice(len(rows), None)
        faults = []
        if len(rows):
            faults += self._sampled(rows, best[mine], near[mine], cosines[mine], found, bound)
        if self.canaries is not None:
            share = _recall(best[theirs][:, :_TOP_K], cosines[theirs][:, :_TOP_K])
            found |= {"queries": len(asked), "query_recall": share}
            faults += _below(share, bound["query_recall"], "canary queries")
            faults += self._answered(self.canaries, asked, found)
        found["hits_missing"] = lacking = int(np.count_nonzero(near < 0))
        if lacking:
            faults.append(f"{lacking} of the {near.size} hits asked for are no row")
        return faults

    @property
    def _rerank(self) -> int:
        """Candidates a query that are scored again as the version is searched, 0 for none."""
        return int(self.candidate.manifest["factory"]["rerank"] or 0)

    def _reranker(self, most: int) -> Reranker:
        whitening = self.candidate.whitening
        return Reranker(self.store, self.record, whitening, candidates=most)

    def _exact(self, queries: NDArray[np.float64], watcher: Progress) -> Vectors:
        """Return the best cosines (q, 11) of raw queries with all rows, projected afresh."""
        whitening = self.candidate.whitening

        def projected() -> Iterator[Vectors]:
            for block in CorpusEmbeddings(self.store, self.record).blocks():
                yield unit_rows(whitening.apply(block)).astype(np.float32)
                watcher.advance(len(block))

        vectors = unit_rows(whitening.apply(queries)).astype(np.float32)
        scores, _ = exact_neighbours(projected(), vectors, _TOP_K + 1)
        return scores

    def _found(self, queries: NDArray[np.float64]) -> tuple[Rows, Vectors]:
        """Return the rows (q, <= 11) that the version finds, and their exact cosines."""
        most = min(max(self._rerank, _TOP_K + 1), len(self.candidate))
        narrow = np.ascontiguousarray(queries, dtype=np.float32)
        vectors = self.candidate.transforms(narrow)
        _, rows = nearest(inner_of(self.candidate.index), vectors, most)
        cosines = self._reranker(most)(narrow, rows)
        if self._rerank:
            order = np.argsort(-cosines, axis=1, kind="stable")
            rows = np.take_along_axis(rows, order, axis=1)
            cosines = np.take_along_axis(cosines, order, axis=1)
        return rows[:, : _TOP_K + 1], cosines[:, : _TOP_K + 1]

    def _sampled(
        self,
        rows: Rows,
        best: Vectors,
        near: Rows,
        cosines: Vectors,
        found: dict[str, Any],
        bound: dict[str, Any],
    ) -> list[str]:
        """Check that rows find themselves, and their neighbours, themselves left out."""
        own = near == rows[:, None]
        # None is nearer than the row itself, and one that is as near is equal to it.
        itself = (own | (cosines >= best[:, :1] - _TIED)).any(axis=1)
        found["self_found"] = float(itself.mean())
        faults = []
        if found["self_found"] < bound["self_found"]:
            lost = rows[~itself]
            first = self.candidate.documents.ids([int(lost[0])])[0]
            faults.append(
                f"{len(lost)} of {len(rows)} sampled rows do not find themselves, the first being "
                f"that of id {first!r}"
            )
        others = own.copy()
        others[~own.any(axis=1), -1] = True
        found["recall"] = _recall(best[:, 1:], cosines[~others].reshape(len(rows), -1))
        return faults + _below(found["recall"], bound["recall"], "sampled rows")

    def _answered(
        self, canaries: CanaryFile, queries: NDArray[np.float64], found: dict[str, Any]
    ) -> list[str]:
        """Check that the documents expected are among the ten nearest, as a user would see them."""
        asked = [place for place, ids in enumerate(canaries.expected) if ids]
        if not asked:
            return []
        documents = self.candidate.documents
        rescorer = self._reranker(self._rerank) if self._rerank else None
        given = queries[asked].astype(np.float32)
        _, near = self.candidate.search(given, _TOP_K, rescorer=rescorer)
        missed: list[tuple[int, str]] = []
        for place, rows in zip(asked, near, strict=True):
            seen = {str(name) for name in documents.ids(rows[rows >= 0].tolist())}
            missed += [(place, name) for name in canaries.expected[place] if name not in seen]
        total = sum(map(len, canaries.expected))
        found |= {"expected": total, "expected_found": total - len(missed)}
        if not missed:
            return []
        (place, name), there = missed[0], ""
        try:
            documents.find(name)
        except CorpusError:
            there = ", which the index does not hold"
        return [
            f"{len(missed)} of {total} documents expected are not among the {_TOP_K} nearest, the "
            f"first being {name!r} of {canaries.query_name(place)}{there}"
        ]

    def _least_recall(self, canaries: int) -> float | None:
        """Return the recall that so many canaries must reach, None if the index was set to none."""
        if self.config.canary_recall is not None:
            return self.config.canary_recall
        tuned = self.candidate.manifest["factory"]["tuned"]
        recall: float | None = tuned["recall"]
        target: float = tuned["target"]
        fewest = canaries
        if recall is None and not tuned["reached"]:
            return None
        if recall is not None:
            target, fewest = min(recall, target), min(tuned["queries"], canaries)
        # Otherwise it is exact by its structure, and was not measured.
        margin = _RECALL_MARGIN * math.sqrt(max(_ENOUGH / max(fewest, 1), 1.0))
        return max(round(target - margin, 6), 0.0)


def _recall(best: Vectors, cosines: Vectors) -> float | None:
    """Return the share of the nearest rows that are found, None if there are none.

    ``best`` (q, n) are the cosines of the nearest, and ``cosines`` (q, m) those of the rows found;
    either is −∞ where there is no row.
    """
    there = np.isfinite(best)
    wanted = there.sum(axis=1)
    if not wanted.any():
        return None
    least = np.where(there, best, np.inf).min(axis=1, initial=np.inf)
    right = np.isfinite(cosines) & (cosines >= least[:, None] - _TIED)
    return float(np.minimum(right.sum(axis=1), wanted).sum() / wanted.sum())


def _below(share: float | None, least: float | None, what: str) -> list[str]:
    if share is None or least is None or share >= least:
        return []
    return [f"{what} find {share:.1%} of their {_TOP_K} exact neighbours, below {least:.1%}"]


def _least_self(inner: Any, least: float | None) -> float:
    """Return the share of the sampled rows that must find themselves."""
    if is_exact(inner):
        return 1.0
    if least is None:
        # Nothing is known of the losses of its codes.
        least = 0.0 if is_lossy(inner) else 1.0
    if least < _FINE_RECALL:
        # Codes so coarse that many rows share one, or a graph torn by copies of one row.
        return least
    return _LEAST_SELF_OF_GRAPH if is_graph(inner) else _LEAST_SELF
