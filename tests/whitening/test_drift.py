"""Drift against closed forms: what moved by a known amount is measured as that amount."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tests.helpers.transforms import fit, make_rows, quick, seeds
from whiten_index import Moments, Whitening, WhiteningConfig
from whiten_index.whitening.drift import DRIFT_THRESHOLD, Drift, SamplingNoise, decide
from whiten_index.whitening.spectrum import unit_rows
from whiten_index.whitening.whitening_config import Kind

D, K = 12, 5
KINDS = list(Kind)


def measure(rows, today, *, shared=None, **options) -> Drift:
    """Measure with a transform fitted on rows, as moments are taken for it."""
    if options.get("normalize_input"):
        rows, today = unit_rows(rows), unit_rows(today)
    return Drift.measure(fit(rows, **options), Moments.of(rows), Moments.of(today), shared=shared)


def figures(drift):
    """Return all figures, the eigenvalues' among them, as one flat mapping."""
    flat = drift.to_json()
    return flat | flat.pop("eigenvalues")


def directions_of(rows, k=K):
    """Return mean, the first k eigenvectors and their variances, by numpy alone."""
    values, vectors = np.linalg.eigh(np.cov(rows.T))
    return rows.mean(axis=0), vectors[:, ::-1][:, :k], values[::-1][:k]


def expected_log_density(mean, covariance, of_mean, of_covariance):
    """Return E log p(x), x ~ N(mean, covariance), p that of the other, by SciPy's density.

    A log-density is quadratic, so its mean over the 2k points mean ± √k column is exact.
    """
    root = np.linalg.cholesky(covariance) * np.sqrt(len(mean))
    points = np.concatenate([mean + root.T, mean - root.T])
    return stats.multivariate_normal(of_mean, of_covariance).logpdf(points).mean()


@quick
@given(seeds, st.integers(1, D))
def test_kl_is_that_of_the_two_gaussians_along_the_kept_directions(seed, k):
    rows, today = make_rows(seed, 300), make_rows(seed + 1, 250, ratio=0.3)
    _, basis, _ = directions_of(rows, k)
    then, now = (
        (x.mean(axis=0), np.atleast_2d(np.cov(x.T))) for x in (rows @ basis, today @ basis)
    )
    expected = expected_log_density(*now, *now) - expected_log_density(*now, *then)
    assert measure(rows, today, k=k).kl_per_dim == pytest.approx(expected / k, rel=1e-8)


@quick
@given(seeds, st.floats(0, 5))
def test_a_mean_moved_by_so_many_deviations_is_a_shift_of_so_many(seed, far):
    rows = make_rows(seed)
    _, basis, values = directions_of(rows)
    along = np.random.default_rng(seed).normal(size=K)
    along *= far / np.linalg.norm(along)
    drift = measure(rows, rows + basis @ (along * values**0.5), k=K)
    assert drift.mean_shift == pytest.approx(far, abs=1e-9)
    assert drift.kl_mean_per_dim == pytest.approx(far**2 / 2 / K, abs=1e-9)
    np.testing.assert_allclose(drift.eigenvalues, 1, atol=1e-8)
    assert drift.kl_covariance_per_dim == pytest.approx(0, abs=1e-12)


@quick
@given(seeds, st.lists(st.floats(0.05, 20), min_size=K, max_size=K))
def test_variances_scaled_by_known_factors_are_the_eigenvalues(seed, factors):
    rows = make_rows(seed)
    mean, basis, _ = directions_of(rows)
    centred = rows - mean
    factor = np.array(factors)
    today = rows + centred @ basis @ np.diag(factor**0.5 - 1) @ basis.T
    drift = measure(rows, today, k=K)
    np.testing.assert_allclose(drift.eigenvalues, np.sort(factor), rtol=1e-8)
    expected = (factor - 1 - np.log(factor)).sum() / 2 / K
    assert drift.kl_per_dim == pytest.approx(expected, abs=1e-9)
    assert drift.to_json()["eigenvalues"]["most"] == pytest.approx(factor.max(), rel=1e-5)
    assert drift.to_json()["eigenvalues"]["median"] == pytest.approx(np.median(factor), rel=1e-5)


def options_of(kind):
    yield {}
    if kind is Kind.WHITENING:
        yield {"exponent": 0.5}
        yield {"shrinkage": "ledoit-wolf"}
        yield {"shrinkage": 0.4}
        yield {"floor": 0.2}
    if kind is not Kind.NONE:
        yield {"normalize_input": True}
        yield {"center": False}
    if kind in (Kind.PCA, Kind.WHITENING):
        yield {"remove_top": 2, "k": 4}
        yield {"k": "full"}


