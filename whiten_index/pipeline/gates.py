"""Gates that a new version must pass: counts, codes, canaries, size and certificate."""

import math
from collections.abc import Iterator, Mapping, Sequence
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
from whiten_index.index.codes import examine
from whiten_index.index.exact import Rows, Vectors, exact_neighbours, recall, rounding
from whiten_index.index.factory import inner_of, is_exact, is_graph
from whiten_index.index.transforms import is_lossy
from whiten_index.index.tuning import without_own
from whiten_index.pipeline.encode import EncodeReport
from whiten_index.pipeline.query_files import CanaryFile
from whiten_index.pipeline.update_config import LEAST_QUESTIONS, OTHER_JUDGEMENTS, GateConfig
from whiten_index.search.rerank import Reranker
from whiten_index.store.sampling import CorpusEmbeddings
from whiten_index.versions.bundle import Bundle

_TOP_K = 10
# How far below what the index was set to the canaries' recall may be. Of fewer canaries than are
# enough, or an index set by fewer, it may be further: the error of a mean goes with 1/√n.
_RECALL_MARGIN, _ENOUGH = 0.05, 200
# Share of the sampled rows that must find themselves if codes lose little, as a recall above the
# first bound shows. Graphs do not reach every row if many are copies of one.
_FINE_RECALL, _LEAST_SELF, _LEAST_SELF_OF_GRAPH = 0.85, 0.99, 0.95


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

    def blame(self, wrong: Mapping[str, Any]) -> None:
        """Add each sentence that is so to what failed."""
        self.faults.extend(sentence for sentence, is_so in wrong.items() if is_so)

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        said = {"name": self.name, "passed": self.passed}
        return {**said, "found": self.found, "bound": self.bound, "why": self.why}


def run_gates(
    candidate: Bundle,
    encoded: EncodeReport,
    *,
    config: GateConfig,
    base_rows: int | None = None,
    expected_rows: int | None = None,
    canaries: CanaryFile | None = None,
    seed: int = 0,
) -> tuple[Gate, ...]:
    """Run every gate on a version, its store and its corpus; one that fails does not raise.

    Every row of the index is read, and every row of the store projected. ``base_rows`` are those of
    the version before, ``expected_rows`` what its changes make of them. ``canaries`` are embedded.
    """
    counts, rows = _check_counts(candidate, encoded, expected_rows), encoded.record.rows
    with encoded.stages.whole("check codes", len(candidate)):
        codes = _check_codes(candidate)
    if len(candidate) == len(candidate.documents) == rows and codes.passed:
        tried = _Trial(candidate, encoded, config).gate(canaries, seed)
    else:
        # Rows that are not those of the store cannot be compared with it.
        why = "they were not tried, since rows or codes are not as they should be"
        tried = Gate("canaries", faults=[why])
    size = sum(path.stat().st_size for path in walk_files(candidate.folder))
    names = ("max_shrink", "max_growth", "max_bytes")
    bound = {"base_rows": base_rows, **{name: getattr(config, name) for name in names}}
    faults = size_faults(config, rows=len(candidate), size=size, base_rows=base_rows)
    sizes = Gate("size", {"rows": len(candidate), "bytes": size}, bound, faults)
    return counts, codes, tried, sizes


