"""Rules of choice against scipy's ranks and standard errors, and on problems whose answer is known.

Problems are drawn so that theory names the transform: noise as wide as the data asks for whitening,
noise alike in all directions for PCA.
"""

from __future__ import annotations

import json
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata, sem

from tests.whitening_helpers import few, make_rows, quick, seeds
from tests.whitening_helpers import fit as fit_rows
from whiten_index.moments import Moments
from whiten_index.whitening import Kind, Whitening, WhiteningConfig, default_width
from whiten_index.whitening.choice import (
    EXPONENTS,
    Candidate,
    Choice,
    Rule,
    Setting,
    Trial,
    choose_by_scores,
    choose_by_spectrum,
    reciprocal_ranks,
    score_settings,
    widths,
)
from whiten_index.whitening.choice import settings as grid_of

DIM = 24


def one_over_mean_ranks(cosines, answers):
    """1/rank of each row's answer; those that tie share the mean of their ranks."""
    ranks = [rankdata(-row, method="average") for row in cosines]
    return np.array([1 / rank[answer] for rank, answer in zip(ranks, answers, strict=True)])


def cosines_of(a, b):
    a, b = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (a, b))
    return a @ b.T


def pca(rows, **options):
    return fit_rows(rows, kind=Kind.PCA, k="full", **options)


# --------------------------------------------------------------------------- scores


@quick
@given(seed=seeds, q=st.integers(1, 8), n=st.integers(1, 12))
def test_an_answer_scores_one_over_its_rank_and_ties_share_theirs(seed, q, n):
    rng = np.random.default_rng(seed)
    # Whole numbers: their products are exact, and many of them equal.
    queries, candidates = (rng.integers(-1, 2, (m, 3)).astype(np.float32) for m in (q, n))
    answers = rng.integers(0, n, q)
    found = reciprocal_ranks(answers)(queries, candidates)
    assert found == pytest.approx(one_over_mean_ranks(queries @ candidates.T, answers))


def test_all_candidates_alike_are_as_good_as_chance():
    same = np.ones((5, 3), dtype=np.float32)
    assert reciprocal_ranks(np.arange(5))(same, same) == pytest.approx(np.full(5, 1 / 3))


@pytest.mark.parametrize("normalize", [False, True])
@few
@given(seed=seeds)
def test_settings_are_scored_as_the_whitening_they_name_would_do(seed, normalize):
    rows = make_rows(seed, 150, DIM, ratio=2.0)
    fitted_on = rows / np.linalg.norm(rows, axis=1, keepdims=True) if normalize else rows
    rng = np.random.default_rng(seed)
    queries, others = (rows[:40] + 0.3 * rng.normal(size=(40, DIM)) for _ in range(2))
    own = np.arange(40)
    trials = [
        Trial(queries, rows, reciprocal_ranks(own)),
        Trial(others, rows[:40], reciprocal_ranks(own)),
    ]
    grid = [Setting(*each) for each in product((3, 11, DIM), (0.0, 0.3, 1.0), (True, False))]
    found = score_settings(pca(fitted_on, normalize_input=normalize), trials, grid)
    assert found.shape == (len(grid), 40)
    for row, setting in zip(found, grid, strict=True):
        transform = fit_rows(
            fitted_on,
            k=setting.k,
            exponent=setting.exponent,
            center=setting.center,
            normalize_input=normalize,
        )
        expected = [
            one_over_mean_ranks(cosines_of(*map(transform.apply, pair)), own)
            for pair in ((queries, rows), (others, rows[:40]))
        ]
        # Two cosines may differ by less than float32 tells apart.
        assert np.mean(np.abs(row - np.mean(expected, axis=0))) < 2e-3


def test_every_setting_is_tried_once_and_what_is_given_is_kept():
    free = grid_of((16, 32))
    assert len(free) == len(set(free)) == 2 * 2 * len(EXPONENTS)
    assert EXPONENTS[0] == 0
    assert EXPONENTS[-1] == 1
    assert {s.center for s in grid_of((16,), center=False)} == {False}
    assert {s.exponent for s in grid_of((16,), exponent=0.3)} == {0.3}
    assert grid_of((5,), exponent=0.3, center=True) == [Setting(5, 0.3, True)]


