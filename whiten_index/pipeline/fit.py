"""Moments of a corpus from its store, and the transform that is fitted on them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from whiten_index.distributed.executors import remote_call
from whiten_index.pipeline.choose_transform import choose_setting
from whiten_index.pipeline.labels import Labels
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusPart
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.selection import Choice
from whiten_index.whitening.spectrum import default_width, unit_rows
from whiten_index.whitening.transform import Whitening
from whiten_index.whitening.whitening_config import parse_shrinkage

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
    """Fit the transform that the options name, or choose one and fit it."""
    wanted, choice = config.whitening_config(), None
    moments = fit_moments(config, encoded)
    if config.chooses:
        given = encoded.elsewhere(), config, labels, moments
        choice = remote_call(encoded.executor, encoded.stages, choose_setting, *given)
        setting = choice.chosen
        wanted = replace(wanted, k=setting.k, exponent=setting.exponent, center=setting.center)
    whitening = Whitening.fit(moments, wanted)
    _note_rounding(encoded, whitening)
    usual = default_width(whitening.dim)
    if config.k is None and whitening.k == whitening.rank < usual:
        encoded.stages.watcher.note(
            f"note: k is {whitening.k} and not {usual}, as {moments.count:g} rows span no more"
        )
    return Fitted(moments, whitening, choice)


def fit_moments(config: BuildConfig, encoded: EncodeReport) -> Moments:
    """Return the moments of a corpus.

    Sums are added in a fixed order, so that they are bit-equal on any number of workers.
    """
    wanted, store, rows = config.whitening_config(), encoded.store, encoded.record.rows
    parts = [part for part in encoded.record.parts if part.rows]
    size = max(_LEAST_GROUP, math.isqrt(len(parts)))
    groups = [tuple(parts[start : start + size]) for start in range(0, len(parts), size)]
    needs_quartic = parse_shrinkage(wanted.shrinkage)[0] == "ledoit-wolf"
    read = functools.partial(_read_moments, store, wanted.normalize_input)
    moments = Moments.empty(int(store.encoder["dim"]))
    with encoded.stages.stage("fit", rows) as watcher:
        for sums in (read,) if wanted.normalize_input else (store.total_moments, read):
            found = Moments.total(chain([moments], encoded.executor.map(sums, groups)))
            if found.quartic is not None or not needs_quartic:
                break
        watcher.advance(rows)
    return found


def _read_moments(store: EmbeddingStore, normalize: bool, group: Group) -> Moments:
    moments = Moments.empty(int(store.encoder["dim"]))
    for part in group:
        shard = store.embeddings(part)
        for start in range(0, len(shard), _BLOCK_ROWS):
            block = np.array(shard[start : start + _BLOCK_ROWS])
            moments = moments.update(unit_rows(block.astype(np.float64)) if normalize else block)
    return moments


def _note_rounding(encoded: EncodeReport, whitening: Whitening) -> None:
    """Note directions so narrow that float16 shows in them."""
    parts, in_float16 = encoded.record.distinct_parts, 2 * encoded.store.dim
    if all(part.bytes > part.rows * in_float16 for part in parts):
        return
    cosine = (1 + whitening.rounding_error(relative_error=_FLOAT16_RMS_ERROR) ** 2) ** -0.5
    if cosine < _EQUAL_COSINE:
        less = "--floor 1e-5" if whitening.kind.rotates_back else "a smaller k"
        encoded.stages.watcher.note(
            f"note: k = {whitening.k} keeps directions so narrow that float16 embeddings show in "
            f"them (cosine with float32 about {cosine:.6f}, rank {whitening.rank} of "
            f"{encoded.store.encoder['dim']}); for more, use --store-dtype float32 or {less}"
        )
