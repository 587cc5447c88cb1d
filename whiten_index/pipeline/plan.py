"""Plans of a build and of an update: rows, time and bytes, without writing anything."""

import time
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np

from whiten_index.artifacts.files import exists
from whiten_index.corpus.batches import EmbeddingBatch, TextBatch
from whiten_index.corpus.sharding import Shard
from whiten_index.encoding.encoder_config import chosen_devices
from whiten_index.errors import ConfigError
from whiten_index.pipeline.base_version import (
    advising,
    nothing_to_do,
    open_base,
    require_not_withdrawn,
)
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.changes import StoredRows, apart, compare, count_documents, document_rows
from whiten_index.pipeline.early_checks import check_early, possible_widths
from whiten_index.pipeline.encode import kept_parts, open_corpus
from whiten_index.pipeline.gates import size_faults
from whiten_index.pipeline.labels import read_labels
from whiten_index.pipeline.shard_encoding import ReadShard, ShardWork, shard_work
from whiten_index.pipeline.update_config import UpdateConfig
from whiten_index.progress import Progress, Stages
from whiten_index.store.dtypes import StoreDtype
from whiten_index.store.records import CorpusPart, CorpusRecord
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.selection import widths
from whiten_index.whitening.spectrum import Spectrum

_CALIBRATION_ROWS, _PAID_ROWS = 256, 64
_FLOAT32_BYTES = 4
_SPARE = 1.1  # room beyond what files are expected to take
# Stages that every update repeats with all rows.
_AGAIN = (
    "fit", "train", "exact neighbours", "project and add", "tune", "publish",
    "check codes", "check canaries", "compare with raw", "certify", "time searches",
)  # fmt: skip


def plan_build(config: BuildConfig, *, progress: Progress | None = None) -> dict[str, Any]:
    """Estimate a build or an encode, and write nothing.

    Returns:
        JSON values. Only ``read`` and ``reused`` are counted, the latter in rows or passages. Rate
        and seconds are None if nothing is to be encoded; ``k`` is the widest unless it is settled.
    """
    if not config.corpus:
        raise ConfigError("--plan estimates the reading of a corpus; name one")
    stages = Stages(progress or Progress())
    corpus = open_corpus(config, stages)
    check_early(config, corpus)
    read_labels(config)
    work = shard_work(config, corpus, write=False)
    dim, missing = work.store.dim, list[Shard]()
    sample = Moments.empty(dim)
    rows = to_encode = raw_bytes = size = text_bytes = 0
    with stages.stage("look up shards", corpus.rows) as watcher:
        for shard in corpus.shards:
            found = work.look(shard, verify=False)
            rows, to_encode = rows + len(found.batch), to_encode + len(found.to_encode)
            size += _utf8_bytes(config, found.texts)
            text_bytes += _utf8_bytes(config, getattr(found.batch, "texts", ()))
            raw_bytes += len(found.batch) * dim * _itemsize(work, found)
            missing += [shard] if len(found.to_encode) else []
            if isinstance(found.batch, EmbeddingBatch) and not sample.count:
                sample = sample.update(found.batch.embeddings)
            watcher.advance(shard.rows)
    rate = _rows_per_second(config, work, missing, stages)
    pieces = _documents_cut(config, rows)
    # The pieces of a document have about as many bytes as it has.
    size += round(pieces * text_bytes / rows) if pieces else 0
    k, settled = _expected_width(config, rows=rows, dim=dim)
    rank = Spectrum.of(sample.covariance()).rank if sample.count > 1 else dim
    number = isinstance(config.k, int) or str(config.k).isdecimal()
    if number and k > rank and sample.count > rank + 1:
        stages.watcher.note(
            f"note: --k {k} is above the rank {rank} of a sample, and a build may refuse it"
        )
    choice = config.index_plan(rows=rows, dim=dim, k=k)
    return {
        "shards": len(corpus.shards),
        "read": corpus.rows,
        "reused": rows - to_encode,
        "to_encode": to_encode,
        "cut_in_pieces": pieces,
        "rows_per_second": rate,
        "seconds": None if rate is None else (to_encode + pieces) / rate,
        **_charge(work, size),
        "raw_bytes": raw_bytes,
        "vector_bytes": rows * k * _FLOAT32_BYTES,
        "factory": choice.built,
        "why": choice.why,
        "rerank": choice.rerank,
        "index_bytes": choice.expected.to_json(),
        "memory_budget": config.budget,
        "dim": dim,
        "k": k,
        "k_settled": settled,
        "store": str(config.store_place),
    }


@advising()
def plan_update(config: UpdateConfig, *, progress: Progress | None = None) -> dict[str, Any]:
    """Estimate an update, and write nothing.

    Returns:
        JSON values; rows are counted, seconds and bytes expected. ``bytes`` to write and ``free``
        ones are by folder. ``other_seconds`` are all but those of encoding, as of the published
        version. ``refused`` is why a gate would keep the version back, as far as rows show.
    """
    stages = Stages(progress or Progress())
    base, corpus, _ = open_base(config, stages)
    work = shard_work(base.config, corpus, write=False, bridged=base.bridged)
    kept = kept_parts(work, None if config.read_all else base.read_before(corpus))
    to_encode = stored = size = 0
    parts, missing = list[CorpusPart](), list[Shard]()
    read = dict[int, Shard]()
    with stages.stage("look up rows", corpus.rows) as watcher:
        for position, shards in groupby(corpus.shards, key=lambda shard: shard.file):
            if position in kept:
                parts += kept[position][1]
                watcher.advance(sum(shard.rows for shard in shards))
                continue
            for shard in shards:
                found = work.look(shard)
                documents = ""
                if len(found.batch):
                    documents = work.kept.name_documents(found.batch.documents)
                counted = len(found.batch), found.batch.read
                parts.append(CorpusPart(found.name, documents, *counted, 0, 0))
                read[id(parts[-1])] = shard
                to_encode += found.rows_to_encode
                size += _utf8_bytes(base.config, found.texts)
                missing += [shard] if found.missing.any() else []
                stored += _bytes(work, found, parts[-1])
                watcher.advance(shard.rows)
    record = CorpusRecord(corpus.config.source_identity(), tuple(parts), {})
    up_to_date = nothing_to_do(config, base, record)
    if not up_to_date:
        require_not_withdrawn(config, base, record)
    # Parts that differ are read once more, rather than held until all were read.
    gone, came, same = apart(base.record, record)
    again = (work.batch_of(read[id(part)]) for part in came if part.rows)
    changes = compare(
        StoredRows(base.store, gone),
        (document_rows(batch.documents, work.digests_of(batch)) for batch in again),
        same=count_documents(work.kept, same, passages=base.passages),
    )
    rate = _rows_per_second(base.config, work, missing, stages)
    # If the store has lost rows, they are encoded again without a new version.
    wanted = {base.source.root: 0, base.store.folder: stored}
    other, faults = sum(stages.seconds.values()), list[str]()
    if not up_to_date:
        had = max(base.record.rows, 1)
        whole = sum(file["bytes"] for file in base.fields["files"].values())
        # Lists within a budget are written in parts, which are then joined.
        times = _SPARE if base.config.budget is None else 2 * _SPARE
        wanted[base.source.root] = int(whole * corpus.rows / had * times)
        rows = {"rows": record.rows, "base_rows": base.record.rows}
        faults = size_faults(config, size=int(whole * record.rows / had), **rows)
        # A build has no gates, whose look at the vectors is one more projection.
        took = base.fields["seconds"]
        took = {"check canaries": took.get("project and add", 0.0), **took}
        other += sum(took.get(stage, 0.0) for stage in _AGAIN) * corpus.rows / had
    return {
        "base": base.source.name,
        "rows": changes.to_json(),
        "files": {"read": len(corpus.files) - len(kept), "skipped": len(kept)},
        "to_encode": to_encode,
        "rows_per_second": rate,
        "encode_seconds": None if rate is None else to_encode / rate,
        **_charge(work, size),
        "other_seconds": other,
        "bytes": {str(path): size for path, size in wanted.items()},
        "refit": config.order,
        "up_to_date": up_to_date,
        "refused": "; ".join(faults),
    }


def _itemsize(work: ShardWork, found: ReadShard) -> int:
    """Return the bytes of a number in the store; texts are expected to fit float16."""
    if work.dtype is not StoreDtype.OWN:
        return int(np.dtype(work.dtype.value).itemsize)
    batch = found.batch
    return int(batch.embeddings.itemsize) if isinstance(batch, EmbeddingBatch) else _FLOAT32_BYTES


def _bytes(work: ShardWork, found: ReadShard, part: CorpusPart) -> int:
    """Return about what a shard will take in the store: new rows, and files that are not there."""
    files = zip(
        work.kept.part_files(part),
        (found.digests.nbytes, int(found.batch.documents.nbytes)),
        strict=True,
    )
    size = sum(size for path, size in files if not exists(path))
    return size + len(found.to_encode) * work.store.dim * _itemsize(work, found)


def _rows_per_second(
    config: BuildConfig, work: ShardWork, missing: list[Shard], stages: Stages
) -> float | None:
    """Return rows/s of encoding a sample from the middle of what is missing, None without texts."""
    if config.embedding_column is not None or not missing:
        return None
    batch = work.batch_of(missing[len(missing) // 2])
    assert isinstance(batch, TextBatch)
    # Those of an API are paid for, and show how many tokens a byte is.
    most = _PAID_ROWS if config.remote else _CALIBRATION_ROWS
    sample = batch.texts[:: max(len(batch) // most, 1)][:most]
    with stages.stage("load encoder", 0):
        encoder = work.encoder()
        if not config.remote:
            encoder.encode(sample)
    with stages.whole("calibrate", len(sample)):
        started = time.perf_counter()
        encoder.encode(sample)
        elapsed = time.perf_counter() - started
    # GPUs and requests add up; the cores of one CPU do not.
    if config.remote:
        return encoder.requests_at_once * len(sample) / elapsed
    devices = chosen_devices(config.encoder_config().device)
    several = len(devices) if devices[0].startswith("cuda") else 1
    return several * len(sample) / elapsed


def _documents_cut(config: BuildConfig, rows: int) -> int:
    """Return how many documents at most are cut in pieces and encoded again to choose by."""
    given = config.embedding_column, config.queries
    chooses = config.chooses and config.out is not None and not any(given)
    return min(config.choose_sample, rows // 2) if chooses else 0


def _utf8_bytes(config: BuildConfig, texts: Sequence[str]) -> int:
    return sum(len(text.encode()) for text in texts) if config.remote else 0


def _charge(work: ShardWork, size: int) -> dict[str, float | None]:
    """Return the tokens of ``size`` bytes and their price, None where nothing is charged."""
    encoder = getattr(work.encoder, "loaded", None)
    tokens, cost = (None, None) if encoder is None else encoder.charge(size)
    return {"tokens": tokens, "cost": cost}


def _expected_width(config: BuildConfig, *, rows: int, dim: int) -> tuple[int, bool]:
    if config.k is not None or not config.chooses:
        k = config.whitening_config().width(dim)
        if k is not None:
            return k, True
    possible = possible_widths(config, dim, rows=rows)
    if possible is None:
        possible = (dim,) if config.budget is None else widths(dim)
    return max(possible), False
