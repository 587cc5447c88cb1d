"""Gates that count and measure: rows and ids, codes, bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from whiten_index.artifacts.files import walk_files
from whiten_index.corpus.batches import ID
from whiten_index.index.examine import Examined, examine
from whiten_index.index.library import INDEX
from whiten_index.index.ondisk_ivf import IVF_DATA
from whiten_index.pipeline.canaries import Encode, Trial, check_canaries
from whiten_index.pipeline.gates import Base, CanaryFile, Gate
from whiten_index.pipeline.update_config import GateConfig
from whiten_index.progress import Stages
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusRecord
from whiten_index.versions.bundle import Bundle
from whiten_index.whitening.transform import Whitening

# The index may take so many times what was expected, and what heads of small files take.
_EXPECTED_TIMES, _HEADS = 2, 1 << 20


def check_counts(
    candidate: Bundle, store: EmbeddingStore, record: CorpusRecord, base: Base | None
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


def check_size(candidate: Bundle, base: Base | None, config: GateConfig) -> Gate:
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
    base: Base | None = None,
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
        tried = check_canaries(trial, config, canaries, encode, seed=seed)
    return counts, codes, tried, check_size(candidate, base, config)
