"""The spaces that texts are compared in: raw embeddings, or one fitted transform of them each."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from whiten_index.assemble import blocks
from whiten_index.batch import TextBatch
from whiten_index.config import BuildConfig
from whiten_index.corpus import CorpusConfig, ParquetCorpus
from whiten_index.encode import encode_corpus
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluate.config import DISTINCT, NLI, SCORED, TARGET, EvalConfig
from whiten_index.evaluate.texts import TextEmbedder
from whiten_index.evaluation import common_component, without_component
from whiten_index.index import WHITENING, read_fields
from whiten_index.moments import Moments
from whiten_index.progress import Stages
from whiten_index.whitening import Kind, Whitening, WidthWish, unit_rows

# Columns of sentences that a corpus to fit on may have; each is a sentence of its own.
_KNOWN_COLUMNS = (("premise", "hypothesis"), ("sentence1", "sentence2"), ("sentence",), ("text",))


@dataclass(frozen=True, eq=False)
class Space:
    """A map of raw embeddings to the vectors that are compared.

    Attributes:
        name: as shown in tables, such as ``whitening, k = 256``.
        setting: JSON values: kind, k, exponent, what it was fitted on.
        whitening: the transform, None for the embeddings as they are.
        common: (d,) float64 unit direction taken off first, or None.
    """

    name: str
    setting: dict[str, Any]
    whitening: Whitening | None = None
    common: NDArray[np.float64] | None = None

    def apply(self, embeddings: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the vectors (n, k) of embeddings (n, d), not normalised."""
        rows: NDArray[np.float64] = np.asarray(embeddings, np.float64)
        if self.common is not None:
            rows = without_component(rows, self.common)
        return rows if self.whitening is None else self.whitening.apply(rows)


class Spaces:
    """Makes the spaces of an evaluation, for one task after the other."""

    def __init__(self, config: EvalConfig, embedder: TextEmbedder, stages: Stages) -> None:
        self._config, self._embedder, self._stages = config, embedder, stages
        self._moments: dict[bool, Moments] = {}
        if config.fit == NLI and config.nli is None:
            raise ConfigError(
                "--fit nli fits on the sentences of MNLI and SNLI, which are not carried along; "
                "give them as Parquet with --nli FILE (columns premise and hypothesis)"
            )

    def of(self, texts: Sequence[str], *, scored: NDArray[np.bool_] | None = None) -> list[Space]:
        """Return the spaces of a task: one a transform, or the raw one.

        Args:
            texts: all n texts of the task, repeated as they are.
            scored: (n,) which of them are of what is scored, all where it is left out.

        Raises:
            WhiteningError: k above the rank, constant embeddings.
            CorpusError: the corpus to fit on cannot be used.
        """
        config = self._config
        if config.index is not None:
            folder, _ = read_fields(Path(config.index), verify="manifest")
            whitening = Whitening.load(folder / WHITENING)
            setting = {"transform": whitening.choices(), "fit": "index"}
            return [Space(name_of(whitening), setting, whitening)]
        common, removed = None, {}
        if config.remove_common:
            rows, weights = self._target(texts, scored)
            common = common_component(rows, weights=weights)
            removed = {"common_component": "removed"}
        if not config.transforms:
            return [Space(*_raw(removed), common=common)]
        fits: dict[bool, Moments] = {}
        made = []
        for wanted in config.transforms:
            unit = wanted.normalize_input
            if unit not in fits:
                fits[unit] = self._fit(texts, scored, common, unit=unit)
            whitening = Whitening.fit(fits[unit], wanted)
            setting = {"transform": whitening.choices(), "fit": config.fit, **removed}
            made.append(Space(name_of(whitening, wanted.k), setting, whitening, common))
        return made

    def _fit(
        self,
        texts: Sequence[str],
        scored: NDArray[np.bool_] | None,
        common: NDArray[np.float64] | None,
        *,
        unit: bool,
    ) -> Moments:
        if self._config.fit in (TARGET, DISTINCT, SCORED):
            rows, weights = self._target(texts, scored)
            return Moments.of(_prepared(rows, common, unit=unit), weights=weights)
        # What is fitted elsewhere is fitted once for all tasks; a component of one task is not.
        if common is not None:
            raise ConfigError(
                f"the common component is that of each task, and --fit {self._config.fit} is one "
                "for all; leave --remove-common out, or use --fit target"
            )
        if unit not in self._moments:
            parts = (_prepared(rows, None, unit=unit) for rows in self._corpus())
            self._moments[unit] = Moments.total(Moments.of(rows) for rows in parts)
        return self._moments[unit]

    def _target(
        self, texts: Sequence[str], scored: NDArray[np.bool_] | None
    ) -> tuple[NDArray[np.float32], NDArray[np.float64] | None]:
        """Return the embeddings of the distinct texts to fit on, and how often each occurs."""
        fit = self._config.fit
        if fit == SCORED and scored is not None:
            texts = [text for text, use in zip(texts, scored, strict=True) if use]
        counts = Counter(texts)
        weights = None if fit == DISTINCT else np.array(list(counts.values()), np.float64)
        return self._embedder.embed(list(counts)), weights

    def _corpus(self) -> Iterator[NDArray[np.floating]]:
        """Yield the embeddings (m, d) of the sentences to fit on."""
        config = self._config
        source = str(config.nli) if config.fit == NLI else config.fit
        for column in config.fit_columns or sentence_columns(source):
            if config.word_vectors is not None:
                opened = ParquetCorpus.open(CorpusConfig(sources=(source,), text_columns=(column,)))
                for batch in opened.batches():
                    if isinstance(batch, TextBatch):
                        yield self._embedder.embed(batch.texts)
                continue
            yield from self._encoded(source, column)

    def _encoded(self, source: str, column: str) -> Iterator[NDArray[np.floating]]:
        config = self._config
        with ExitStack() as stack:
            store = config.store or stack.enter_context(tempfile.TemporaryDirectory())
            encoder = {f.name: getattr(config.encoder, f.name) for f in fields(config.encoder)}
            build = BuildConfig(corpus=(source,), text_columns=(column,), store=store, **encoder)
            report = encode_corpus(build, progress=self._stages.watcher)
            yield from blocks(report.store, report.record)


