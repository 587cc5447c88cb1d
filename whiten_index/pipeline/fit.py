"""Moments of a corpus from its store, the choice of a transform, and its fit on them.

Of k, exponent and centring the options may settle some. Labels decide on the others if there are
any, else pieces of the corpus, else the spectrum alone.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.prefetch import blocks
from whiten_index.artifacts.tensors import content_digest
from whiten_index.distributed.executors import remote_call
from whiten_index.encoding.canary import without_canary
from whiten_index.errors import StorageError, WhiteningError
from whiten_index.evaluation.judgements import JudgedQueries
from whiten_index.pipeline.early_checks import possible_widths
from whiten_index.pipeline.labels import Evidence, labelled_trials
from whiten_index.pipeline.pseudo_queries import RECIPE, Sample, sample_pieces
from whiten_index.store.embedding_store import EmbeddingStore
from whiten_index.store.records import CorpusPart
from whiten_index.store.sampling import CorpusEmbeddings
from whiten_index.whitening.moments import Moments
from whiten_index.whitening.selection import (
    Choice,
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
from whiten_index.whitening.spectrum import unit_rows
from whiten_index.whitening.transform import Whitening, resolve_width
from whiten_index.whitening.whitening_config import Kind, WhiteningConfig, WidthSpec, default_width

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


def fit_whitening(
    config: "BuildConfig", encoded: "EncodeReport", labels: JudgedQueries | None
) -> Fitted:
    """Fit the transform that the options name, or choose one and fit it."""
    wanted, choice, moments = config.whitening_config(), None, fit_moments(config, encoded)
    if config.chooses:
        wish = encoded.elsewhere(), config, labels, moments
        choice = remote_call(encoded.executor, encoded.stages, choose_setting, *wish)
        setting = choice.chosen
        wanted = replace(wanted, k=setting.k, exponent=setting.exponent, center=setting.center)
    whitening = Whitening.fit(moments, wanted)
    usual = default_width(whitening.dim)
    if config.k is None and whitening.k == whitening.rank < usual:
        encoded.stages.watcher.note(
            f"note: k is {whitening.k} and not {usual}, as {moments.count:g} rows span no more; "
            "--whiten none keeps the embeddings of so few as they are"
        )
    return Fitted(moments, whitening, choice)


def fit_moments(config: "BuildConfig", encoded: "EncodeReport") -> Moments:
    """Return the moments of a corpus.

    Sums are added in a fixed order, so that they are bit-equal on any number of workers.
    """
    wanted, store, rows = config.whitening_config(), encoded.store, encoded.record.rows
    parts = [part for part in encoded.record.parts if part.rows]
    size = max(_LEAST_GROUP, math.isqrt(len(parts)))
    groups = list(map(tuple, blocks(parts, size)))
    of_units = functools.partial(_moments_of_units, store)
    sums = of_units if wanted.normalize_input else store.total_moments
    with encoded.stages.whole("fit", rows):
        each = encoded.executor.map(sums, groups)
        return Moments.total(chain([Moments.empty(store.dim)], each))


def _moments_of_units(store: EmbeddingStore, group: Group) -> Moments:
    moments = Moments.empty(store.dim)
    for part in group:
        for block in blocks(store.embeddings(part), _BLOCK_ROWS):
            moments = moments.update(unit_rows(block.astype(np.float64)))
    return moments


# Whole documents hold the words looked for, and so overrate strong whitening.
_SENTENCE_WEIGHT = 2.0
# With 100, 200 and 400 documents the choice still moved nDCG@10 of SciFact by 0.7.
_ENOUGH_DOCUMENTS = 300
# Changes whenever the same sample would give another choice.
_RULES = 3
_OPTIONS = (
    "k", "exponent", "center", "normalize_input", "similarity", "floor", "choose_sample", "seed",
)  # fmt: skip


def choose_setting(
    stages: "Stages",
    encoded: "EncodeReport",
    config: "BuildConfig",
    labels: JudgedQueries | None,
    moments: Moments,
) -> Choice:
    """Choose k, γ and centring; an earlier choice on the same corpus is taken from the store."""
    encoded, ks = replace(encoded, stages=stages), None
    if config.k is None:
        ks = possible_widths(config, moments.dim, rows=encoded.record.rows)
    results = encoded.store.results
    key = {
        "corpus": encoded.record.fingerprint,
        "rules": _RULES,
        "pieces": list(RECIPE),
        "moments": content_digest({"mean": moments.mean, "scatter": moments.scatter}, {}),
        "encoder": without_canary(encoded.store.encoder),
        "options": {name: getattr(config, name) for name in _OPTIONS},
        "widths": ks,
        "labels": None if labels is None else labels.digest,
    }
    choice = None
    # A damaged note is made again.
    with contextlib.suppress(KeyError, TypeError, ValueError):
        if (kept := results.choice(key)) is not None:
            choice = Choice.from_json(kept)
    if choice is None:
        choice = _choose(encoded, config, labels, moments, ks)
        if choice.rule != "spectrum":
            # A store that cannot be written still serves: the next build chooses the same again.
            with contextlib.suppress(StorageError):
                results.save_choice(key, asdict(choice))
    free = [name for name in ("k", "exponent") if getattr(config, name) is None]
    few = choice.rule == "pieces" and choice.sample < _ENOUGH_DOCUMENTS
    # A sweep, which has no ``out`` here, shows such settings next to the raw embeddings anyway.
    if config.out and few and free:
        stages.watcher.note(
            f"note: {choice.sample} documents chose {' and '.join(free)}, and with fewer than "
            f"{_ENOUGH_DOCUMENTS} that is a matter of chance; set "
            f"{' and '.join(f'--{name}' for name in free)}, or give judged queries with --queries "
            "and --qrels"
        )
    return choice


def _choose(
    encoded: "EncodeReport",
    config: "BuildConfig",
    labels: JudgedQueries | None,
    moments: Moments,
    ks: tuple[int, ...] | None,
) -> Choice:
    fit, width = _pca(moments, config), None
    rank, exponent, center = fit.k, config.exponent, config.center
    if (wish := WidthSpec.parse(config.k)) != WidthSpec():
        floor = config.floor or 0.0
        width = resolve_width(wish, fit.eigenvalues, count=moments.count, floor=floor)
    if labels is not None:
        evidence = labelled_trials(encoded, config, labels)
    else:
        sample = sample_pieces(encoded, config.choose_sample, config.seed)
        if isinstance(sample, str):
            width = width or _default_width(fit, ks)
            setting = choose_by_spectrum(fit, width, exponent=exponent, center=center)
            why = f"{sample}, so mean and spectrum alone decide"
            return Choice("spectrum", setting, "", 0, (), why)
        evidence = piece_evidence(encoded, sample)
    with encoded.stages.whole("choose", evidence.count):
        why = evidence.why
        if evidence.rows is not None:
            own = CorpusEmbeddings(encoded.store, encoded.record).at(evidence.rows)
            own = unit_rows(own) if config.normalize_input else own
            least = width or min(_widths(ks, fit.k))
            held_out = None
            with contextlib.suppress(WhiteningError):
                held_out = _pca(moments - Moments.of(own), config)
            if held_out is None or held_out.k < least:
                why += " (which are part of the fit, since the corpus has too few others)"
            else:
                fit = held_out
        tried = (width,) if width is not None else _widths(ks, min(fit.k, rank))
        open_at = {k: settings([k], exponent=exponent, center=center) for k in tried}
        grid, scores = _scored(fit, evidence.trials, open_at)
        setting, candidates = choose_by_scores(grid, scores, errors=evidence.errors)
        why += "" if width else ", and of the widths the narrowest with 97 % of the best score"
        raw = mean_score(evidence.trials, lambda rows: fit.compared(rows.astype(np.float64)))
    found = Choice(evidence.rule, setting, evidence.measure, evidence.count, candidates, why, raw)
    score = max(each.score for each in candidates if each.k == setting.k and each.leads)
    named = (name for name in ("k", "exponent") if getattr(config, name) is not None)
    given = " and ".join(f"--{name}" for name in named)
    if config.out and not keeps(score, raw):
        encoded.stages.watcher.note(
            f"note: the transform scores {score:.3f} and raw embeddings {raw:.3f} without labels; "
            f"{given and f'leave {given} out, or '}keep the raw embeddings with --whiten none"
        )
    return found


def mean_score(
    trials: Sequence[Trial], vectors: Callable[[NDArray[np.floating]], NDArray[np.floating]]
) -> float:
    """Return the score of a way to make vectors of raw embeddings."""
    total = 0.0
    for trial in trials:
        pair = (vectors(each).astype(np.float32) for each in (trial.queries, trial.candidates))
        total += trial.weight * float(trial.score(*pair).mean())
    return total / sum(trial.weight for trial in trials)


def piece_evidence(encoded: "EncodeReport", sample: Sample) -> Evidence:
    """Return the trials of pieces: a sentence finds its others, some words their document."""
    documents = CorpusEmbeddings(encoded.store, encoded.record).at(sample.candidates)
    trials = [
        Trial(sample.sentences, sample.others, reciprocal_ranks, _SENTENCE_WEIGHT),
        Trial(sample.windows, documents, reciprocal_ranks),
    ]
    measure = (
        "MRR of a sentence among what is left of the documents, weight 2, and of 8 to 20 words "
        "among whole documents, weight 1"
    )
    why = (
        f"pieces of {len(sample)} documents search for the rest; of the exponents within one "
        "standard error of the best score the smallest is taken"
    )
    return Evidence("pieces", trials, len(sample), measure, why, errors=1.0, rows=sample.rows)


def _scored(
    fit: Whitening, trials: Sequence[Trial], open_at: Mapping[int, list[Setting]]
) -> tuple[list[Setting], NDArray[np.float64]]:
    """Return settings and their scores, from the widest k down to one that loses too much."""
    grid, scores, best = list[Setting](), list[NDArray[np.float64]](), -np.inf
    for k in sorted(open_at, reverse=True):
        scored = score_settings(fit, trials, open_at[k])
        grid += open_at[k]
        scores.append(scored)
        here = float(scored.mean(axis=1).max())
        best = max(best, here)
        if not keeps(here, best):
            break
    return grid, np.concatenate(scores)


def _widths(ks: tuple[int, ...] | None, rank: int) -> tuple[int, ...]:
    if ks is None:
        return widths(rank)
    if found := tuple(k for k in ks if k <= rank):
        return found
    raise WhiteningError(
        f"the factory can be built over {ks[0]} dims at least, and the embeddings span {rank}; use "
        "another --factory, or more rows"
    )


def _default_width(fit: Whitening, ks: tuple[int, ...] | None) -> int:
    """Return the k without evidence: a third of d, or the nearest allowed one."""
    default = min(default_width(fit.dim), fit.k)
    if ks is None:
        return default
    allowed = _widths(ks, fit.k)
    return max((k for k in allowed if k <= default), default=min(allowed))


def _pca(moments: Moments, config: "BuildConfig") -> Whitening:
    wanted = config.whitening_config()
    pca = WhiteningConfig(
        kind=Kind.PCA,
        k="full",
        normalize_input=wanted.normalize_input,
        floor=wanted.floor,
        similarity=wanted.similarity,
    )
    return Whitening.fit(moments, pca)
