"""The command migrate: from one embedding model to another, without a gap in the searches.

Rows are encoded by the new model, run by run. Until all are, a bridged version may stand in: rows
that the new model has not encoded are those of the old model, mapped to the new space.
"""

import contextlib
import datetime
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.atomic import remove_killed
from whiten_index.artifacts.lock import CLEANER, marked, only_writer
from whiten_index.artifacts.manifest import fingerprint
from whiten_index.artifacts.storage import settled
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.load_encoder import resolve_encoder
from whiten_index.encoding.spec import recorded_spec
from whiten_index.errors import (
    ArtifactError,
    BusyError,
    ConfigError,
    CorpusError,
    FormatError,
    GateError,
    StorageError,
    require_config,
)
from whiten_index.evaluation.judgements import JudgedQueries, read_judged
from whiten_index.evaluation.metrics import evaluate_each, mean_interval
from whiten_index.index.exact import Vectors, exact_neighbours
from whiten_index.paths import shown
from whiten_index.pipeline.base_version import BaseVersion
from whiten_index.pipeline.build import build_index
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.early_checks import check_early
from whiten_index.pipeline.encode import EncodeReport, encode_shards, open_corpus
from whiten_index.pipeline.executor_session import executor_session
from whiten_index.pipeline.pseudo_queries import draw_pieces
from whiten_index.pipeline.shard_encoding import shard_work
from whiten_index.pipeline.update_config import MigrateConfig, UpdateConfig
from whiten_index.progress import Progress, Stages
from whiten_index.store.embedding_store import (
    BRIDGED,
    EmbeddingStore,
    bridged_folders,
    open_stores,
    remove_bridged,
)
from whiten_index.store.notes import owner_of
from whiten_index.store.sampling import CorpusEmbeddings, ids_of
from whiten_index.store.segments import digests_name
from whiten_index.versions.migration import encoded_rows, filled_for, known_rows
from whiten_index.versions.published import read_published, tidy
from whiten_index.versions.references import indexes_of, lock_indexes, open_store
from whiten_index.versions.retention import before_bridged, bridged_versions, rollback, withdraw
from whiten_index.whitening.bridge import Bridge, joint_moments
from whiten_index.whitening.selection import reciprocal_ranks
from whiten_index.whitening.spectrum import unit_rows

METRIC, _TOP_K, _SHOWN = "ndcg@10", 10, 5
_LEAST_QUERIES, _LEAST_PAIRS = 30, 64
# One row in eight chooses the bridge, 2,000 at most.
_HELD_OUT, _MOST_HELD_OUT = 8, 2_000
_SHARD_ROWS = 1_024  # so that a part of the corpus is a sample of it

Side = tuple[EncodeReport, BuildConfig]  # a model's embeddings, and the build by it


@dataclass
class MigrateReport:
    """Result of a run of a migration."""

    index: str
    version: str | None  # published by this run, or earlier if there was nothing to do
    rows: int
    encoded: int  # by the new model, so far
    bridge: dict[str, Any] | None = None  # kind and agreement of the bridge that was published
    comparison: dict[str, Any] | None = None
    finished: bool = False
    given_up: bool = False
    stages: Stages = field(default_factory=lambda: Stages(Progress()), repr=False)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        shown = {name: value for name, value in vars(self).items() if name != "stages"}
        return {**shown, "seconds": dict(self.stages.seconds)}


