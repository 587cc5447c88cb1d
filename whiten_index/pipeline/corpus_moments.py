"""The moments of a corpus in its store, with the weights of its rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.corpus.batches import ID
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.store.embedding_store import EmbeddingStore, total_moments
from whiten_index.store.records import CorpusPart
from whiten_index.store.sampling import mapped_part
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.selection import Choice
from whiten_index.whitening.spectrum import unit_rows
from whiten_index.whitening.transform import Whitening
from whiten_index.whitening.whitening_config import Estimator, parse_shrinkage

if TYPE_CHECKING:
    from whiten_index.pipeline.build_config import BuildConfig
    from whiten_index.pipeline.encode import EncodeReport
    from whiten_index.progress import Stages

_LEAST_GROUP, _BLOCK_ROWS = 64, 8_192

Group = tuple[CorpusPart, ...]


@dataclass(frozen=True, eq=False)
class Fitted:
    """A transform, the moments that it was fitted on, and its choice unless it was named."""

    moments: Moments
    whitening: Whitening
    choice: Choice | None


def fit_moments(
    config: BuildConfig, encoded: EncodeReport, stages: Stages
) -> tuple[Moments, NDArray[np.float64] | None]:
    """Return the moments of a corpus, and the weights (n,) of its rows where they have any.

    Sums are added in a fixed order, so that they are bit-equal on any number of workers.

    Raises:
        CorpusError: the weights cannot be used.
    """
    wanted, store = config.whitening_config(), encoded.store
    with stages.stage("fit", encoded.record.rows) as watcher:
        weights = None if config.weight_column is None else _weights(config, encoded)
        groups = _groups([part for part in encoded.record.parts if part.rows])
        if weights is None and not wanted.normalize_input:
            sum_group = functools.partial(_sum_of_group, store)
            sums = encoded.executor.map(sum_group, groups)
            moments = _total(store, groups, sums, watcher.advance)
            needs_quartic = parse_shrinkage(wanted.shrinkage)[0] is Estimator.LEDOIT_WOLF
            if moments.quartic is not None or not needs_quartic:
                return moments, None
        items, start = list[tuple[Group, NDArray[np.float64] | None]](), 0
        for group in groups:
            stop = start + sum(part.rows for part in group)
            items.append((group, None if weights is None else weights[start:stop]))
            start = stop
        read_group = functools.partial(_moments_of_group, store, wanted.normalize_input)
        sums = encoded.executor.map(read_group, items)
        return _total(store, groups, sums, watcher.advance), weights


def _groups(parts: Sequence[CorpusPart]) -> list[Group]:
    size = max(_LEAST_GROUP, math.isqrt(len(parts)))
    return [tuple(parts[start : start + size]) for start in range(0, len(parts), size)]


def _total(
    store: EmbeddingStore,
    groups: Sequence[Group],
    sums: Iterator[Moments],
    advance: Callable[[int], None],
) -> Moments:
    def counted() -> Iterator[Moments]:
        for group, moments in zip(groups, sums, strict=True):
            advance(sum(part.rows for part in group))
            yield moments

    return Moments.total(chain([Moments.empty(int(store.encoder["dim"]))], counted()))


def _sum_of_group(store: EmbeddingStore, group: Group) -> Moments:
    return total_moments(store, [part.shard for part in group], int(store.encoder["dim"]))


def _moments_of_group(
    store: EmbeddingStore, normalize: bool, item: tuple[Group, NDArray[np.float64] | None]
) -> Moments:
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
