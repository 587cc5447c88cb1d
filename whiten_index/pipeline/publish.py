"""The identity, files and manifest of a new version."""

import contextlib
import datetime
import platform
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from whiten_index import __version__
from whiten_index.artifacts.atomic import remove_path
from whiten_index.artifacts.manifest import fingerprint
from whiten_index.artifacts.storage import Place, Storage, settled
from whiten_index.distributed.executors import remote_call
from whiten_index.encoding.canary import without_canary
from whiten_index.errors import GateError, StorageError
from whiten_index.index.choice import IndexPlan
from whiten_index.index.exact import Rows, Scores, Vectors, exact_neighbours, recall
from whiten_index.index.factory import inner_index
from whiten_index.index.faiss_build import CodeReuse, IndexBuildResult, build_faiss_index
from whiten_index.index.library import INDEX, describe_faiss
from whiten_index.index.ondisk_ivf import IVF_DATA
from whiten_index.index.transforms import is_lossy
from whiten_index.index.tuning import has_parameters, without_own
from whiten_index.paths import is_uri
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.encode import EncodeReport
from whiten_index.pipeline.fit import Fitted
from whiten_index.progress import Stages
from whiten_index.search.rerank import EMBEDDINGS, Reranker
from whiten_index.search.search_index import hits_of
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusRecord
from whiten_index.store.sampling import CorpusEmbeddings, drawn_rows
from whiten_index.versions.bundle import Bundle, open_unsealed
from whiten_index.versions.documents import write_documents
from whiten_index.versions.published import (
    DOCUMENTS,
    MOMENTS,
    RECORD,
    WHITENING,
    Version,
    ensure_index_id,
    new_version,
)
from whiten_index.versions.version_manifest import VERSION_SCHEMA
from whiten_index.whitening.transform import Whitening

# Fields of a manifest that a report has too.
_SHOWN = ("whitening", "quality", "choice", "factory", "bytes", "created", "made_by")
_TOP_K, _COMPARED, _LEAST_COMPARED = 10, 200, 100
_POOR = 0.5  # a lower agreement deserves a warning
_UNCHANGED = 0.9  # of the rows, for an agreement to be carried over


@dataclass(frozen=True)
class VersionSpec:
    """Transform, index plan and identity of a version to be made.

    ``reuse`` are codes of another version, and ``kept`` is the version that the transform comes
    from unless it was fitted.
    """

    fitted: Fitted
    plan: IndexPlan
    identity: str
    reuse: CodeReuse | None = None
    kept: Version | None = None


@dataclass(frozen=True)
class BuildReport:
    """Result of a build; ``up_to_date`` if the version was there, made of the same inputs."""

    out: Place  # the index folder, or its URI
    version: str  # the published version
    up_to_date: bool
    manifest: Mapping[str, Any]  # of the version
    encoded: EncodeReport  # the report of its first half

    def __repr__(self) -> str:
        rows, done = self.encoded.record.rows, "up to date" * self.up_to_date or "published"
        kind = type(self).__name__
        return f"{kind}({str(self.out)!r}, version {self.version}, {rows:,} rows, {done})"

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        encoded = self.encoded.to_json()
        encoded.pop("encoder")
        return {
            "out": str(self.out),
            **encoded,
            "version": self.version,
            "up_to_date": self.up_to_date,
            **{name: self.manifest.get(name) for name in _SHOWN},
        }


def register(encoded: EncodeReport, out: Place) -> None:
    """Register an index with the store that it is built from, or note that it cannot be.

    Not with the folder of bridged rows, which goes with their version.
    """
    store = encoded.store if encoded.work is None else encoded.work.store
    index_id = None if is_uri(out) else ensure_index_id(Path(out))
    try:
        store.indexes.register(out, index_id)
    except StorageError as error:
        encoded.stages.watcher.note(
            f"note: the store cannot remember that {out} is built from it ({error}); do not gc it"
        )


def version_identity(
    encoded: EncodeReport, fitted: Fitted, plan: IndexPlan, *, kept: Mapping[str, Any] | None = None
) -> str:
    """Return the fingerprint of a version's inputs and choices.

    ``kept`` identifies a transform that was not fitted on this corpus.
    """
    choices = fitted.whitening.choices()
    if fitted.choice is not None:
        # The manifest records how it was chosen.
        choices["chosen"] = fingerprint(asdict(fitted.choice))
    inner = inner_index(plan.built, fitted.whitening.k)
    tuned = has_parameters(inner) or plan.rerank is not None
    factory = {
        "asked": plan.asked,
        "built": plan.built,
        "target_recall": plan.target_recall if tuned else None,
        "memory_budget": plan.budget,
        "rotated": is_lossy(inner),
        # Versions that were made without a limit keep their identity.
        **({} if plan.max_latency is None else {"max_latency": plan.max_latency}),
    }
    return fingerprint(
        {
            "format_version": VERSION_SCHEMA.version,
            "corpus": encoded.record.fingerprint,
            "encoder": without_canary(encoded.store.encoder),
            "encoder_fingerprint": encoded.store.fingerprint,
            "whitening": choices,
            "factory": factory,
            "seed": plan.seed,
            "kept": None if kept is None else dict(kept),
        }
    )


