"""The spaces that texts are compared in: raw embeddings, or one fitted transform of them each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from whiten_index.artifacts.atomic import scratch_folder
from whiten_index.artifacts.files import reading
from whiten_index.corpus.sources import find_files
from whiten_index.encoding.spec import recorded_spec
from whiten_index.errors import ArtifactError, ConfigError, CorpusError
from whiten_index.measure.eval_config import OF_TASKS, EvalConfig
from whiten_index.measure.measure_options import DISTINCT, SCORED
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.encode import encode_corpus
from whiten_index.progress import Stages
from whiten_index.store.sampling import CorpusEmbeddings
from whiten_index.versions.published import WHITENING, read_published
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.spectrum import WidthSpec, unit_rows
from whiten_index.whitening.transform import Whitening
from whiten_index.whitening.whitening_config import Kind

if TYPE_CHECKING:
    from whiten_index.measure.text_embedder import TextEmbedder

RAW: dict[str, Any] = {"kind": "none"}
_LEAST_ROWS = 2
# Columns of sentences that a corpus to fit on may have; each is a sentence.
_KNOWN_COLUMNS = (("premise", "hypothesis"), ("sentence1", "sentence2"), ("sentence",), ("text",))


@dataclass(frozen=True, eq=False)
class Space:
    """A map of raw embeddings to the vectors that are compared."""

    name: str
    setting: dict[str, Any]
    whitening: Whitening | None = None

    def apply(self, embeddings: NDArray[np.floating]) -> NDArray[np.float64]:
        """Return the vectors (n, k) of embeddings (n, d), not normalised."""
        if self.whitening is not None:
            return self.whitening.apply(embeddings)
        return np.asarray(embeddings, np.float64)


class Spaces:
    """Makes the spaces of an evaluation, for one task after the other."""

    def __init__(self, config: EvalConfig, embedder: TextEmbedder, stages: Stages) -> None:
        self._config, self._embedder, self._stages = config, embedder, stages
        self._moments: dict[bool, Moments] = {}
        source = config.fit_source
        # Refused before anything is encoded.
        self._columns = () if source is None else _sentence_columns(source, config.fit_columns)
        self._published = None if config.index is None else _published(config.index, embedder)

    def of(self, texts: Sequence[str], *, scored: NDArray[np.bool_] | None = None) -> list[Space]:
        """Return the spaces of a task: one a transform, or the raw one."""
        config = self._config
        if self._published is not None:
            whitening = self._published
            setting = {"transform": whitening.choices(), "fit": "index"}
            return [Space(name_of(whitening), setting, whitening)]
        if not config.transforms:
            return [raw_space()]
        fits: dict[bool, Moments] = {}
        made = []
        for wanted in config.transforms:
            unit = wanted.normalize_input
            if unit not in fits:
                fits[unit] = self._fit(texts, scored, unit=unit)
            whitening = Whitening.fit(fits[unit], wanted)
            setting = {"transform": whitening.choices(), "fit": config.fit}
            made.append(Space(name_of(whitening, wanted.k), setting, whitening))
        return made

    def _fit(
        self,
        texts: Sequence[str],
        scored: NDArray[np.bool_] | None,
        *,
        unit: bool,
    ) -> Moments:
        source = self._config.fit_source
        if source is None:
            rows, weights = self._target(texts, scored)
            return Moments.of(_prepared(rows, unit=unit), weights=weights)
        if unit not in self._moments:
            parts = (
                _prepared(rows, unit=unit)
                for column in self._columns
                for rows in self._encoded(source, column)
            )
            found = Moments.total(Moments.of(rows) for rows in parts)
            if found.count < _LEAST_ROWS:
                raise CorpusError(
                    f"{source} holds {found.count:g} sentences that are not "
                    "blank; a fit needs thousands"
                )
            self._moments[unit] = found
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

    def _encoded(self, source: str, column: str) -> Iterator[NDArray[np.floating]]:
        config = self._config
        with ExitStack() as stack:
            store = config.store or str(stack.enter_context(scratch_folder()))
            encoder = {f.name: getattr(config.encoder, f.name) for f in fields(config.encoder)}
            build = BuildConfig(corpus=(source,), text_columns=(column,), store=store, **encoder)
            report = encode_corpus(build, progress=self._stages.watcher)
            yield from CorpusEmbeddings(report.store, report.record).blocks()


def _prepared(rows: NDArray[np.floating], *, unit: bool) -> NDArray[np.floating]:
    return unit_rows(np.asarray(rows, np.float64)) if unit else rows


def raw_space() -> Space:
    """Return the space of embeddings as they are."""
    return Space("raw", {"transform": RAW})


def _published(index: str, embedder: TextEmbedder) -> Whitening:
    """Return the transform of an index, checked against its digest and its encoder."""
    version = read_published(Path(index))
    recorded = recorded_spec(version.fields["encoder"])
    if recorded is None or recorded.fingerprint != embedder.facts().get("fingerprint"):
        raise ArtifactError(f"{index} was published with another encoder meanwhile; run again")
    return Whitening.load(version.file(WHITENING))


def name_of(whitening: Whitening, wish: str | int | float | None = None) -> str:
    """Return what tables call a transform; a width that differs from task to task by its wish."""
    exponent = ""
    if whitening.kind is Kind.WHITENING and whitening.exponent != 1:
        exponent = f", γ = {whitening.exponent:g}"
    asked = WidthSpec.parse(wish)
    width = whitening.k if asked.variance is None and not asked.full else wish
    return f"{whitening.kind.value}{exponent}, k = {width}"


def runs_of(
    found: Iterable[tuple[str, Iterable[tuple[Space, dict[str, Any]]]]],
) -> list[dict[str, Any]]:
    """Return a run for each space: its name, its setting, and its figures of every set.

    The settings of one run differ between sets in what the data gave; the first set's stand.

    Args:
        found: name of a set, and its figures in each space; the same spaces for all sets.
    """
    runs: list[dict[str, Any]] = []
    for name, scored in found:
        for place, (space, figures) in enumerate(scored):
            if place == len(runs):
                runs.append({"name": space.name, "setting": space.setting, "datasets": {}})
            runs[place]["datasets"][name] = figures
    return runs


def report_of(
    encoder: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], stages: Stages
) -> dict[str, Any]:
    """Return what an evaluation found: the first run on top, all of them in ``runs``."""
    return {
        "encoder": dict(encoder),
        **runs[0],
        "runs": list(runs),
        "seconds": dict(stages.seconds),
    }


def _sentence_columns(source: str, asked: tuple[str, ...]) -> tuple[str, ...]:
    """Return the columns of sentences of a Parquet corpus: those named, or those known."""
    try:
        file = find_files([source])[0]
        with reading(file.path):
            names = pq.read_schema(file.path, filesystem=file.filesystem).names
    except (CorpusError, OSError, pa.ArrowException) as error:
        raise CorpusError(
            f"{source} cannot be fitted on ({str(error).splitlines()[0][:160]}); --fit takes "
            f"{', '.join(OF_TASKS)}, or a Parquet corpus of sentences"
        ) from error
    if asked:
        if lacking := [name for name in asked if name not in names]:
            raise ConfigError(
                f"{source} has no column {', '.join(lacking)}; --fit-column takes some of "
                f"{', '.join(names)}"
            )
        return asked
    for columns in _KNOWN_COLUMNS:
        if set(columns) <= set(names):
            return columns
    known = ", ".join(" and ".join(columns) for columns in _KNOWN_COLUMNS)
    raise CorpusError(
        f"{source} has the columns {', '.join(names)} and none of {known}; name the columns of "
        "sentences with --fit-column"
    )