def migrate_index(config: MigrateConfig, *, progress: Progress | None = None) -> MigrateReport:
    """Encode the corpus of an index by a new model, and publish a version of it.

    Run again to continue: nothing is encoded twice. Searches are answered by the published version
    all the while. An index that has the new model already is left as it is.

    Args:
        config: options; see ``MigrateConfig``.
        progress: see ``build_index``.

    Raises:
        GateError: the new model loses more than ``max_loss``; nothing is published.
        ConfigError: rows are passages or given embeddings.
        WhitenIndexError: others; see ``build_index``.

    Examples:
        >>> migrate_index(MigrateConfig(index="index", model="all-MiniLM-L6-v2")).finished
        True
    """
    require_config(config, MigrateConfig)
    stages = Stages(progress or Progress())
    if config.give_up:
        return _give_up(config, stages)
    base, target = migration_target(config)
    # Readers may have the version before open.
    kept = {str(read_published(config.index).fields["encoder_fingerprint"])}
    if resolve_encoder(target.encoder_config())[0].fingerprint == base.store.fingerprint:
        rows, name = base.record.rows, base.source.name
        _mark(base, base.store, under_way=False)
        _remove_bridged(base, base.store, but=kept)
        with only_writer(base.source.root, what="index"):
            tidy(base.source.root)
        # If another process writes there, it does that.
        unsaid = contextlib.suppress(BusyError, StorageError)
        with unsaid, only_writer(base.store.folder, what="store"):
            base.store.tidy()
        return MigrateReport(config.index, name, rows, rows, finished=True, stages=stages)
    judged = None
    if config.queries is not None and config.qrels is not None:
        # What is wrong with the files is said before hours of encoding.
        judged = read_judged(config.queries, config.qrels, split=config.qrels_split)
    encoded, whole = _fill(config, base, target, stages)
    new, rows = encoded.store, encoded.record.rows if whole else base.record.rows
    report = MigrateReport(config.index, None, rows, rows, stages=stages)
    old = EncodeReport(base.store, base.record, encoded.counts, stages)
    sides = (old, base.config), (encoded, target)
    if judged is None and config.max_loss is not None:
        report.comparison = _compare_by_sentences(sides)
    elif judged is not None and whole:
        report.comparison = _compare(judged, sides)
    facts = dict[str, Any]()
    if report.comparison is not None:
        _require_no_loss(config, report.comparison)
        facts["models"] = report.comparison
    if whole:
        report.version = build_index(target, progress=progress, facts=facts).version
        report.finished = True
        _mark(base, new, under_way=False)
        _remove_bridged(base, new, but=kept)
        return report
    report.encoded = encoded_rows(base.store, base.record, new)
    if config.bridge:
        bridge, length = _fit_bridge(base, new, stages)
        report.bridge = {"kind": bridge.kind, "agreement": bridge.agreement}
        store = _bridged_store(base, new, bridge, length, stages)
        build = _bridged_build(target, base, store)
        facts |= {"bridge": report.bridge, "bridged_from": base.source.name}
        made = build_index(build, progress=progress, facts=facts, bridged=store)
        report.version, report.rows = made.version, made.encoded.record.rows
        report.encoded = encoded_rows(store, made.encoded.record, new)
        _remove_bridged(base, new, but=kept)
    return report


def migration_target(config: MigrateConfig) -> tuple[BaseVersion, BuildConfig]:
    """Return the version of the old model, and the build of the index by the new one."""
    sources = read_published(config.index).fields["corpus"]["source"]["sources"]
    asked = UpdateConfig(
        index=config.index, corpus=tuple(sources), store=config.store, model=config.old_model,
        device=config.device,
    )  # fmt: skip
    base = BaseVersion.open(asked, version=_old_version(config.index))
    if base.config.embedding_column is not None or base.passages:
        raise ConfigError(
            "an index of given embeddings or of passages by tokens is built again, not migrated; "
            "build with the new model and another --out"
        )
    given = {name: getattr(config, name) for name in EncoderConfig.__dataclass_fields__}
    k = base.config.k if config.k is None else config.k
    store = str(base.store.place)
    return base, replace(base.config, **given, k=k, store=store, force=config.force)


def _old_version(index: str) -> str | None:
    """Return the version of the old model, None if it is published; refuse an index without."""
    before = before_bridged(index)
    if before is None and "bridge" in read_published(index).fields:
        raise ArtifactError(
            f"{index} has no sound version of the old model, from which a migration goes "
            "on; whiten-index versions tells whether one is damaged and can be restored; if not, "
            "build with the new model and the same --out and --store"
        )
    return before


def _fill(
    config: MigrateConfig, base: BaseVersion, target: BuildConfig, stages: Stages
) -> tuple[EncodeReport, bool]:
    """Encode rows by the new model that its store lacks: all, or of parts drawn at random.

    Return also whether the new model has encoded all rows of the corpus.
    """
    corpus, whole, most = open_corpus(target, stages), True, config.rows or 0
    check_early(target, corpus)
    own, first = target.row_filter, config.first
    filters = [own] if first is None else [f"({first}) and ({own})" if own else first, own]
    # Without a record of the whole corpus, gc would not know what is needed.
    _mark(base, shard_work(target, corpus).store, under_way=True)
    with executor_session(target, stages) as executor:
        for row_filter in filters if most else ():
            drawn = replace(target, shard_rows=_SHARD_ROWS, row_filter=row_filter)
            parts = open_corpus(drawn, stages)
            work, rows, chosen = shard_work(target, parts), 0, list[int]()
            order = np.random.default_rng(target.seed).permutation(len(parts.shards)).tolist()
            left = False
            for place in order:
                missing = 0 if left else len(work.look(parts.shards[place]).to_encode)
                left |= bool(missing) and rows >= most
                if missing and not left:
                    chosen.append(place)
                    rows += missing
            whole = not left and row_filter == own
            if rows and not whole:
                shards = tuple(parts.shards[place] for place in sorted(chosen))
                corpus = replace(parts, shards=shards)
                break
        encoded = encode_shards(target, corpus, stages, executor=executor, remember=whole)
        encoded.note_spent()
        return encoded, whole


def _give_up(config: MigrateConfig, stages: Stages) -> MigrateReport:
    """Publish the version of the old model if a bridged one is, and let gc remove the rest."""
    models = set[str]()
    if (before := _old_version(config.index)) is not None:
        if (model := recorded_spec(read_published(config.index).fields["encoder"])) is not None:
            models.add(model.fingerprint)
        rollback(config.index, to=before)
    published = read_published(config.index)
    remedy = "name it with --store DIR"
    store = open_store(published, given=config.store, reader="migrate", remedy=remedy)
    filled = filled_for(config.index, store.place)
    if before is None and not filled:
        raise ConfigError(f"{config.index} has no migration under way to give up")
    # Nobody goes back to rows of the new model, nor of another one that was tried before.
    models |= {each.fingerprint for each, _ in filled}
    withdraw(config.index, bridged_versions(config.index, models))
    for each, _ in filled:
        each.results.save_migration(owner_of(config.index), None)
    rows = int(published.fields["rows"])
    return MigrateReport(config.index, published.name, rows, 0, given_up=True, stages=stages)


def _mark(base: BaseVersion, new: EmbeddingStore, *, under_way: bool) -> None:
    """Note in the new model's store the migration that needs its rows, or that it is finished."""
    owner, notes = owner_of(base.config.out_place), new.results.migrations()
    if new.record_paths() and owner_of(None) not in notes:
        new.results.save_migration(owner_of(None), False)
    if bool(notes.get(owner)) != under_way:
        old, own = (recorded_spec(each.encoder) for each in (base.store, new))
        since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        note = {"from": old and old.name, "to": own and own.name, "since": since}
        new.results.save_migration(owner, under_way and note)


def _rows(store: EmbeddingStore, digests: NDArray[np.uint8]) -> NDArray[np.floating]:
    """Return the embeddings (n, d) of rows that a store has."""
    return np.asarray(store.rows(digests_name(digests), lambda: digests)[:])


def _pairs(
    base: BaseVersion, new: EmbeddingStore, *, held_out: bool
) -> Iterator[tuple[NDArray[np.floating], NDArray[np.floating]]]:
    """Yield embeddings (n, d) and (n, e) of rows that both models have encoded, part by part."""
    for part in base.record.parts:
        digests, known = known_rows(base.store, new, part)
        apart = digests[:, 0] % _HELD_OUT == 0
        rows = np.flatnonzero(known & (apart if held_out else ~apart))
        if len(rows):
            yield base.store.embeddings(part)[rows], _rows(new, digests[rows])


def _fit_bridge(base: BaseVersion, new: EmbeddingStore, stages: Stages) -> tuple[Bridge, float]:
    """Return the bridge to the new space, and the mean length of embeddings there."""
    held, count, length = list[Any](), 0, 0.0
    for pair in _pairs(base, new, held_out=True):
        held.append(pair)
        count += len(pair[0])
        length += float(np.linalg.norm(pair[1].astype(np.float64), axis=1).sum())
        if count >= _MOST_HELD_OUT:
            break
    if count < _LEAST_PAIRS:
        raise CorpusError(
            f"{count} rows of both models choose a bridge, and {_LEAST_PAIRS} are needed; encode "
            "more with --rows"
        )
    with stages.stage("fit bridge", base.record.rows):
        moments = joint_moments(_pairs(base, new, held_out=False))
        x, y = (np.concatenate(side) for side in zip(*held, strict=True))
        return Bridge.choose(moments, (x, y)), length / count


def _bridged_store(
    base: BaseVersion, new: EmbeddingStore, bridge: Bridge, length: float, stages: Stages
) -> EmbeddingStore:
    """Return a store in which rows are those of the new model, or of the old one, mapped."""
    identity = fingerprint({"encoder": new.fingerprint, "bridge": bridge.digest})
    store = EmbeddingStore.create(new.place, new.encoder, f"{_bridged(base)}{identity[:24]}")
    dtype = base.config.dtype_kept()
    with stages.stage("bridge", base.record.rows) as watcher:
        for part in base.record.parts:
            if not part.rows:
                continue
            digests, known = known_rows(base.store, new, part)
            rows = length * unit_rows(bridge.apply(base.store.embeddings(part)[:]))
            if known.any():
                rows[known] = _rows(new, digests[known])
            store.write(digests, rows.astype(np.float32), dtype=dtype)
            watcher.advance(part.rows)
    return store


def _bridged(base: BaseVersion) -> str:
    """Return the beginning of the names of an index's bridged rows."""
    return f"{BRIDGED}{fingerprint({'index': owner_of(base.config.out_place)})[:8]}"


def _remove_bridged(base: BaseVersion, new: EmbeddingStore, *, but: Collection[str]) -> None:
    """Remove the rows of earlier bridged versions of an index, which can be made again."""
    kept, root = set(but), new.place
    # A failure does no harm: gc removes the rest, or says why it cannot.
    suppressed = contextlib.suppress(ArtifactError, BusyError, FormatError, StorageError)
    with suppressed, contextlib.ExitStack() as locks:
        lock_indexes([settled(base.config.out_place)], root, locks)
        locks.enter_context(marked(root, CLEANER))
        if isinstance(root, Path):
            remove_killed(root)
        # A copy of the index may have published a version of the same rows.
        for index in (settled(base.config.out_place), *indexes_of(root, open_stores(root))):
            kept.add(read_published(index).fields["encoder_fingerprint"])
        for folder in bridged_folders(root):
            if folder.name.startswith(_bridged(base)) and folder.name not in kept:
                remove_bridged(root, folder.name)


def _bridged_build(target: BuildConfig, base: BaseVersion, store: EmbeddingStore) -> BuildConfig:
    """Return the build of a bridged version, by the transform of the old one, not centred.

    The means of mapped and of new rows differ: their common one would set them apart.
    """
    fit = base.fitted.whitening
    if target.chooses:
        k = min(fit.k, store.dim)
        target = replace(target, whiten=fit.kind.value, k=k, exponent=fit.exponent)
    center = bool(target.center) if fit.kind.reads_data else target.center
    return replace(target, center=center, queries=None, qrels=None, qrels_split=None)


def _compare(judged: JudgedQueries, sides: tuple[Side, Side]) -> dict[str, Any]:
    """Return nDCG@10 of both models by exact search of raw embeddings, and their difference."""
    each = [_scores(judged, *side) for side in sides]
    names = [name for name in each[0] if name in each[1]]
    if len(names) < _LEAST_QUERIES:
        raise CorpusError(
            f"{len(names)} queries of {judged.source} have an answer, and a comparison needs "
            f"{_LEAST_QUERIES}; judge more"
        )
    before, after = (np.array([scores[name] for name in names]) for scores in each)
    return _difference(METRIC, before, after, [judged.texts[name] for name in names])


def _compare_by_sentences(sides: tuple[Side, Side]) -> dict[str, Any]:
    """Return the MRR of both models where sentences search for the rest of their documents."""
    encoded, target = sides[1]
    assert encoded.work is not None
    size = min(target.choose_sample, encoded.record.rows)
    cut = draw_pieces(encoded, encoded.work, size, np.random.default_rng(target.seed))
    if isinstance(cut, str):
        raise CorpusError(f"{cut}; compare by judged queries: add --queries and --qrels")
    each, sentences = list[NDArray[np.float64]](), [pieces.sentence for _, pieces in cut]
    for report, build in sides:
        encoder, compared = report.encoder(build)(), _compared(report, build)
        queries = encoder.encode_queries(sentences)
        rest = encoder.encode_window([pieces.others for _, pieces in cut]).embeddings
        each.append(100 * reciprocal_ranks(compared(queries), compared(rest)))
    return _difference("MRR", each[0], each[1], sentences)


def _difference(
    measure: str, before: NDArray[np.float64], after: NDArray[np.float64], texts: Sequence[str]
) -> dict[str, Any]:
    """Return the scores (q,) of both models as JSON values, with the interval of the difference.

    ``changed_most`` are queries that lose most, the worst first, then some that gain most.
    """
    order = np.argsort(after - before, kind="stable")
    lost = [row for row in order[:_SHOWN] if after[row] < before[row]]
    gained = [row for row in order[::-1][:_SHOWN] if after[row] > before[row]]
    changed = [
        {"query": texts[row], "old": float(before[row]), "new": float(after[row])}
        for row in (*lost, *gained)
    ]
    return {
        "measure": measure, "queries": len(before), "old": float(before.mean()),
        "new": float(after.mean()), "interval": mean_interval(after - before),
        "changed_most": changed,
    }  # fmt: skip


def _compared(
    report: EncodeReport, build: BuildConfig
) -> Callable[[NDArray[np.floating]], Vectors]:
    """Return the function from raw embeddings to rows whose inner products rank."""
    unit = build.settled(report.store.encoder).similarity == "cosine"
    return lambda rows: (unit_rows(rows) if unit else rows).astype(np.float32)


def _scores(judged: JudgedQueries, report: EncodeReport, build: BuildConfig) -> dict[str, float]:
    """Return nDCG@10 × 100 by query, of exact search of raw embeddings."""
    store, record, texts = report.store, report.record, judged.texts
    names = [name for name in judged.qrels if name in texts]
    queries = report.embed_queries(build, [texts[name] for name in names])
    compared = _compared(report, build)
    blocks = map(compared, CorpusEmbeddings(store, record).blocks())
    found = exact_neighbours(blocks, compared(queries), _TOP_K)
    run = {
        name: dict(zip(ids_of(store, record, rows), scores.tolist(), strict=True))
        for name, scores, rows in zip(names, *found, strict=True)
    }
    return {name: 100 * value for name, value in evaluate_each(judged.qrels, run, METRIC).items()}


def _require_no_loss(config: MigrateConfig, made: dict[str, Any]) -> None:
    least, greatest = made["interval"]
    if config.max_loss is not None and least < -config.max_loss:
        lost = (
            f", of which {shown(each['query'])} {each['old']:.0f} → {each['new']:.0f}"
            for each in made["changed_most"]
            if each["new"] < each["old"]
        )
        raise GateError(
            f"the new model may lose more than {config.max_loss:g} points of {made['measure']}: "
            f"{made['old']:.2f} before, {made['new']:.2f} with it, a difference of {least:+.2f} to "
            f"{greatest:+.2f} (95 %){''.join(lost)}; nothing is published, and what was encoded is "
            "kept"
        )
