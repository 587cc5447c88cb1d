"""From a corpus in its store to the transform: moments, the choice where it is left, the fit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.corpus.batches import ID
from whiten_index.distributed.executors import Executor
from whiten_index.distributed.remote_call import remote_call
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.index.choice import AUTO, FactoryChoice, choose_factory
from whiten_index.index.factory import inner_index
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.encode import EncodeReport
from whiten_index.pipeline.select import Wishes, choose_setting
from whiten_index.pipeline.select_labelled import Labels
from whiten_index.progress import Progress, Stages
from whiten_index.store.embedding_store import EmbeddingStore, total_moments
from whiten_index.store.records import CorpusPart, CorpusRecord
from whiten_index.store.sampling import mapped_part
from whiten_index.whitening.covariance import Estimator, parse_shrinkage
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.selection import Choice, widths
from whiten_index.whitening.spectrum import unit_rows
from whiten_index.whitening.transform import Whitening
from whiten_index.whitening.whitening_config import WhiteningConfig

# Rounding to 11 significant bits, averaged over the mantissa.
_FLOAT16_RMS_ERROR = 2.0e-4
_EQUAL_COSINE = 0.99999


@dataclass(frozen=True, eq=False)
class Fitted:
    """A transform and where it comes from.

    Attributes:
        moments: what it was fitted on.
        whitening: the transform.
        choice: how it was chosen, None where it was named.
    """

    moments: Moments
    whitening: Whitening
    choice: Choice | None


def read_labels(config: BuildConfig) -> Labels | None:
    """Read the labels that a transform is to be chosen by, None where there are none.

    Raises:
        ConfigError: they do not go together.
        CorpusError: a file cannot be used.
    """
    return Labels.read(config.queries, config.qrels, config.pairs, split=config.qrels_split)


def fit_whitening(
    config: BuildConfig, encoded: EncodeReport, labels: Labels | None, stages: Stages
) -> Fitted:
    """Fit the transform asked for, or choose one and fit it.

    Raises:
        WhiteningError: the embeddings do not allow it.
        CorpusError: the weights cannot be used.
        ConfigError: the labels do not fit the corpus.
    """
    wanted, choice = config.whitening_config(), None
    moments, weights = fit_moments(config, encoded, stages)
    if config.chooses:
        wishes = _wishes(config, labels, rows=encoded.record.rows, dim=moments.dim)
        given = encoded.elsewhere(), moments, wishes, weights
        choice = remote_call(encoded.executor, stages, _chosen, *given)
        setting = choice.setting
        wanted = replace(wanted, k=setting.k, exponent=setting.exponent, center=setting.center)
    whitening = Whitening.fit(moments, wanted)
    if whitening.k == 1:
        stages.watcher.note("note: one direction is kept, so that every score will be 1 or -1")
    _note_rounding(encoded, whitening, stages)
    return Fitted(moments, whitening, choice)


def _chosen(
    stages: Stages,
    encoded: EncodeReport,
    moments: Moments,
    wishes: Wishes,
    weights: NDArray[np.float64] | None,
) -> Choice:
    return choose_setting(encoded, moments, wishes, stages, weights=weights)


def fit_moments(
    config: BuildConfig, encoded: EncodeReport, stages: Stages
) -> tuple[Moments, NDArray[np.float64] | None]:
    """Return what a transform is fitted on, and the weights (n,) of the rows where they have any.

    Raises:
        CorpusError: the weights cannot be used.
    """
    with stages.stage("fit", encoded.record.rows) as watcher:
        weights = None if config.weight_column is None else _weights(config, encoded)
        return _moments(config.whitening_config(), encoded, weights, watcher), weights


def _wishes(config: BuildConfig, labels: Labels | None, *, rows: int, dim: int) -> Wishes:
    return Wishes(
        widths=possible_widths(config, dim, rows=rows) if config.k is None else None,
        k=config.k,
        exponent=config.exponent,
        center=config.center,
        normalize_input=config.normalize_input,
        floor=config.floor,
        sample=config.choose_sample,
        seed=config.seed,
        labels=labels,
    )


def possible_widths(
    config: BuildConfig, dim: int, *, rows: int | None = None
) -> tuple[int, ...] | None:
    """Return the round widths over which the index can be built, None where all of them will do.

    Args:
        config: names the factory, the memory budget and the recall.
        dim: width d of the embeddings.
        rows: of the corpus, None where they are not known; then the budget leaves out no width.

    Raises:
        ConfigError: there is none.
    """
    factory, every = config.factory, widths(dim)
    found = tuple(k for k in every if factory == AUTO or _builds(factory, k))
    if not found:
        # What FAISS itself refuses at any width is said first.
        inner_index(factory, dim)
        raise ConfigError(
            f"--factory {factory} fits none of the round widths that auto chooses among; name one "
            "with --k"
        )
    if rows is not None and config.budget is not None:
        narrowest = found[0]
        found = tuple(k for k in found if _has_room(config, rows=rows, dim=dim, k=k))
        if not found:
            choose_index(config, rows=rows, dim=dim, k=narrowest)
    return None if factory == AUTO and found == every else found


def choose_index(config: BuildConfig, *, rows: int, dim: int, k: int) -> FactoryChoice:
    """Choose the index that a configuration asks for; see ``choose_factory``.

    Raises:
        ConfigError: FAISS does not know the factory, or nothing fits the budget.
    """
    return choose_factory(
        config.factory,
        rows=rows,
        dim=dim,
        k=k,
        budget=config.budget,
        target_recall=config.target_recall,
    )


def _has_room(config: BuildConfig, *, rows: int, dim: int, k: int) -> bool:
    try:
        choose_index(config, rows=rows, dim=dim, k=k)
    except ConfigError:
        return False
    return True


def _builds(factory: str, k: int) -> bool:
    try:
        inner_index(factory, k)
    except ConfigError:
        return False
    return True


def _moments(
    wanted: WhiteningConfig,
    encoded: EncodeReport,
    weights: NDArray[np.float64] | None,
    watcher: Progress,
) -> Moments:
    """Return the sum of the shards' moments, or those of another look at the store."""
    store, record, executor = encoded.store, encoded.record, encoded.executor
    if weights is None and not wanted.normalize_input:
        moments = sum_of_shards(store, record, executor, watcher.advance)
        needs_quartic = parse_shrinkage(wanted.shrinkage)[0] is Estimator.LEDOIT_WOLF
        if moments.quartic is not None or not needs_quartic:
            return moments
    return sum_of_rows(
        store, record, executor, watcher.advance, weights=weights, normalize=wanted.normalize_input
    )


