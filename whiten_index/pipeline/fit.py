"""Fit the transform; k, exponent and centring are chosen first where the options leave them open.

The choice is made by labels where there are any, else by pieces of the corpus, else by the
spectrum alone.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.distributed.remote_call import remote_call
from whiten_index.errors import StorageError, WhiteningError
from whiten_index.pipeline.corpus_moments import Fitted, fit_moments
from whiten_index.pipeline.early_checks import possible_widths
from whiten_index.pipeline.pseudo_queries import Sample, recipe, sample_pieces
from whiten_index.pipeline.select_labelled import Labels, labelled_trials
from whiten_index.store.sampling import embeddings_of
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.selection import (
    Choice,
    Rule,
    Setting,
    Trial,
    choose_by_scores,
    choose_by_spectrum,
    keeps,
    reciprocal_ranks,
    score_settings,
    settings,
    widths,
)
from whiten_index.whitening.spectrum import WidthWish, default_width, unit_rows
from whiten_index.whitening.transform import Whitening
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig

if TYPE_CHECKING:
    from whiten_index.pipeline.build_config import BuildConfig
    from whiten_index.pipeline.encode import EncodeReport
    from whiten_index.progress import Stages

# Rounding to 11 significant bits, averaged over the mantissa.
_FLOAT16_RMS_ERROR = 2.0e-4
_EQUAL_COSINE = 0.99999


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
        constraints = Constraints(
            widths=None
            if config.k is not None
            else possible_widths(config, moments.dim, rows=encoded.record.rows),
            k=config.k,
            exponent=config.exponent,
            center=config.center,
            normalize_input=config.normalize_input,
            floor=config.floor,
            sample=config.choose_sample,
            seed=config.seed,
            labels=labels,
        )
        given = encoded.elsewhere(), moments, constraints, weights
        choice = remote_call(encoded.executor, stages, choose_setting, *given)
        setting = choice.setting
        wanted = replace(wanted, k=setting.k, exponent=setting.exponent, center=setting.center)
    whitening = Whitening.fit(moments, wanted)
    if whitening.k == 1:
        stages.watcher.note("note: one direction is kept, so that every score will be 1 or -1")
    _note_rounding(encoded, whitening, stages)
    return Fitted(moments, whitening, choice)


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


# Whole documents hold the words looked for, and so overrate strong whitening.
_SENTENCE_WEIGHT = 2.0
# With 100, 200 and 400 documents the choice still moved nDCG@10 of SciFact by 0.7.
_ENOUGH_DOCUMENTS = 300
# Changes whenever the same sample would give another choice.
_RULES = 2


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """Settings that the options fix, and the data to choose the others (None) by.

    ``widths`` are those among which k is chosen, None for all round ones.
    """

    k: str | int | float | None = None
    exponent: float | None = None
    center: bool | None = None
    normalize_input: bool = False
    floor: float | None = None
    widths: tuple[int, ...] | None = None
    sample: int = 1_000
    seed: int = 0
    labels: Labels | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what a choice depends on besides the corpus, as JSON values."""
        labels = None if self.labels is None else self.labels.digest()
        return {**asdict(replace(self, labels=None)), "labels": labels}


def choose_setting(
    stages: Stages,
    encoded: EncodeReport,
    moments: Moments,
    constraints: Constraints,
    weights: NDArray[np.float64] | None = None,
) -> Choice:
    """Choose k, γ and centring; a choice made before on the same corpus is found in its store.

    Raises:
        WhiteningError: the embeddings are constant, or k is above their rank.
        CorpusError: the labels do not fit the corpus or are too few, or the corpus has changed.
        ConfigError: there is no encoder for the labels.
    """
    key = {
        "corpus": encoded.record.fingerprint,
        "rules": _RULES,
        "sample": recipe(),
        "moments": _digest(moments),
        "encoder": encoded.store.encoder,
        "wishes": constraints.to_json(),
    }
    # A damaged note is made again.
    choice = None
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if (kept := encoded.store.results.choice(key)) is not None:
            choice = Choice.from_json(kept)
    if choice is None:
        fit = _pca(moments, constraints)
        choice = _Chooser(encoded, moments, fit, constraints, stages, weights).choose()
        if choice.rule is not Rule.SPECTRUM:
            # A store that cannot be written still serves: the next build chooses the same again.
            with contextlib.suppress(StorageError):
                encoded.store.results.save_choice(key, choice.to_json())
    if choice.rule is Rule.PIECES and choice.sample < _ENOUGH_DOCUMENTS:
        stages.watcher.note(
            f"note: k and exponent were chosen on {choice.sample} documents, and with fewer "
            f"than {_ENOUGH_DOCUMENTS} that is a matter of chance; set --k and --exponent, or give "
            "judged queries with --queries and --qrels"
        )
    return choice


def piece_trials(encoded: EncodeReport, sample: Sample) -> list[Trial]:
    """Return what pieces are to find: a sentence its others, some words their document."""
    documents = embeddings_of(encoded.store, encoded.record, sample.candidates)
    own = np.arange(len(sample))
    return [
        Trial(sample.sentences, sample.others, reciprocal_ranks(own), _SENTENCE_WEIGHT),
        Trial(sample.windows, documents, reciprocal_ranks(own)),
    ]