def require_passed(gates: Sequence[Gate], *, candidate: Path | str) -> None:
    """Refuse a version that did not pass; ``candidate`` is the folder in which it is kept aside."""
    if failed := [f"gate {gate.name}: {gate.why}" for gate in gates if not gate.passed]:
        raise GateError(
            f"the new version is not published: {'; '.join(failed)}. It is kept in {candidate}; "
            "mend the cause, or move the bound, and run it again",
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


def _check_counts(candidate: Bundle, encoded: EncodeReport, expected: int | None) -> Gate:
    """Check that all rows read are accounted for, and that rows of the index have their own ids."""
    counts = candidate.manifest["counts"]
    skipped = sum(counts["skipped"].values())
    rows, indexed, documents = encoded.record.rows, len(candidate), len(candidate.documents)
    found = {
        **{name: counts[name] for name in ("read", "encoded", "reused")},
        "skipped": skipped,
        "corpus_rows": rows,
        "index_rows": indexed,
        "document_rows": documents,
    }
    used = counts["encoded"] + counts["reused"]
    kind, made = ("passages", counts["passages"]) if candidate.grouped else ("rows", used)
    gate = Gate("counts", found, {"rows": rows if expected is None else expected})
    gate.blame(
        {
            f"{counts['read']} rows were read, and {used + skipped} encoded, reused or skipped": (
                counts["read"] != used + skipped
            ),
            f"{made} {kind} were encoded or reused, and the corpus has {rows}": made != rows,
            f"the index holds {indexed} rows, and the corpus has {rows}": indexed != rows,
            f"the documents file holds {documents} rows, and the corpus has {rows}": (
                documents != rows
            ),
            f"{expected} rows are expected after the changes, and the corpus has {rows}": (
                expected not in (None, rows)
            ),
        }
    )
    if documents == rows:
        found["wrong_ids"] = wrong = _wrong_ids(candidate, encoded)
        gate.blame({f"{wrong} rows have the id of another document": wrong})
    return gate


def _wrong_ids(candidate: Bundle, encoded: EncodeReport) -> int:
    wrong = start = 0
    for part in encoded.record.parts:
        if part.rows:
            ours = candidate.documents.id_column(start, start + part.rows)
            theirs = encoded.store.documents(part)[ID]
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
    gate = Gate("codes", found, {"broken": 0, "lost": 0, "strange": 0})
    gate.blame(
        {
            f"the whitening holds NaN or infinity ({', '.join(arrays)})": arrays,
            f"the codes of {seen.broken} rows hold NaN or infinity": seen.broken,
            f"{seen.lost} of {seen.rows} rows are in none of the index's lists": seen.lost,
            f"{seen.strange} entries of the index's lists are no row, or one twice": seen.strange,
            "the index's centroids or codebooks hold NaN or infinity": not seen.learned,
        }
    )
    return gate


@dataclass(frozen=True, eq=False)
class _Trial:
    """Search of a version by sampled rows and canary queries, against exact search."""

    candidate: Bundle
    encoded: EncodeReport
    config: GateConfig

    def gate(self, canaries: CanaryFile | None, seed: int) -> Gate:
        """Return the gate of sampled rows and of queries with known answers."""
        # Every row counts that is as near as the tenth (as in ANN-Benchmarks, Aumüller,
        # Bernhardsson and Faithfull 2020).
        total, rng = self.encoded.record.rows, np.random.default_rng(seed)
        rows = np.sort(rng.choice(total, min(self.config.canaries, total), replace=False))
        least = self._least_recall(len(rows))
        bound = {"recall": least, "self_found": _least_self(inner_of(self.candidate.index), least)}
        if canaries is not None:
            bound["query_recall"] = self._least_recall(len(canaries))
        gate = Gate("canaries", {"sampled": len(rows)}, bound)
        try:
            if len(rows) or canaries is not None:
                self._search(gate, rows, canaries)
        except StorageError:
            # A failed read says nothing about the version.
            raise
        except WhitenIndexError as error:
            return Gate("canaries", {}, bound, [f"they could not be tried: {error}"])
        return gate

    def _search(self, gate: Gate, rows: Rows, canaries: CanaryFile | None) -> None:
        store, record, stages = self.encoded.store, self.encoded.record, self.encoded.stages
        queries, count = CorpusEmbeddings(store, record).at(rows), len(rows)
        if canaries is not None:
            assert canaries.embeddings is not None
            queries = np.concatenate([queries, canaries.embeddings.astype(np.float64)])
        most = int(self.candidate.manifest["factory"]["rerank"] or 0)
        reranker = Reranker(store, record, self.candidate.whitening, candidates=most)
        rescorer = reranker if most else None
        narrow = np.ascontiguousarray(queries, dtype=np.float32)
        with stages.stage("check canaries", record.rows):
            best, nearest = self._exact(queries)
            _, near = self.candidate.search(narrow, _TOP_K + 1, rescorer=rescorer, by_row=True)
            scores = reranker(narrow, near)
        if count:
            own = reranker(narrow[:count], rows[:, None])
            others = without_own(best[:count], nearest[:count], rows)
            self._check_sampled(gate, rows, own, others, near[:count], scores[:count])
        if canaries is not None:
            share = recall(best[count:, :_TOP_K], scores[count:, :_TOP_K])
            gate.found.update(queries=len(canaries), query_recall=share)
            gate.blame(_below(share, gate.bound["query_recall"], "canary queries"))
            self._check_answers(gate, canaries, narrow[count:], rescorer)
        gate.found["hits_missing"] = lacking = int(np.count_nonzero(near < 0))
        gate.blame({f"{lacking} of the {near.size} hits asked for are no row": lacking})

    def _exact(self, queries: NDArray[np.float64]) -> tuple[Vectors, Rows]:
        """Return scores and numbers (q, 11) of the rows nearest to queries, projected afresh."""
        whitening = self.candidate.whitening

        def projected() -> Iterator[Vectors]:
            for block in CorpusEmbeddings(self.encoded.store, self.encoded.record).blocks():
                yield whitening.vectors(block).astype(np.float32)
                self.encoded.stages.watcher.advance(len(block))

        vectors = whitening.vectors(queries).astype(np.float32)
        return exact_neighbours(projected(), vectors, _TOP_K + 1)

    def _check_sampled(
        self, gate: Gate, rows: Rows, own: Vectors, best: Vectors, near: Rows, scores: Vectors
    ) -> None:
        """Check that rows find themselves, and their neighbours, themselves left out."""
        # A row that is as near is equal to it. By dot product, longer ones may be nearer, and the
        # row need not be found.
        equal = (near == rows[:, None]) | (np.abs(scores - own) <= rounding(own))
        itself = equal.any(axis=1) | (own < best[:, -1:] - rounding(own))[:, 0]
        gate.found["self_found"] = share = float(itself.mean())
        if share < gate.bound["self_found"]:
            lost = rows[~itself]
            first = self.candidate.documents.ids([int(lost[0])])[0]
            gate.faults.append(
                f"{len(lost)} of {len(rows)} sampled rows do not find themselves, the first being "
                f"that of id {first!r}"
            )
        others = without_own(scores, near, rows)
        gate.found["recall"] = found = recall(best, others)
        gate.blame(_below(found, gate.bound["recall"], "sampled rows"))

    def _check_answers(
        self, gate: Gate, canaries: CanaryFile, queries: Vectors, rescorer: Reranker | None
    ) -> None:
        """Check that the documents expected are among the ten nearest, as a user would see them."""
        asked = [place for place, ids in enumerate(canaries.expected) if ids]
        if not asked:
            return
        documents = self.candidate.documents
        _, near = self.candidate.search(queries[asked], _TOP_K, rescorer=rescorer)
        missed: list[tuple[int, str]] = []
        for place, rows in zip(asked, near, strict=True):
            seen = {str(name) for name in documents.ids(rows[rows >= 0].tolist())}
            missed += [(place, name) for name in canaries.expected[place] if name not in seen]
        total = sum(map(len, canaries.expected))
        gate.found.update(expected=total, expected_found=total - len(missed))
        for place, name in missed[:1]:
            there = ""
            try:
                documents.find(name)
            except CorpusError:
                there = ", which the index does not hold"
            gate.faults.append(
                f"{len(missed)} of {total} documents expected are not among the {_TOP_K} nearest, "
                f"the first being {name!r} of {canaries.query_name(place)}{there}"
            )

    def _least_recall(self, canaries: int) -> float | None:
        """Return the recall that so many canaries must reach, None if the index was set to none."""
        if self.config.canary_recall is not None:
            return self.config.canary_recall
        tuned = self.candidate.manifest["factory"]["tuned"]
        recall: float | None = tuned["recall"]
        target: float = tuned["target"]
        if recall is not None:
            target, canaries = min(recall, target), min(tuned["queries"], canaries)
        elif not tuned["reached"]:
            return None
        # Otherwise it is exact by its structure, and was not measured.
        margin = _RECALL_MARGIN * math.sqrt(max(_ENOUGH / max(canaries, 1), 1.0))
        return max(round(target - margin, 6), 0.0)


def _below(share: float | None, least: float | None, what: str) -> dict[str, bool]:
    if share is None or least is None:
        return {}
    said = f"{what} find {share:.1%} of their {_TOP_K} exact neighbours, below {least:.1%}"
    return {said: share < least}


def _least_self(inner: Any, least: float | None) -> float:
    if is_exact(inner):
        return 1.0
    if least is None:
        # Nothing is known of the losses of its codes.
        least = 0.0 if is_lossy(inner) else 1.0
    if least < _FINE_RECALL:
        # Codes so coarse that many rows share one, or a graph torn by copies of one row.
        return least
    return _LEAST_SELF_OF_GRAPH if is_graph(inner) else _LEAST_SELF


def certificate_gate(
    made: Mapping[str, Any], most: float, before: Mapping[str, Any] | None = None
) -> Gate:
    """Return the gate of a certificate: no stratum may lose more than ``most`` points.

    Nor may a value of a column be measured no more that the certificate ``before`` measured, nor
    other judgements be asked.
    """
    gate = Gate("certificate", {"at_most": made["at_most"]}, {"at_most": most})
    for each in (made, *made["strata"]):
        least, greatest = each["interval"]
        what = f"questions with {each['by']} {each['value']}" if "by" in each else "all questions"
        said = (
            f"{what} lose {each['loss']:.2f} points of {made['measure']} ({least:.2f} to "
            f"{greatest:.2f}, 95 %), and {most:g} are allowed"
        )
        gate.blame({said: greatest > most})
    gate.blame({OTHER_JUDGEMENTS: (before or made)["judgements"] != made["judgements"]})
    # A column of more values than before is cut into thirds now.
    thirds = {one["by"] for one in made["strata"]} - {*made["inputs"]["by"]}
    columns = {
        name
        for name in made["inputs"]["by"]
        if not {f"{name}, in thirds", f"length of {name}"} & thirds
    }
    was, now = (
        {(one["by"], one["value"]) for one in some["strata"] if one["by"] in columns}
        for some in (before or made, made)
    )
    for by, value in sorted(was - now):
        gate.blame({f"fewer than {LEAST_QUESTIONS} questions are left with {by} {value}": True})
    return gate
