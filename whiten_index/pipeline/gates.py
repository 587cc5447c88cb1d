"""Findings of gates, and the file of canary queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from whiten_index.artifacts.files import walk_files
from whiten_index.corpus.batches import ID
from whiten_index.errors import GateError
from whiten_index.index.examine import Examined, examine
from whiten_index.index.library import INDEX
from whiten_index.index.ondisk_ivf import IVF_DATA
from whiten_index.pipeline.canaries import CanaryFile, Encode, Trial, check_canaries
from whiten_index.pipeline.update_config import GateConfig
from whiten_index.progress import Stages
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusRecord
from whiten_index.versions.bundle import Bundle
from whiten_index.whitening.transform import Whitening


@dataclass(frozen=True)
class BaseCounts:
    """The version before, and what became of its rows; rows are passages where it has these.

    Attributes:
        rows: of its index.
        new: rows that came since, None where it is not known.
        deleted: rows that went, None where it is not known.
    """

    rows: int
    new: int | None = None
    deleted: int | None = None

    @property
    def expected(self) -> int | None:
        """Rows that there should be now, None where it is not known."""
        if self.new is None or self.deleted is None:
            return None
        return self.rows - self.deleted + self.new


@dataclass(frozen=True)
class Gate:
    """What one gate found.

    Attributes:
        name: counts, codes, canaries or size.
        passed: whether the version may be published for all this gate knows.
        found: figures, as JSON values.
        bound: what was asked of them.
        why: what failed, in sentences; empty where nothing did.
    """

    name: str
    passed: bool
    found: dict[str, Any]
    bound: dict[str, Any]
    why: str = ""

    @classmethod
    def of(
        cls, name: str, found: dict[str, Any], bound: dict[str, Any], faults: Sequence[str]
    ) -> Gate:
        """Return a gate that is passed where there are no faults."""
        return cls(name, not faults, found, bound, "; ".join(faults))

    def to_json(self) -> dict[str, Any]:
        """Return the finding as JSON values."""
        return dict(vars(self))


def require_passed(gates: Sequence[Gate], *, candidate: Path | str) -> None:
    """Refuse a version that did not pass.

    Args:
        gates: what they found.
        candidate: folder in which the version is kept aside.

    Raises:
        GateError: one of them was not passed.
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


# The index may take so many times what was expected, and what heads of small files take.
_EXPECTED_TIMES, _HEADS = 2, 1 << 20


def check_counts(
    candidate: Bundle, store: EmbeddingStore, record: CorpusRecord, base: BaseCounts | None
) -> Gate:
    """Tell whether every row read is accounted for, and every row of the index has its own id."""
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
    bound: dict[str, Any] = {}
    faults = []
    used = counts["encoded"] + counts["reused"]
    if counts["read"] != used + skipped:
        faults.append(
            f"{counts['read']} rows were read, and {used + skipped} encoded, reused or skipped"
        )
    made = counts.get("passages") or used
    if not candidate.grouped and made != rows:
        faults.append(f"{made} rows were encoded or reused, and the corpus has {rows}")
    if candidate.grouped and counts.get("passages") != rows:
        faults.append(f"{counts.get('passages')} passages were cut, and the corpus has {rows}")
    for what, held in (("index", indexed), ("documents file", documents)):
        if held != rows:
            faults.append(f"the {what} holds {held} rows, and the corpus has {rows}")
    if base is not None and base.expected is not None:
        bound |= {"rows": base.expected, "base_rows": base.rows}
        bound |= {"new": base.new, "deleted": base.deleted}
        if base.expected != rows:
            faults.append(
                f"{base.rows} rows before, {base.deleted} of them deleted, and {base.new} new ones "
                f"make {base.expected}, and the corpus has {rows}"
            )
    if documents == rows:
        found["wrong_ids"] = _wrong_ids(candidate, store, record)
        bound["wrong_ids"] = 0
        if found["wrong_ids"]:
            faults.append(f"{found['wrong_ids']} rows have the id of another document")
    return Gate.of("counts", found, bound, faults)


def _wrong_ids(candidate: Bundle, store: EmbeddingStore, record: CorpusRecord) -> int:
    """Return how many rows have another id than in the store."""
    wrong = start = 0
    for part in record.parts:
        if not part.rows:
            continue
        ours = candidate.documents.id_column(start, start + part.rows)
        start += part.rows
        theirs = store.documents(part)[ID]
        if ours.equals(theirs):
            continue
        try:
            same = pc.equal(ours, theirs.cast(ours.type))
        except pa.ArrowException:
            wrong += part.rows
        else:
            wrong += part.rows - int(pc.sum(same).as_py() or 0)
    return wrong