def sentence_columns(source: str) -> tuple[str, ...]:
    """Return the columns of sentences of a Parquet corpus.

    Raises:
        CorpusError: it has none of those known, or cannot be read.
    """
    path = Path(source)
    file = next(iter(sorted(path.rglob("*.parquet"))), path) if path.is_dir() else path
    try:
        names = pq.read_schema(file).names
    except (OSError, ValueError) as error:
        raise CorpusError(
            f"{source} cannot be read as Parquet ({str(error).splitlines()[0][:160]}); --fit takes "
            "target, target-scored, nli, or a Parquet file of sentences"
        ) from error
    for columns in _KNOWN_COLUMNS:
        if set(columns) <= set(names):
            return columns
    known = ", ".join(" and ".join(columns) for columns in _KNOWN_COLUMNS)
    raise CorpusError(
        f"{source} has the columns {', '.join(names)} and none of {known}; name the columns of "
        "sentences with --fit-column"
    )


def _prepared(
    rows: NDArray[np.floating], common: NDArray[np.float64] | None, *, unit: bool
) -> NDArray[np.floating]:
    if common is not None:
        rows = without_component(np.asarray(rows, np.float64), common)
    return unit_rows(np.asarray(rows, np.float64)) if unit else rows


def _raw(removed: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    name = "common component removed" if removed else "raw"
    return name, {"transform": {"kind": "none"}, **removed}


def name_of(whitening: Whitening, wish: str | int | float | None = None) -> str:
    """Return what tables call a transform; a width that differs from task to task by its wish."""
    exponent = ""
    if whitening.kind is Kind.WHITENING and whitening.exponent != 1:
        exponent = f", γ = {whitening.exponent:g}"
    asked = WidthWish.parse(wish)
    width = whitening.k if asked.variance is None and not asked.full else wish
    return f"{whitening.kind.value}{exponent}, k = {width}"