CASES = [(kind, options) for kind in KINDS for options in options_of(kind)]


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_identical_moments_have_not_drifted_whatever_the_transform(kind, options):
    rows = make_rows(5)
    drift = measure(rows, rows, shared=len(rows), kind=kind, **options)
    figures = drift.to_json()
    for name in ("mean_shift", "kl_per_dim", "variance_lost", "sampling_kl", "noise_kl"):
        assert figures[name] == pytest.approx(0, abs=1e-12), name
    np.testing.assert_allclose(drift.eigenvalues, 1, atol=1e-10)
    assert decide(drift, threshold=1e-9).whitening == "keep"


def test_shrinkage_is_applied_to_both_covariances():
    rows, today = make_rows(1, 30), make_rows(2, 40)
    rho = 0.3
    then, now = (
        (1 - rho) * np.cov(x.T) + rho * np.trace(np.cov(x.T)) / D * np.eye(D) for x in (rows, today)
    )
    values, vectors = np.linalg.eigh(then)
    w1 = vectors[:, ::-1][:, :K] * values[::-1][:K] ** -0.5
    drift = measure(rows, today, k=K, shrinkage=rho)
    np.testing.assert_allclose(drift.eigenvalues, np.linalg.eigvalsh(w1.T @ now @ w1), rtol=1e-9)


def differences(rng, before, after, shared, k):
    """Return the KL of two samples of one population, and what a refit would not mend of it."""

    def to_truth(mean, covariance):
        inverse = np.linalg.inv(covariance)
        log = np.linalg.slogdet(covariance)[1]
        return (np.trace(inverse) - k + log + mean @ inverse @ mean) / 2 / k

    both = rng.normal(size=(shared, k))
    rows, today = (np.vstack([both, rng.normal(size=(n - shared, k))]) for n in (before, after))
    drift = measure(rows, today, k="full", shared=shared)
    gained = to_truth(rows.mean(axis=0), np.cov(rows.T))
    gained -= to_truth(today.mean(axis=0), np.cov(today.T))
    return drift.kl_per_dim, drift.kl_per_dim - gained


@pytest.mark.parametrize(
    ("before", "after", "shared", "k"),
    [(300, 400, 0, 4), (300, 400, 270, 4), (600, 500, 450, 12), (400, 800, 400, 8)],
)
def test_chance_is_what_two_samples_of_one_population_show(before, after, shared, k):
    rng = np.random.default_rng(0)
    pairs = np.array([differences(rng, before, after, shared, k) for _ in range(300)])
    chance = SamplingNoise(before, after, shared, k, 0.0)
    shown, left = pairs.mean(axis=0)
    assert chance.sampling() == pytest.approx(shown, rel=0.15)
    # Three deviations above what a refit would not mend.
    noise = chance.remaining(mean=True, covariance=True)
    assert noise == pytest.approx(max(left, 0) + 3 * pairs[:, 0].std(), rel=0.35)


def test_a_new_topic_is_refitted():
    rows = make_rows(0, 4000)
    topic = make_rows(7, 1000) + 2.0
    drift = measure(rows, np.vstack([rows, topic]), k=10, shared=4000)
    assert decide(drift).whitening == "refit"


class TestDecide:
    def drift(self, **options):
        rows = make_rows(0, 3000)
        return measure(rows, make_rows(1, 3000), shared=0, **{"k": K, **options})

    def test_an_order_is_followed_and_said(self):
        kept = decide(self.drift(), order="never")
        assert kept.whitening == "keep"
        assert kept.why.startswith("--refit never was given")
        rows = make_rows(0)
        always = decide(measure(rows, rows, k=K), order="always")
        assert (always.whitening, always.threshold) == ("refit", DRIFT_THRESHOLD)

    @pytest.mark.parametrize("kind", [Kind.NONE, Kind.TRUNCATE])
    def test_what_reads_no_data_is_kept(self, kind):
        rows = make_rows(0)
        whitening = Whitening.fit(
            Moments.of(rows), WhiteningConfig(kind=kind, k=None if kind is Kind.NONE else K)
        )
        drift = Drift.measure(whitening, Moments.of(rows), Moments.of(9 * rows + 5))
        assert drift.kl_per_dim > 1
        decision = decide(drift)
        assert decision.whitening == "keep"
        assert "reads no data" in decision.why

    def test_too_few_rows_to_tell_are_kept_and_said_so(self):
        rows = make_rows(0)
        drift = measure(rows, make_rows(1, K + 1), k=K)
        assert drift.noise_kl == np.inf
        assert "6 rows are too few to tell 5 dimensions by" in decide(drift).why
        figures = drift.to_json()
        assert figures["noise_kl"] is None
        json.dumps(figures, allow_nan=False)
