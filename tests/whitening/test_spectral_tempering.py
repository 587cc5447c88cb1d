"""Spectral Tempering: its exponents by the formula, and that every way to a transform takes it."""

import json

import numpy as np
import pytest

from tests.helpers.bad_input import run
from tests.helpers.builds import build, write_rows
from tests.helpers.updates import Place
from whiten_index import Whitening, WhiteningConfig
from whiten_index.errors import ConfigError
from whiten_index.measure.sweep_config import SweepConfig
from whiten_index.measure.sweep_run import run_sweep
from whiten_index.whitening.whitening_config import Kind

NAME = "spectral-tempering"
PLACES = np.arange(1.0, 61)
# The knees of SNR are those of the package kneed 0.9.0 with S = 0.5, counted from 1.
SPECTRA = {
    "power law": (PLACES**-1.2, 7),
    "exponential": (np.exp(-PLACES / 8) + 0.01, 17),
    "two shoulders": (
        np.r_[np.linspace(50, 44, 4), np.linspace(20, 18, 26), np.linspace(6, 1, 30)], 5
    ),
    "random": (np.sort(np.random.default_rng(0).exponential(size=60) ** 2)[::-1], 3),
    "line": (100 - PLACES, 57),
}  # fmt: skip
# Kneedle takes no end of the curve for a knee.
SHORT = {"concave": (np.array([9, 8.5, 7.5, 6, 4, 1]), None), "flat": (np.ones(6), None)}


def rows_of(eigenvalues, *, dim=None, n=300, seed=0):
    """Return rows (n, dim) whose covariance has exactly these eigenvalues."""
    rng = np.random.default_rng(seed)
    drawn = rng.normal(size=(n, len(eigenvalues)))
    basis, _ = np.linalg.qr(drawn - drawn.mean(axis=0))
    rows = basis * np.sqrt(eigenvalues * (n - 1))
    rotation, _ = np.linalg.qr(rng.normal(size=(dim or len(eigenvalues),) * 2))
    return rows @ rotation[: len(eigenvalues)] + rng.normal(size=len(rotation))


def by_formula(eigenvalues, k, knee):
    noise = eigenvalues[int(0.9 * len(eigenvalues) + 1e-9) :].mean()
    snr = [max(0, value / noise - 1) for value in eigenvalues]
    at_knee = snr[(k // 2 if knee is None else knee) - 1]
    return min(1, snr[k - 1] / at_knee) if at_knee > 1e-6 else 0


@pytest.mark.parametrize("name", [*SPECTRA, *SHORT])
@pytest.mark.parametrize("dim", [None, 70])
def test_the_exponent_is_that_of_the_formula(name, dim):
    eigenvalues, knee = (SPECTRA | SHORT)[name]
    rows, rank = rows_of(eigenvalues, dim=dim), len(eigenvalues)
    for k in (2, 4, *(k for k in (8, 20, 40) if k < rank), rank):
        fitted = Whitening.fit(rows, WhiteningConfig(k=k, exponent=NAME))
        if name != "flat":
            assert fitted.exponent == pytest.approx(by_formula(eigenvalues, k, knee), abs=1e-6)
        assert fitted.center
        plain = Whitening.fit(rows, WhiteningConfig(k=k, exponent=fitted.exponent))
        np.testing.assert_array_equal(fitted.matrix(), plain.matrix())
        # Of directions dropped first, k counts all up to the last.
        if k > 2:
            less = Whitening.fit(rows, WhiteningConfig(k=k - 2, remove_top=2, exponent=NAME))
            assert less.exponent == fitted.exponent


def test_kinds_without_a_width_or_a_scale_refuse_it():
    for kind in set(Kind) - {Kind.WHITENING}:
        with pytest.raises(ConfigError, match="--exponent cannot apply; leave it out"):
            WhiteningConfig(kind=kind, exponent=NAME)


@pytest.fixture
def corpus(tmp_path):
    return write_rows(tmp_path / "c.parquet", rows_of(SPECTRA["power law"][0]).astype(np.float32))


@pytest.mark.parametrize("whiten", ["whitening", "auto"])
def test_a_build_records_the_name_and_the_number(tmp_path, corpus, whiten):
    options = {"whiten": whiten, "exponent": NAME, "k": 12, "store_dtype": "float32"}
    made = build(tmp_path / "out", corpus, **options).manifest
    assert made["config"]["exponent"] == NAME
    expected = by_formula(SPECTRA["power law"][0], 12, 7)
    assert made["whitening"]["exponent"] == pytest.approx(expected, abs=1e-4)
    assert made["whitening"]["center"]
    if whiten == "auto":
        assert made["choice"]["chosen"]["exponent"] == made["whitening"]["exponent"]
    kept = build(tmp_path / "kept", corpus, **options, center=False).manifest["whitening"]
    assert not kept["center"]


def test_the_command_line_and_job_files_take_it(tmp_path, corpus):
    job = tmp_path / "job.toml"
    job.write_text(f'embedding-column = "embedding"\nid-column = "id"\nexponent = "{NAME}"\n')
    out = tmp_path / "out"
    command = ("build", corpus, "--out", out, "--config", job, "--json")
    for more in ((), ("--k", 12, "--exponent", NAME), ("--whiten", "whitening")):
        status, stdout, stderr = run(*command, *more)
        assert status == 0, stderr
        found = json.loads(stdout)
        k, exponent = found["whitening"]["k"], found["whitening"]["exponent"]
        expected = by_formula(SPECTRA["power law"][0], k, 7)
        assert exponent == pytest.approx(expected, abs=0.01)
    for wrong, message in (
        ("soft", "--exponent 'soft' is unknown; use a number or spectral-tempering"),
        ("nan", "--exponent takes a finite number"),
    ):
        status, _, stderr = run(*command, "--exponent", wrong)
        assert (status, message in stderr) == (2, True), stderr


def test_a_sweep_measures_it_at_every_width(tmp_path, corpus):
    given = {"corpus": [corpus], "embedding_column": "embedding", "id_column": "id", "sample": 30}
    grid = {"widths": "4,12", "codecs": "fp32", "indexes": "flat", "baselines": False}
    transforms = f"whitening:{NAME},whitening:0.5"
    run_sweep(SweepConfig(**given, **grid, transforms=transforms, out=str(tmp_path / "s")))
    lines = map(json.loads, (tmp_path / "s" / "results.jsonl").read_text().splitlines())
    found = {line["key"]: line["exponent"] for line in lines if line["type"] == "point"}
    for k in (4, 12):
        assert found[f"ours/whitening:0.5/k{k}/fp32/flat"] == 0.5
        expected = by_formula(SPECTRA["power law"][0], k, 7)
        # Without the rows held out, the spectrum is a little another.
        assert found[f"ours/whitening:{NAME}/k{k}/fp32/flat"] == pytest.approx(expected, abs=0.1)


def test_a_refit_keeps_the_number_until_it_may_choose_again(tmp_path):
    place = Place.new(tmp_path, whiten="whitening", exponent=NAME, k=6)
    first = place.build().manifest["whitening"]
    place.change()
    kept = place.update(refit="always").manifest
    assert kept["whitening"]["exponent"] == first["exponent"]
    assert kept["config"]["exponent"] == NAME
    again = place.update(choose_again=True).manifest["whitening"]["exponent"]
    assert again != first["exponent"]