@pytest.mark.parametrize("rank", [1, 7, 15, 16, 100, 384, 5000])
def test_widths_are_within_the_rank_and_there_is_one(rank):
    found = widths(rank)
    assert found == tuple(sorted(set(found)))
    assert 1 <= found[0] <= found[-1] <= rank
    assert rank < 16 or found[0] == 16


# --------------------------------------------------------------------------- the rule


def gently_behind(by: float, count: int = 101) -> tuple[list[Setting], np.ndarray]:
    """Scores of PCA ``by`` below whitening's on average, with a standard error of 0.1."""
    # ±1 in turn, the last one 0: variance 1 with ddof = 1, so the error of 101 is about 0.0995.
    swing = np.r_[np.tile([1.0, -1.0], count // 2), 0.0]
    swing *= 0.1 / sem(swing)
    best = np.full(count, 0.5)
    return [Setting(8, 0.0, True), Setting(8, 1.0, True)], np.stack([best - by + swing, best])


@pytest.mark.parametrize(("by", "exponent"), [(0.099, 0.0), (0.101, 1.0)])
def test_the_gentler_one_wins_within_one_standard_error(by, exponent):
    chosen, candidates = choose_by_scores(*gently_behind(by))
    assert chosen == Setting(8, exponent, True)
    assert [c.error for c in candidates] == pytest.approx([0.1, 0.0])
    assert [c.score for c in candidates] == pytest.approx([0.5 - by, 0.5])
    assert [c.leads for c in candidates] == [exponent == 0.0, exponent == 1.0]


def test_without_errors_the_best_wins_and_of_equals_the_gentler():
    grid, scores = gently_behind(0.01)
    assert choose_by_scores(grid, scores, errors=0)[0].exponent == 1.0
    level = np.stack([scores[1], scores[1]])
    assert choose_by_scores(grid, level, errors=0)[0].exponent == 0.0


def test_of_settings_equally_gentle_the_better_wins():
    grid = [Setting(8, 0.0, True), Setting(8, 0.0, False), Setting(8, 1.0, True)]
    _, (pca_scores, best) = gently_behind(0.09)
    chosen, _ = choose_by_scores(grid, np.stack([pca_scores, pca_scores + 0.01, best]))
    assert chosen == Setting(8, 0.0, False)


@pytest.mark.parametrize(
    ("scores", "k"),
    [
        ([0.96, 0.98, 1.0], 32),
        ([0.969, 0.9, 1.0], 64),
        ([0.971, 0.9, 1.0], 16),
        ([0.5, 0.5, 0.2], 16),
        ([0.0, 0.0, 0.0], 16),
    ],
)
def test_the_width_is_the_narrowest_that_keeps_97_percent(scores, k):
    grid = [Setting(width, 0.5, True) for width in (64, 16, 32)]
    rows = np.array([scores[2], scores[0], scores[1]])
    assert choose_by_scores(grid, np.tile(rows[:, None], 20))[0].k == k


def test_one_query_has_no_error_and_takes_the_best():
    chosen, candidates = choose_by_scores(
        [Setting(8, 0.0, True), Setting(8, 1.0, True)], np.array([[0.2], [0.4]])
    )
    assert chosen.exponent == 1.0
    assert [c.error for c in candidates] == [0, 0]


@st.composite
def scored_grids(draw):
    grid = grid_of(draw(st.sampled_from([(16,), (16, 32), (16, 32, 48)])))
    rng = np.random.default_rng(draw(seeds))
    level, spread = rng.uniform(0, 1, (len(grid), 1)), draw(st.sampled_from([0.01, 0.1, 1.0]))
    count = draw(st.integers(2, 60))
    scores = np.clip(level + spread * rng.normal(size=(len(grid), count)), 0, 1)
    return grid, scores


@settings(quick, max_examples=80)
@given(scored_grids())
def test_nothing_gentler_is_as_good_and_nothing_chosen_is_worse(drawn):
    grid, scores = drawn
    chosen, candidates = choose_by_scores(grid, scores)
    leaders = {c.setting.k: c for c in candidates if c.leads}
    assert sorted(leaders) == sorted({s.k for s in grid})
    assert len([c for c in candidates if c.leads]) == len(leaders)
    assert {c.setting for c in candidates} == set(grid)
    mean = {s: row.mean() for s, row in zip(grid, scores, strict=True)}
    for k, leader in leaders.items():
        same = [i for i, s in enumerate(grid) if s.k == k]
        best = max(same, key=lambda i: scores[i].mean())
        behind = {grid[i]: scores[best] - scores[i] for i in same}
        # Paired: what counts is how the differences vary, query by query.
        error = {s: sem(gap) for s, gap in behind.items()}
        assert behind[leader.setting].mean() <= error[leader.setting] + 1e-9
        gentler = [s for s in behind if s.exponent < leader.setting.exponent]
        assert all(behind[s].mean() > error[s] for s in gentler)
        of_width = [c for c in candidates if c.setting.k == k]
        assert [c.score for c in of_width] == pytest.approx([mean[c.setting] for c in of_width])
        assert [c.error for c in of_width] == pytest.approx(
            [error[c.setting] for c in of_width], abs=1e-12
        )
    assert chosen == leaders[chosen.k].setting
    top = max(c.score for c in leaders.values())
    assert leaders[chosen.k].score >= 0.97 * top - 1e-9
    assert all(leaders[k].score < 0.97 * top for k in leaders if k < chosen.k)


@pytest.mark.parametrize("errors", [0.0, 1.0])
def test_scores_below_nought_can_be_chosen_by(errors):
    """A correlation with scores that grow with the distance is one such."""
    grid = [Setting(16, 0.0, True), Setting(16, 1.0, True), Setting(32, 0.0, True)]
    scores = np.array([[-0.5, -0.51], [-0.8, -0.79], [-0.3, -0.31]])
    chosen, candidates = choose_by_scores(grid, scores, errors=errors)
    assert chosen == Setting(32, 0.0, True)
    assert len(candidates) == 3


# --------------------------------------------------------------------------- known answers


def problem(noise, *, mean=0.0, seed=0, count=600):
    """Documents of a falling spectrum, and of each a query: itself with noise, and a fit of more.

    Args:
        noise: from spreads (d,) of the documents to spreads of the noise.
        mean: length of what all of them share.
        seed: of the draw.
        count: documents.
    """
    rng = np.random.default_rng(seed)
    spread = np.geomspace(1, 0.05, DIM)
    turn = np.linalg.qr(rng.normal(size=(DIM, DIM)))[0]
    documents = rng.normal(size=(count, DIM)) * spread
    queries = documents + rng.normal(size=(count, DIM)) * noise(spread)
    away = mean * rng.normal(size=DIM) / np.sqrt(DIM)
    documents, queries = ((x + away) @ turn for x in (documents, queries))
    return documents, queries


def chosen_for(documents, queries, **given_):
    trial = Trial(queries, documents, reciprocal_ranks(np.arange(len(queries))))
    grid = grid_of((DIM,), **given_)
    return choose_by_scores(grid, score_settings(pca(documents), [trial], grid))[0]


@pytest.mark.parametrize("seed", range(3))
def test_noise_as_wide_as_the_data_asks_for_whitening(seed):
    """Σ_noise ∝ Σ: the nearest by Mahalanobis' distance is the likeliest, which is γ = 1."""
    chosen = chosen_for(*problem(lambda spread: 0.6 * spread, seed=seed), center=True)
    assert chosen.exponent >= 0.75


@pytest.mark.parametrize("seed", range(3))
def test_noise_alike_in_all_directions_asks_for_none(seed):
    chosen = chosen_for(*problem(lambda spread: 0.3, seed=seed), center=True)
    assert chosen.exponent <= 0.25


def test_signal_in_narrow_directions_under_wide_noise_asks_for_whitening():
    def wide(spread):
        return np.where(spread > 0.3, 2 * spread, 0.02)

    assert chosen_for(*problem(wide), center=True).exponent >= 0.75


def test_a_mean_is_kept_where_queries_lie_farther_out_along_it():
    """As short texts do: centred by the documents they would still have most of it."""
    documents, queries = problem(lambda spread: 0.2 * spread, mean=3.0)
    queries = queries + 4 * documents.mean(axis=0)
    assert chosen_for(documents, queries, exponent=0.0).center is False


def test_a_mean_is_subtracted_where_lengths_from_it_say_nothing():
    rng = np.random.default_rng(0)
    mean = 3 * rng.normal(size=DIM)
    away = rng.normal(size=(400, DIM))

    def stretched():
        lengths = rng.lognormal(0, 1, size=(400, 1))
        return mean + lengths * (away + 0.5 * rng.normal(size=away.shape))

    assert chosen_for(stretched(), stretched(), exponent=0.0).center is True


# --------------------------------------------------------------------------- the spectrum alone


def spectral(rows, **options) -> Setting:
    fit = pca(rows)
    return choose_by_spectrum(fit, options.pop("k", min(default_width(fit.dim), fit.k)), **options)


@quick
@given(seeds, st.integers(2, 60), st.integers(1, 30), st.sampled_from([0.0, 0.1, 1.0, 100.0]))
def test_the_spectrum_gives_a_setting_that_can_be_fitted(seed, n, d, ratio):
    rows = make_rows(seed, n, d, ratio=ratio)
    chosen = spectral(rows)
    assert 0 <= chosen.exponent <= 1
    assert 1 <= chosen.k <= pca(rows).rank
    assert isinstance(chosen.center, bool)
    config = WhiteningConfig(k=chosen.k, exponent=chosen.exponent, center=chosen.center)
    assert Whitening.fit(Moments.of(rows), config).k == chosen.k


def test_a_larger_mean_never_asks_for_less():
    rows = make_rows(0, 300, DIM, ratio=0.0)
    direction = np.random.default_rng(1).normal(size=DIM)
    found = [
        spectral(rows - rows.mean(axis=0) + length * direction)
        for length in (0, 0.03, 0.1, 0.3, 1, 3, 10)
    ]
    exponents, centers = [s.exponent for s in found], [s.center for s in found]
    assert exponents == sorted(exponents)
    assert centers == sorted(centers)
    assert exponents[0] == 0
    # A steep spectrum beside a large mean is what raw language models have.
    assert exponents[-1] > 0.5
    assert centers[-1] is True


def test_a_wish_is_obeyed_where_the_spectrum_decides():
    rows = make_rows(0, 300, DIM, ratio=1.0)
    assert spectral(rows, k=5, exponent=0.3, center=False) == Setting(5, 0.3, False)
    assert spectral(rows, exponent=0.0).exponent == 0
    assert spectral(rows, k=7).k == 7


# --------------------------------------------------------------------------- as JSON


@pytest.mark.parametrize("rule", Rule)
def test_a_choice_written_as_json_is_read_as_it_was(rule):
    grid = [Setting(16, 0.125, True), Setting(32, 1.0, False)]
    candidates = tuple(
        Candidate(setting, 1 / 3, 1e-17, leads)
        for setting, leads in zip(grid, (True, False), strict=True)
    )
    choice = Choice(rule, grid[0], "MRR", 77, candidates, "because “ä”")
    assert Choice.from_json(json.loads(json.dumps(choice.to_json()))) == choice
    empty = Choice(rule, grid[1], "", 0, (), "no texts")
    assert Choice.from_json(json.loads(json.dumps(empty.to_json()))) == empty


def test_what_the_rule_returns_can_be_written_as_json():
    grid, scores = gently_behind(0.05)
    chosen, candidates = choose_by_scores(grid, scores)
    choice = Choice(Rule.PIECES, chosen, "MRR", scores.shape[1], candidates, "why")
    assert Choice.from_json(json.loads(json.dumps(choice.to_json()))) == choice