def _weights(config: BuildConfig, encoded: EncodeReport) -> NDArray[np.float64]:
    """Return the weight of each row (n,), of mean 1, by its frequency.

    Raises:
        CorpusError: the column is missing, is not of numbers, or holds what is no frequency.
    """
    name = str(config.weight_column)
    frequencies = np.concatenate(list(_frequencies(encoded, name, config.id_column)))
    if np.count_nonzero(frequencies) == 1:
        raise CorpusError(
            f"column {name} gives weight to a single row, which has no spread; mend the column"
        )
    try:
        return config.weights_of()(frequencies)
    except ConfigError as error:
        raise CorpusError(f"column {name} cannot weigh the rows: {error}") from error


def _frequencies(
    encoded: EncodeReport, name: str, id_column: str | None
) -> Iterator[NDArray[np.float64]]:
    for part in encoded.record.parts:
        if not part.rows:
            continue
        documents = encoded.store.documents(part)
        column = ID if name == id_column else name
        if column not in documents.column_names:
            kept = ", ".join(documents.column_names)
            raise CorpusError(
                f"the store does not hold column {name} of the weights ({kept}); name the corpus "
                "too, or another column"
            )
        values = documents[column]
        numeric = pa.types.is_integer(values.type) or pa.types.is_floating(values.type)
        if not numeric or values.null_count:
            what = f"{values.null_count} nulls" if numeric else str(values.type)
            raise CorpusError(
                f"column {name} holds {what}, and weights are one number a row; mend the column, "
                "or leave such rows out with --filter"
            )
        yield values.to_numpy().astype(np.float64)


