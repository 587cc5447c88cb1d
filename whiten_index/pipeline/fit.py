"""Moments of a corpus from its store, and the transform that is fitted on them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from whiten_index.corpus.batches import ID
from whiten_index.distributed.executors import remote_call
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.pipeline.choose_transform import choose_setting
from whiten_index.pipeline.labels import Labels
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusPart
from whiten_index.store.sampling import mapped_part
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.selection import Choice
from whiten_index.whitening.spectrum import unit_rows
from whiten_index.whitening.transform import Whitening
from whiten_index.whitening.whitening_config import WEIGHTINGS, parse_shrinkage

if TYPE_CHECKING:
    from whiten_index.pipeline.build_config import BuildConfig
    from whiten_index.pipeline.encode import EncodeReport

_LEAST_GROUP, _BLOCK_ROWS = 64, 8_192
# Rounding to 11 significant bits, averaged over the mantissa.
_FLOAT16_RMS_ERROR = 2.0e-4
_EQUAL_COSINE = 0.99999

Group = tuple[CorpusPart, ...]


@dataclass(frozen=True, eq=False)
class Fitted:
    """A transform, the moments that it was fitted on, and its choice unless it was named."""

    moments: Moments
    whitening: Whitening
    choice: Choice | None


def fit_whitening(config: BuildConfig, encoded: EncodeReport, labels: Labels | None) -> Fitted:
    """Fit the transform that the options name, or choose one and fit it.

    Raises:
        WhiteningError: the embeddings do not allow it.
        CorpusError: weights or labels do not fit the corpus.
    """
    wanted, choice = config.whitening_config(), None
    moments, weights = fit_moments(config, encoded)
    if config.chooses:
        given = encoded.elsewhere(), config, labels, moments, weights
        choice = remote_call(encoded.executor, encoded.stages, choose_setting, *given)
        setting = choice.chosen
        wanted = replace(wanted, k=setting.k, exponent=setting.exponent, center=setting.center)
    whitening = Whitening.fit(moments, wanted)
    _note_rounding(encoded, whitening)
    return Fitted(moments, whitening, choice)


def fit_moments(
    config: BuildConfig, encoded: EncodeReport
) -> tuple[Moments, NDArray[np.float64] | None]:
    """Return the moments of a corpus, and the weights (n,) of its rows if they have any.

    Sums are added in a fixed order, so that they are bit-equal on any number of workers.
    """
    wanted, store, rows = config.whitening_config(), encoded.store, encoded.record.rows
    parts = [part for part in encoded.record.parts if part.rows]
    size = max(_LEAST_GROUP, math.isqrt(len(parts)))
    groups = [tuple(parts[start : start + size]) for start in range(0, len(parts), size)]
    empty = Moments.empty(int(store.encoder["dim"]))
    with encoded.stages.stage("fit", rows) as watcher:
        weights = None if config.weight_column is None else _weights(config, encoded)
        if weights is None and not wanted.normalize_input:
            sums = encoded.executor.map(functools.partial(_stored_moments, store), groups)
            moments = Moments.total(chain([empty], sums))
            needs_quartic = parse_shrinkage(wanted.shrinkage)[0] == "ledoit-wolf"
            if moments.quartic is not None or not needs_quartic:
                watcher.advance(rows)
                return moments, None
        items, start = list[tuple[Group, NDArray[np.float64] | None]](), 0
        for group in groups:
            stop = start + sum(part.rows for part in group)
            items.append((group, None if weights is None else weights[start:stop]))
            start = stop
        read = functools.partial(_read_moments, store, wanted.normalize_input)
        moments = Moments.total(chain([empty], encoded.executor.map(read, items)))
        watcher.advance(rows)
        return moments, weights


def _stored_moments(store: EmbeddingStore, group: Group) -> Moments:
    return store.total_moments([part.shard for part in group], int(store.encoder["dim"]))


def _read_moments(
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
    """Return the weight of each row (n,), of mean 1, by its frequency."""
    name = str(config.weight_column)
    column = ID if name == config.id_column else name
    blocks = list[NDArray[np.float64]]()
    for part in encoded.record.parts:
        if not part.rows:
            continue
        documents = encoded.store.documents(part)
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
        blocks.append(values.to_numpy().astype(np.float64))
    frequencies = np.concatenate(blocks)
    if np.count_nonzero(frequencies) == 1:
        raise CorpusError(
            f"column {name} gives weight to a single row, which has no spread; mend the column"
        )
    try:
        return WEIGHTINGS[config.weighting](frequencies)
    except ConfigError as error:
        raise CorpusError(f"column {name} cannot weigh the rows: {error}") from error


def _note_rounding(encoded: EncodeReport, whitening: Whitening) -> None:
    """Note directions so narrow that float16 shows in them."""
    shards = (encoded.store.find(p.shard, verify=False) for p in encoded.record.parts if p.rows)
    if not any(shard is not None and shard.dtype == "float16" for shard in shards):
        return
    cosine = (1 + whitening.rounding_error(relative_error=_FLOAT16_RMS_ERROR) ** 2) ** -0.5
    if cosine < _EQUAL_COSINE:
        less = "--floor 1e-5" if whitening.kind.rotates_back else "a smaller k"
        encoded.stages.watcher.note(
            f"note: k = {whitening.k} keeps directions so narrow that float16 embeddings show in "
            f"them (cosine with float32 about {cosine:.6f}, rank {whitening.rank} of "
            f"{encoded.store.encoder['dim']}); for more, use --store-dtype float32 or {less}"
        )