@contextlib.contextmanager
def version_folder(
    root: Path, version: str, mirror: Storage, rows: int, stages: Stages
) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yield the folder and the manifest's fields of a new version, which is sealed afterwards."""
    new = new_version(root, version, mirror)
    with contextlib.ExitStack() as sealing, new as (folder, fields):
        yield folder, fields
        sealing.enter_context(stages.stage("publish", rows)).advance(rows)
        fields |= {"seconds": dict(stages.seconds), "stage_rows": dict(stages.rows)}


def write_files(
    folder: Path, config: BuildConfig, encoded: EncodeReport, spec: VersionSpec, version: str
) -> dict[str, Any]:
    """Write index, transform, documents and corpus record; return the manifest's fields."""
    store, record, fitted, stages = encoded.store, encoded.record, spec.fitted, encoded.stages
    if spec.kept is None:
        fitted.whitening.save(folder / WHITENING)
        fitted.moments.save(folder / MOMENTS)
    else:
        for name in (WHITENING, MOMENTS):
            shutil.copyfile(spec.kept.file(name), folder / name)
    documents = (store.documents(part) for part in record.parts if part.rows)
    write_documents(folder / DOCUMENTS, documents)
    record.save(folder / RECORD)
    spec, made = _make_index(folder, config, encoded, spec)
    if spec.kept is not None:
        # They were checked before the corpus was encoded, and read since.
        spec.kept.check_read(WHITENING, MOMENTS, *((INDEX, IVF_DATA) if spec.reuse else ()))
    fields = {
        **_facts(config, encoded, spec, made),
        "version": version,
        "bytes": {
            "raw": encoded.raw_bytes,
            "vectors": made.sizes.codes,
            "index_file": made.file_bytes,
            "documents_file": (folder / DOCUMENTS).stat().st_size,
            "index": made.sizes.to_json(),
        },
    }
    bundle = _require_searchable(folder, fields)
    fields["quality"] = _carried_quality(spec)
    if fields["quality"] is None and record.rows >= _LEAST_COMPARED:
        with stages.whole("compare with raw", record.rows):
            fields["quality"] = _quality(encoded, bundle, config.seed)
    share = (fields["quality"] or {}).get("agreement_at_10", 1.0)
    if share < _POOR:
        stages.watcher.note(
            f"note: the index finds only {share:.0%} of the ten nearest by raw embeddings; a "
            "larger --k, an --exponent nearer 0 or a finer --factory finds more"
        )
    return fields


def _make_index(
    folder: Path, config: BuildConfig, encoded: EncodeReport, spec: VersionSpec
) -> tuple[VersionSpec, IndexBuildResult]:
    """Write the first index planned that keeps ``max_latency``; return its version and facts."""
    faults = list[str]()
    for plan in (spec.plan, *spec.plan.faster):
        if faults:
            encoded.stages.watcher.note(f"note: {faults[-1]}; {plan.built} is tried")
            plan = replace(plan, why=faults[-1])
            spec = replace(spec, plan=plan, reuse=None)
            remove_path(folder / IVF_DATA)
        made = build_faiss_index(
            CorpusEmbeddings(encoded.store, encoded.record),
            spec.fitted.whitening,
            plan,
            encoded.stages,
            folder,
            reuse=spec.reuse,
            # Workers join an index on a disk that all share, not in a copy of a bucket.
            executor=None if isinstance(config.out_place, str) else encoded.executor,
        )
        if plan.max_latency is None:
            return spec, made
        # Not kept under a name: the next index needs its memory.
        facts = _facts(config, encoded, spec, made)
        opened = partial(open_unsealed, folder, facts, mapped=made.mapped)
        p95_ms = _p95_ms(encoded, opened(), config.seed)
        point = replace(made.tuned, p95_ms=p95_ms)
        if point.reached and p95_ms <= 1000 * plan.max_latency:
            return spec, replace(made, tuned=point)
        share = ("unknown", "1")[point.reached] if point.recall is None else f"{point.recall:.3f}"
        fault = "is too slow" if point.reached else "finds too few neighbours"
        faults.append(f"{plan.built} {fault} (recall {share}, p95 {p95_ms:.2f} ms)")
    raise GateError(
        f"--target-recall {config.target_recall:g} and --max-latency {config.max_latency} cannot "
        f"both be kept: {'; '.join(faults)}; build with a lower --target-recall, a longer "
        "--max-latency, a smaller --k or another --factory. What was encoded is kept"
    )