def _note_rounding(encoded: EncodeReport, whitening: Whitening, stages: Stages) -> None:
    """Say so where the directions kept are so narrow that float16 shows in them."""
    shards = (encoded.store.find(p.shard, verify=False) for p in encoded.record.parts if p.rows)
    if not any(shard is not None and shard.dtype == "float16" for shard in shards):
        return
    cosine = whitening.rounding_cosine(relative_error=_FLOAT16_RMS_ERROR)
    if cosine < _EQUAL_COSINE:
        less = "--floor 1e-5" if whitening.kind.rotates_back else "a smaller k"
        stages.watcher.note(
            f"note: k = {whitening.k} keeps directions so narrow that float16 embeddings show in "
            f"them (cosine with float32 about {cosine:.6f}, rank {whitening.rank} of "
            f"{encoded.store.encoder['dim']}); for more, use --store-dtype float32 or {less}"
        )


_LEAST_GROUP, _BLOCK_ROWS = 64, 8_192

Weighed = tuple[tuple[CorpusPart, ...], NDArray[np.float64] | None]


def sum_of_shards(
    store: EmbeddingStore,
    record: CorpusRecord,
    executor: Executor,
    advance: Callable[[int], None],
) -> Moments:
    """Return the sum of the moments that the shards of a corpus keep.

    Whoever adds up does it in the same order, so that the sum is the same to the bit.

    Args:
        store: holds the shards.
        record: the corpus.
        executor: adds up groups of shards.
        advance: told the rows that are in.
    """
    parts = [part for part in record.parts if part.rows]
    groups = list(_groups(parts))
    sum_up = functools.partial(_sum_of_group, store)
    sums = executor.map(sum_up, groups)
    return _total(store, groups, sums, advance)


def sum_of_rows(
    store: EmbeddingStore,
    record: CorpusRecord,
    executor: Executor,
    advance: Callable[[int], None],
    *,
    weights: NDArray[np.float64] | None,
    normalize: bool,
) -> Moments:
    """Return the moments of all rows of a corpus, weighed (n,) or at unit length.

    Args:
        store: holds the shards.
        record: the corpus.
        executor: reads groups of shards.
        advance: told the rows that are in.
        weights: (n,) of the rows, None for one each.
        normalize: take the rows at unit length.
    """
    parts = [part for part in record.parts if part.rows]
    groups = list(_groups(parts))
    items, start = list[Weighed](), 0
    for group in groups:
        stop = start + sum(part.rows for part in group)
        items.append((group, None if weights is None else weights[start:stop]))
        start = stop
    go_through = functools.partial(_moments_of_group, store, normalize)
    sums = executor.map(go_through, items)
    return _total(store, groups, sums, advance)


def _groups(parts: Sequence[CorpusPart]) -> Iterator[tuple[CorpusPart, ...]]:
    size = max(_LEAST_GROUP, math.isqrt(len(parts)))
    for start in range(0, len(parts), size):
        yield tuple(parts[start : start + size])


def _total(
    store: EmbeddingStore,
    groups: Sequence[tuple[CorpusPart, ...]],
    sums: Iterator[Moments],
    advance: Callable[[int], None],
) -> Moments:
    def counted() -> Iterator[Moments]:
        for group, moments in zip(groups, sums, strict=True):
            advance(sum(part.rows for part in group))
            yield moments

    return Moments.total(chain([Moments.empty(int(store.encoder["dim"]))], counted()))


def _sum_of_group(store: EmbeddingStore, group: tuple[CorpusPart, ...]) -> Moments:
    return total_moments(store, [part.shard for part in group], int(store.encoder["dim"]))


def _moments_of_group(store: EmbeddingStore, normalize: bool, item: Weighed) -> Moments:
    group, weights = item
    moments, first = Moments.empty(int(store.encoder["dim"])), 0
    for part in group:
        shard = mapped_part(store, part)
        for start in range(0, len(shard), _BLOCK_ROWS):
            block = np.array(shard[start : start + _BLOCK_ROWS])
            rows = unit_rows(block.astype(np.float64)) if normalize else block
            own = None if weights is None else weights[first : first + len(rows)]
            moments = moments.update(rows, weights=own)
            first += len(rows)
    return moments