def check_codes(candidate: Bundle) -> Gate:
    """Tell whether the transform, the codes and what they were learned by are finite and whole."""
    arrays = _broken_arrays(candidate.whitening)
    seen = examine(candidate.index)
    found = {"broken_arrays": arrays, **_as_json(seen)}
    bound = {"broken": 0, "lost": 0, "strange": 0}
    faults = []
    if arrays:
        faults.append(f"the whitening holds NaN or infinity ({', '.join(arrays)})")
    if seen.broken:
        faults.append(f"the codes of {seen.broken} rows hold NaN or infinity")
    if seen.lost:
        faults.append(f"{seen.lost} of {seen.rows} rows are in none of the index's lists")
    if seen.strange:
        faults.append(f"{seen.strange} entries of the index's lists are no row, or one twice")
    if not seen.learned:
        faults.append("the index's centroids or codebooks hold NaN or infinity")
    return Gate.of("codes", found, bound, faults)


def _as_json(seen: Examined) -> dict[str, Any]:
    return {
        name: getattr(seen, name)
        for name in ("rows", "decoded", "broken", "lost", "strange", "learned")
    }


def _broken_arrays(whitening: Whitening) -> list[str]:
    arrays = {"scales": whitening.scales(), **vars(whitening)}
    return sorted(
        name
        for name, value in arrays.items()
        if isinstance(value, np.ndarray) and not name.startswith("_")
        if not np.isfinite(value).all()
    )


def check_size(candidate: Bundle, base: BaseCounts | None, config: GateConfig) -> Gate:
    """Tell whether rows and bytes are within bounds."""
    rows = len(candidate)
    files = list(walk_files(candidate.folder))
    size = sum(path.stat().st_size for path in files)
    found: dict[str, Any] = {"rows": rows, "bytes": size}
    bound: dict[str, Any] = {}
    faults = []
    if base is not None:
        least = base.rows * (1 - config.max_shrink)
        most = base.rows * (1 + config.max_growth)
        bound |= {"least_rows": least, "most_rows": most}
        if rows < least:
            gone = 1 - rows / base.rows
            faults.append(
                f"{rows} rows are {gone:.1%} fewer than the {base.rows} before, and --max-shrink "
                f"is {config.max_shrink:g}"
            )
        if rows > most:
            faults.append(
                f"{rows} rows are too many beside the {base.rows} before: --max-growth is "
                f"{config.max_growth:g}"
            )
    names = (INDEX, IVF_DATA)
    found["index_bytes"] = sum(each.stat().st_size for each in files if each.name in names)
    expected = int(candidate.manifest["factory"]["expected_bytes"]["total"])
    bound["index_bytes"] = _EXPECTED_TIMES * expected + _HEADS
    if found["index_bytes"] > bound["index_bytes"]:
        faults.append(
            f"the index takes {found['index_bytes']:,} bytes, more than {_EXPECTED_TIMES} times "
            f"the {expected:,} expected of {rows} rows"
        )
    if config.most_bytes is not None:
        bound["bytes"] = config.most_bytes
        if size > config.most_bytes:
            faults.append(f"the files take {size:,} bytes, and --max-bytes is {config.max_bytes}")
    return Gate.of("size", found, bound, faults)


def run_gates(
    candidate: Bundle,
    store: EmbeddingStore,
    record: CorpusRecord,
    *,
    config: GateConfig,
    stages: Stages,
    base: BaseCounts | None = None,
    canaries: CanaryFile | None = None,
    encode: Encode | None = None,
    seed: int = 0,
) -> tuple[Gate, ...]:
    """Run every gate; a gate that fails does not raise, but says so.

    That takes a look at every row of the index and a projection of every row of the store.

    Args:
        candidate: the version as opened from its files, its manifest what it will be: of it
            ``counts``, ``corpus`` and ``factory`` are read.
        store: of its embeddings.
        record: its corpus.
        config: bounds.
        stages: where the time is shown.
        base: the version before, None for the first one.
        canaries: queries of one's own.
        encode: texts -> raw embeddings (n, d) of queries, where those are texts.
        seed: of the sample.

    Raises:
        ConfigError: queries are texts and there is no ``encode``.
    """
    counts = check_counts(candidate, store, record, base)
    with stages.stage("check codes", len(candidate)) as watcher:
        codes = check_codes(candidate)
        watcher.advance(len(candidate))
    whole = len(candidate) == len(candidate.documents) == record.rows
    if not whole or not codes.passed:
        # Rows that are not those of the store cannot be compared with it.
        why = "they were not tried, since rows or codes are not as they should be"
        tried = Gate.of("canaries", {}, {}, [why])
    else:
        trial = Trial(candidate, store, record, stages)
        found, bound, faults = check_canaries(trial, config, canaries, encode, seed=seed)
        tried = Gate.of("canaries", found, bound, faults)
    return counts, codes, tried, check_size(candidate, base, config)
