"""All gates, one after the other."""

from __future__ import annotations

from whiten_index.gates.canaries import Encode, Trial, check_canaries
from whiten_index.gates.checks import check_codes, check_counts, check_size
from whiten_index.gates.config import Base, Gate, GateConfig
from whiten_index.gates.file import CanaryFile
from whiten_index.index import Bundle
from whiten_index.progress import Stages
from whiten_index.store import CorpusRecord, EmbeddingStore


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
