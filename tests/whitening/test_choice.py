"""Rules of choice against scipy's ranks and standard errors, and on problems whose answer is known.

Problems are drawn so that theory names the transform: noise as wide as the data asks for whitening,
noise alike in all directions for PCA.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import rankdata, sem

from tests.helpers.transforms import fit as fit_rows
from tests.helpers.transforms import make_rows, quick, seeds
from whiten_index import Moments, Whitening, WhiteningConfig
from whiten_index.whitening import selection
from whiten_index.whitening.selection import Setting, Trial, choose_by_scores, reciprocal_ranks
from whiten_index.whitening.selection import settings as grid_of
from whiten_index.whitening.whitening_config import Kind, default_width

DIM = 24


def one_over_mean_ranks(cosines):
    """1/rank of each row's answer; those that tie share the mean of their ranks."""
    return 1 / np.diagonal([rankdata(-row, method="average") for row in cosines])


def pca(rows, **options):
    return fit_rows(rows, kind=Kind.PCA, k="full", **options)


@quick
@given(seed=seeds, q=st.integers(1, 8), others=st.integers(0, 4))
def test_an_answer_scores_one_over_its_rank_and_ties_share_theirs(seed, q, others):
    rng = np.random.default_rng(seed)
    # Whole numbers: their products are exact, and many of them equal.
    queries, candidates = (rng.integers(-1, 2, (m, 3)).astype(np.float32) for m in (q, q + others))
    found = reciprocal_ranks(queries, candidates)
    assert found == pytest.approx(one_over_mean_ranks(queries @ candidates.T))


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


@st.composite
def scored_grids(draw):
    grid = grid_of(draw(st.sampled_from([(16,), (16, 32), (16, 32, 48)])))
    rng = np.random.default_rng(draw(seeds))
    level, spread = rng.uniform(0, 1, (len(grid), 1)), draw(st.sampled_from([0.01, 0.1, 1.0]))
    count = draw(st.integers(2, 60))
    scores = np.clip(level + spread * rng.normal(size=(len(grid), count)), 0, 1)
    return grid, scores


def plain(candidate):
    return Setting(candidate.k, candidate.exponent, candidate.center)


@settings(quick, max_examples=80)
@given(scored_grids())
def test_nothing_gentler_is_as_good_and_nothing_chosen_is_worse(drawn):
    grid, scores = drawn
    chosen, candidates = choose_by_scores(grid, scores)
    leaders = {c.k: c for c in candidates if c.leads}
    assert sorted(leaders) == sorted({s.k for s in grid})
    assert len([c for c in candidates if c.leads]) == len(leaders)
    assert {plain(c) for c in candidates} == set(grid)
    mean = {s: row.mean() for s, row in zip(grid, scores, strict=True)}
    for k, leader in leaders.items():
        same = [i for i, s in enumerate(grid) if s.k == k]
        best = max(same, key=lambda i: scores[i].mean())
        behind = {grid[i]: scores[best] - scores[i] for i in same}
        # Paired: what counts is how the differences vary, query by query.
        error = {s: sem(gap) for s, gap in behind.items()}
        assert behind[plain(leader)].mean() <= error[plain(leader)] + 1e-9
        gentler = [s for s in behind if s.exponent < leader.exponent]
        assert all(behind[s].mean() > error[s] for s in gentler)
        of_width = [c for c in candidates if c.k == k]
        assert [c.score for c in of_width] == pytest.approx([mean[plain(c)] for c in of_width])
        assert [c.error for c in of_width] == pytest.approx(
            [error[plain(c)] for c in of_width], abs=1e-12
        )
    assert chosen == plain(leaders[chosen.k])
    top = max(c.score for c in leaders.values())
    assert leaders[chosen.k].score >= 0.97 * top - 1e-9
    assert all(leaders[k].score < 0.97 * top for k in leaders if k < chosen.k)


def problem(noise, *, seed):
    """Return documents of a falling spectrum, and of each a query: itself with noise.

    ``noise`` gives the spreads (d,) of the noise from those of the documents.
    """
    rng = np.random.default_rng(seed)
    spread = np.geomspace(1, 0.05, DIM)
    turn = np.linalg.qr(rng.normal(size=(DIM, DIM)))[0]
    documents = rng.normal(size=(600, DIM)) * spread
    queries = documents + rng.normal(size=(600, DIM)) * noise(spread)
    return documents @ turn, queries @ turn


def chosen_for(documents, queries, **given_):
    trial = Trial(queries, documents, reciprocal_ranks)
    grid = grid_of((DIM,), **given_)
    return choose_by_scores(grid, selection.score_settings(pca(documents), [trial], grid))[0]


@pytest.mark.parametrize("seed", range(3))
def test_noise_as_wide_as_the_data_asks_for_whitening(seed):
    """Σ_noise ∝ Σ: the nearest by Mahalanobis' distance is the likeliest, which is γ = 1."""
    chosen = chosen_for(*problem(lambda spread: 0.6 * spread, seed=seed), center=True)
    assert chosen.exponent >= 0.75


def spectral(rows, **options) -> Setting:
    fit = pca(rows)
    return selection.choose_by_spectrum(
        fit, options.pop("k", min(default_width(fit.dim), fit.k)), **options
    )


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