@dataclass(frozen=True, eq=False)
class _Chooser:
    encoded: EncodeReport
    moments: Moments
    fit: Whitening
    given: Constraints
    stages: Stages
    weights: NDArray[np.float64] | None

    def choose(self) -> Choice:
        if self.given.labels is not None:
            return self._by_labels(self.given.labels)
        found = sample_pieces(self.encoded, self.given.sample, self.given.seed, self.stages)
        if isinstance(found, Sample):
            return self._by_pieces(found)
        setting = choose_by_spectrum(
            self.fit,
            self._width() or self._default_width(),
            exponent=self.given.exponent,
            center=self.given.center,
        )
        why = f"{found.why}, so mean and spectrum alone decide"
        return Choice(Rule.SPECTRUM, setting, "", 0, (), why)

    def _by_pieces(self, sample: Sample) -> Choice:
        with self.stages.stage("choose", len(sample)) as watcher:
            trials = piece_trials(self.encoded, sample)
            fit = self._held_out(sample.rows) or self.fit
            setting, scored = choose_by_scores(*self._scored(fit, trials))
            watcher.advance(len(sample))
        within = " (in the fit as well, for want of others)" if fit is self.fit else ""
        measure = (
            "MRR of a sentence among what is left of the documents, weight 2, and of 8 to 20 words "
            "among whole documents, weight 1"
        )
        why = (
            f"the gentlest within one standard error of the best, by how well pieces of "
            f"{len(sample)} documents{within} find the rest"
        )
        return Choice(Rule.PIECES, setting, measure, len(sample), scored, why)

    def _by_labels(self, labels: Labels) -> Choice:
        found = labelled_trials(self.encoded, labels, self.given.seed, self.stages)
        with self.stages.stage("choose", found.count) as watcher:
            grid, scores = self._scored(self.fit, found.trials)
            setting, scored = choose_by_scores(grid, scores, errors=found.errors)
            watcher.advance(found.count)
        return Choice(Rule.LABELS, setting, found.measure, found.count, scored, found.why)

    def _scored(
        self, fit: Whitening, trials: Sequence[Trial]
    ) -> tuple[list[Setting], NDArray[np.float64]]:
        """Return settings and their scores, from the widest k down to one that loses too much."""
        width = self._width()
        ks = self._widths(fit.k) if width is None else (width,)
        grid, scores, best = list[Setting](), list[NDArray[np.float64]](), -np.inf
        for k in sorted(ks, reverse=True):
            tried = settings([k], exponent=self.given.exponent, center=self.given.center)
            scored = score_settings(fit, trials, tried)
            grid += tried
            scores.append(scored)
            here = float(scored.mean(axis=1).max())
            best = max(best, here)
            if not keeps(here, best):
                break
        return grid, np.concatenate(scores)

    def _held_out(self, rows: NDArray[np.int64]) -> Whitening | None:
        """Return the fit without rows of the corpus (m,), None where too little of it is left."""
        embeddings = embeddings_of(self.encoded.store, self.encoded.record, rows)
        if self.given.normalize_input:
            embeddings = unit_rows(embeddings)
        weights = None if self.weights is None else self.weights[rows]
        try:
            fit = _pca(self.moments - Moments.of(embeddings, weights=weights), self.given)
        except WhiteningError:
            return None
        return fit if fit.k >= (self._width() or min(self._widths(self.fit.k))) else None

    def _widths(self, rank: int) -> tuple[int, ...]:
        """Return the widths among which k is chosen."""
        given = self.given.widths
        if given is None:
            return widths(rank)
        if found := tuple(k for k in given if k <= rank):
            return found
        raise WhiteningError(
            f"the factory can be built over {given[0]} dims at least, and the embeddings span "
            f"{rank}; use another --factory, or more rows"
        )

    def _default_width(self) -> int:
        """Return the k that is kept where nothing tells: a third of d, or what is near to it."""
        default = min(default_width(self.fit.dim), self.fit.k)
        if self.given.widths is None:
            return default
        allowed = self._widths(self.fit.k)
        return max((k for k in allowed if k <= default), default=min(allowed))

    def _width(self) -> int | None:
        """Return k where it is settled, None where it is up for choice."""
        wish = WidthWish.parse(self.given.k)
        if wish == WidthWish():
            return None
        floor = self.given.floor or 0.0
        return wish.resolve(self.fit.eigenvalues, count=self.moments.count, floor=floor)


def _digest(moments: Moments) -> str:
    """Return what tells moments from those of other rows, weights or scales."""
    arrays = (moments.mean, moments.scatter)
    data = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _pca(moments: Moments, given: Constraints) -> Whitening:
    config = WhiteningConfig(
        kind=Kind.PCA,
        k="full",
        normalize_input=given.normalize_input,
        floor=given.floor,
    )
    return Whitening.fit(moments, config)
