"""Evaluation of sets of texts: their embeddings, and the spaces that they are compared in."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from whiten_index.artifacts.atomic import scratch_folder
from whiten_index.artifacts.files import reading
from whiten_index.artifacts.manifest import fingerprint
from whiten_index.artifacts.prefetch import blocks
from whiten_index.corpus.sources import find_files
from whiten_index.encoding.load_encoder import resolve_encoder
from whiten_index.encoding.spec import Spec, recorded_spec
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluation.sts_sets import StsSet
from whiten_index.measure.eval_config import OF_TASKS, EvalConfig
from whiten_index.measure.measure_options import DISTINCT, SCORED
from whiten_index.pipeline.build_config import BuildConfig
from whiten_index.pipeline.encode import encode_corpus
from whiten_index.pipeline.shard_encoding import LazyEncoder
from whiten_index.progress import Progress, Stages
from whiten_index.search.query_encoder import QueryEncoder
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.sampling import CorpusEmbeddings
from whiten_index.versions.published import WHITENING
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.spectrum import unit_rows
from whiten_index.whitening.transform import Whitening
from whiten_index.whitening.whitening_config import Kind, WidthSpec

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
        rows = np.asarray(embeddings, np.float64)
        if not np.isfinite(rows).all():
            raise ConfigError("the embedder gave rows that hold NaN or infinity")
        return rows


RAW = Space("raw", {"transform": {"kind": "none"}})
# Figures of one set, in each space.
Scores = Iterable[tuple[Space, dict[str, Any]]]


class Spaces:
    """Makes the spaces of an evaluation, for one set after the other."""

    def __init__(self, config: EvalConfig, embedder: "TextEmbedder", stages: Stages) -> None:
        self._config, self._embedder, self._stages = config, embedder, stages
        self._moments: dict[bool, Moments] = {}
        # Refused before anything is encoded.
        source = config.fit_source
        self._columns = () if source is None else _sentence_columns(source)
        version = config.published
        self._published = None if version is None else Whitening.load(version.file(WHITENING))

    def with_raw(self, pairs: StsSet) -> list[Space]:
        """Return the raw space, and one for each transform, of a set of pairs."""
        found = self.of(pairs.texts, scored=pairs.scored)
        return found if RAW in found else [RAW, *found]

    def of(self, texts: Sequence[str], *, scored: NDArray[np.bool_]) -> list[Space]:
        """Return the spaces of a set: one for each transform, or the raw one.

        ``scored`` (n,) are the rows to fit on; of pairs the first texts come first.
        """
        config, made = self._config, list[Space]()
        if (whitening := self._published) is not None:
            setting = {"transform": whitening.choices(), "fit": "index"}
            return [Space(name_of(whitening), setting, whitening)]
        fits = {
            unit: self._fit(texts, scored, unit=unit)
            for unit in {wanted.normalize_input for wanted in config.transforms}
        }
        for wanted in config.transforms:
            whitening = Whitening.fit(fits[wanted.normalize_input], wanted)
            setting = {"transform": whitening.choices(), "fit": config.fit}
            made.append(Space(name_of(whitening, wanted.k), setting, whitening))
        return made or [RAW]

    def _fit(self, texts: Sequence[str], scored: NDArray[np.bool_], *, unit: bool) -> Moments:
        config = self._config
        if config.fit_source is None:
            if config.fit == SCORED:
                used = np.tile(scored, len(texts) // len(scored))
                texts = [text for text, use in zip(texts, used, strict=True) if use]
            counts = Counter(texts)
            rows = _prepared(self._embedder.embed(list(counts)), unit=unit)
            if config.fit != DISTINCT:
                rows = np.repeat(rows, list(counts.values()), axis=0)
            return Moments.of(rows)
        if unit not in self._moments:
            self._moments[unit] = Moments.total(
                Moments.of(_prepared(rows, unit=unit))
                for column in self._columns
                for rows in self._encoded(config.fit_source, column)
            )
        return self._moments[unit]

    def _encoded(self, source: str, column: str) -> Iterator[NDArray[np.floating]]:
        config = self._config
        with ExitStack() as stack:
            store = config.store or str(stack.enter_context(scratch_folder()))
            build = BuildConfig(
                corpus=(source,), text_columns=(column,), store=store, **vars(config.encoder)
            )
            report = encode_corpus(build, progress=self._stages.watcher)
            yield from CorpusEmbeddings(report.store, report.record).blocks()


def _prepared(rows: NDArray[np.floating], *, unit: bool) -> NDArray[np.floating]:
    return unit_rows(np.asarray(rows, np.float64)) if unit else rows


def name_of(whitening: Whitening, wish: str | int | float | None = None) -> str:
    """Return what tables call a transform; a width that differs from set to set by its wish."""
    exponent = ""
    if whitening.kind is Kind.WHITENING and whitening.exponent != 1:
        exponent = f", γ = {whitening.exponent:g}"
    asked = WidthSpec.parse(wish)
    width = whitening.k if asked.variance is None and not asked.full else wish
    return f"{whitening.kind.value}{exponent}, k = {width}"


def evaluate_sets(
    config: EvalConfig,
    sets: Sequence[Any],
    score: "Callable[[Any, TextEmbedder, Spaces], Scores]",
    *,
    stage: str,
    average: Callable[[Mapping[str, Any]], Any] | None = None,
    embedder: "TextEmbedder | None" = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Encode the texts of sets together, score each set in each space, and report.

    A set has a ``name``, ``texts``, and a length, of which progress is reported.
    ``score`` returns the figures of a set, ``average`` the means over the sets of a run. The
    embeddings are those of ``config``, unless an ``embedder`` is given.
    """
    stages = Stages(progress or Progress())
    embedder = embedder or EncodedTexts(config, stages)
    spaces = Spaces(config, embedder, stages)
    for each in sets:
        # A set is kept as a whole, so that others with it change nothing.
        embedder.embed(each.texts)
    scored: list[tuple[str, Scores]] = []
    with stages.stage(stage, sum(map(len, sets))) as watcher:
        for each in sets:
            scored.append((each.name, list(score(each, embedder, spaces))))
            watcher.advance(len(each))
    return report_of(embedder.facts(), runs_of(scored, average), stages)


def runs_of(
    scored: Iterable[tuple[str, Scores]], average: Callable[[Mapping[str, Any]], Any] | None = None
) -> list[dict[str, Any]]:
    """Return a run for each space: its name, its setting, its figures of every set, their average.

    The settings of one run differ between sets in what the data gave; the first set's stand.
    """
    runs: list[dict[str, Any]] = []
    for name, figures_of_set in scored:
        for place, (space, figures) in enumerate(figures_of_set):
            if place == len(runs):
                runs.append({"name": space.name, "setting": space.setting, "datasets": {}})
            runs[place]["datasets"][name] = figures
    if average is not None:
        for run in runs:
            run["average"] = average(run["datasets"])
    return runs


def report_of(
    encoder: Mapping[str, Any], runs: list[dict[str, Any]], stages: Stages
) -> dict[str, Any]:
    """Return what an evaluation found: the first run on top, all of them in ``runs``."""
    return {"encoder": dict(encoder), **runs[0], "runs": runs, "seconds": dict(stages.seconds)}


def _sentence_columns(source: str) -> tuple[str, ...]:
    """Return the columns of sentences of a Parquet corpus, by their names."""
    try:
        file = find_files([source])[0]
        with reading(file.path):
            names = pq.read_schema(file.path, filesystem=file.filesystem).names
    except (CorpusError, OSError, pa.ArrowException) as error:
        raise CorpusError(
            f"{source} cannot be fitted on ({str(error).splitlines()[0][:160]}); --fit takes "
            f"{', '.join(OF_TASKS)}, or a Parquet corpus of sentences"
        ) from error
    for columns in _KNOWN_COLUMNS:
        if set(columns) <= set(names):
            return columns
    raise ConfigError(
        f"{source} has the columns {', '.join(names)}, and none is called as sentences are: "
        f"{' or '.join(map(' and '.join, _KNOWN_COLUMNS))}; rename one"
    )


# Texts that a store keeps together, and that an interrupted evaluation loses at most.
_WINDOW = 1 << 14


class TextEmbedder(Protocol):
    """Gives the raw embeddings of texts."""

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings (n, d) of n texts, unnormalised; equal texts are encoded once."""

    def facts(self) -> dict[str, Any]:
        """Return what makes the embeddings what they are, as JSON values."""


class EncodedTexts:
    """Encodes with a Transformer, loaded when first needed; see ``TextEmbedder``."""

    def __init__(self, config: EvalConfig, stages: Stages) -> None:
        asked = config.encoder
        if config.published is None:
            spec = resolve_encoder(asked)[0]
        else:
            spec, _, asked = QueryEncoder(
                recorded_spec(config.published.fields["encoder"]),
                **config.opening,
                instead="evaluate its model with --model alone",
            ).resolve()
        for wanted in config.transforms:
            wanted.require_dim(spec.dim)
        self._encoder = LazyEncoder(asked, spec)
        self._spec, self._stages, self._store = spec, stages, None
        if config.store is not None:
            self._store = EmbeddingStore.create(config.store, spec.to_json(), spec.fingerprint)
        self._rows: dict[str, NDArray[np.float32]] = {}

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the embeddings (n, d) of n texts; if any is new, all are read or encoded."""
        if not self._rows.keys() >= set(texts):
            distinct = list(dict.fromkeys(texts))
            with self._stages.stage("encode", len(distinct)) as watcher:
                for some in blocks(distinct, _WINDOW):
                    self._read_or_encode(some, watcher.advance)
        rows = [self._rows[text] for text in texts]
        return np.array(rows, np.float32).reshape(len(texts), self._spec.dim)

    def facts(self) -> dict[str, Any]:
        """Return the encoder's identity."""
        return encoder_facts(self._spec)

    def _read_or_encode(self, texts: list[str], advance: Any) -> None:
        key = {"texts": fingerprint({"texts": texts})}
        kept = None if self._store is None else self._store.results.sample(key, {"texts": "nd"})
        if kept is not None:
            advance(len(texts))
        else:
            blocks = self._encoder().stream([texts], advance=advance)
            kept = {"texts": np.concatenate([np.array(block, np.float32) for block in blocks])}
            if self._store is not None:
                self._store.results.save_sample(key, kept)
        self._rows.update(zip(texts, kept["texts"], strict=True))


def encoder_facts(spec: Spec) -> dict[str, Any]:
    """Return what a reader must know of an encoder to compare its figures with others."""
    kept = ("model", "revision", "pooling", "layers", "max_length", "dtype", "dim")
    facts = {name: value for name, value in spec.to_json().items() if name in kept}
    if spec.document_prompt:
        facts["prompt"] = spec.document_prompt
    return {"kind": spec.to_json()["kind"], **facts, "fingerprint": spec.fingerprint}