def _drawn_queries(
    encoded: EncodeReport, bundle: Bundle, seed: int
) -> tuple[Rows, Vectors, Reranker | None]:
    """Return 200 rows in rising order, their raw embeddings, and the reranker of the version."""
    store, record = encoded.store, encoded.record
    rows = np.sort(drawn_rows(record, _COMPARED, np.random.default_rng(seed)))
    queries = CorpusEmbeddings(store, record).at(rows).astype(np.float32)
    most = int(bundle.manifest["factory"]["rerank"] or 0)
    again = Reranker(store, record, bundle.whitening, candidates=most) if most else None
    return rows, queries, again


def _p95_ms(encoded: EncodeReport, bundle: Bundle, seed: int) -> float:
    """Return the milliseconds in which 95 % of single searches answer, warm, by one thread."""
    _, queries, again = _drawn_queries(encoded, bundle, seed)
    seconds = list[float]()
    with encoded.stages.stage("time searches", 0), threadpool_limits(1, "blas"):
        bundle.search(queries, _TOP_K, rescorer=again)
        for query in np.tile(queries, (2, 1)):
            started = time.perf_counter()
            bundle.search(query[None], _TOP_K, rescorer=again)
            seconds.append(time.perf_counter() - started)
    # The lesser of two times of each, as other work on the machine comes between.
    return 1000 * float(np.percentile(np.reshape(seconds, (2, -1)).min(axis=0), 95))


def _carried_quality(spec: VersionSpec) -> dict[str, Any] | None:
    """Return the agreement of the version whose codes are kept; None if too many rows changed."""
    kept = spec.kept
    measured: dict[str, Any] | None = kept.fields.get("quality") if kept else None
    if spec.reuse is None or kept is None or not measured:
        return None
    here = spec.reuse.old_rows
    stayed = np.count_nonzero(here >= 0) / max(len(here), kept.fields["rows"])
    share = float(measured.get("unchanged", 1.0) * stayed)
    return {**measured, "unchanged": share} if share >= _UNCHANGED else None


def _quality(encoded: EncodeReport, bundle: Bundle, seed: int) -> dict[str, float] | None:
    """Return the share of 200 rows' ten nearest by raw embeddings that the index finds."""
    rows, queries, again = _drawn_queries(encoded, bundle, seed)
    given = encoded.store, encoded.record, bundle.whitening, queries
    best, near = remote_call(encoded.executor, encoded.stages, _raw_neighbours, *given)
    best = without_own(best, near, rows)
    _, found = bundle.search(queries, _TOP_K + 1, rescorer=again, by_row=True)
    raw = Reranker(*given[:3], candidates=0, by=EMBEDDINGS)
    share = recall(best, raw(queries, without_own(found, found, rows)))
    return None if share is None else {"agreement_at_10": share, "queries": len(rows)}


def _raw_neighbours(
    _: Stages, store: EmbeddingStore, record: CorpusRecord, whitening: Whitening, queries: Vectors
) -> tuple[Scores, Rows]:
    """Return scores and numbers (q, 11) of the rows nearest to raw queries, untransformed."""

    def compared(block: NDArray[np.floating]) -> Vectors:
        return whitening.compared(np.ascontiguousarray(block, dtype=np.float32))

    blocks = map(compared, CorpusEmbeddings(store, record).blocks())
    return exact_neighbours(blocks, compared(queries), _TOP_K + 1)


def _require_searchable(folder: Path, fields: Mapping[str, Any]) -> Bundle:
    """Search once as readers will, so that a broken version is not published."""
    bundle = open_unsealed(folder, fields)
    query = bundle.whitening.mean + np.random.default_rng(0).normal(size=(1, bundle.dim))
    scores, rows = bundle.search(query.astype(np.float32), 1)
    # The list that is searched first may be empty: then any row will do.
    hits_of(bundle, scores[0], np.maximum(rows[0], 0))
    return bundle


def _facts(
    config: BuildConfig, encoded: EncodeReport, spec: VersionSpec, made: IndexBuildResult
) -> dict[str, Any]:
    choice, index = spec.fitted.choice, spec.plan
    return {
        **VERSION_SCHEMA.headed(),
        "identity": spec.identity,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "config": config.to_json(),
        "store": str(settled(config.store_place)),
        "corpus": {
            "fingerprint": encoded.record.fingerprint,
            "source": dict(encoded.record.source),
        },
        "encoder": encoded.store.encoder,
        "encoder_fingerprint": encoded.store.fingerprint,
        "runtimes": encoded.store.results.runtimes(),
        "whitening": spec.fitted.whitening.describe(),
        "choice": None if choice is None else asdict(choice),
        "rows": encoded.record.rows,
        "counts": encoded.counts.to_json(),
        "factory": {
            "asked": index.asked,
            "built": index.built,
            "why": index.why,
            "expected_bytes": index.expected.to_json(),
            "tuned": asdict(made.tuned),
            "rerank": made.rerank,
            "memory_budget": index.budget,
            "device": made.device,
            "mapped": made.mapped,
        },
        "made_by": {
            "whiten_index": __version__,
            "faiss": describe_faiss(),
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }
