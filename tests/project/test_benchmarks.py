"""What the benchmarks count, and compare with, is what they say."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import moments, results_file, small_codes_page
from benchmarks.encoding_inputs import model_flops
from benchmarks.spectral_tempering import spectral_tempering


def test_operations_are_those_that_torch_counts() -> None:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    counter = FlopCounterMode(display=False)
    with torch.inference_mode(), counter:
        for length in (5, 17):
            model(input_ids=torch.ones((1, length), dtype=torch.long))
    assert model_flops(config.to_dict(), np.array([5, 17])) == counter.get_total_flops()


def test_errors_of_moments_are_measured_and_small() -> None:
    pytest.importorskip("sklearn")
    found = {row["contender"]: row["frobenius_error"] for row in moments.accuracy(2000, 12)}
    assert found[moments.OURS] < 1e-12


def test_results_of_a_run_that_is_not_named_or_of_several_runs_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    monkeypatch.setattr(results_file, "_commit", lambda: "5c1f00d")
    path = results_file.write("some", [{"figure": 1}])
    results_file.require_sources()
    assert results_file.read("some") == [{"figure": 1}]
    whole = path.read_text()
    path.write_text(whole.replace("5c1f00d", "5c1f00d-dirty"))
    with pytest.raises(SystemExit, match=r"some\.jsonl was measured with changed files"):
        results_file.require_sources()
    path.write_text(whole + whole)
    with pytest.raises(SystemExit, match=r"some\.jsonl holds rows of several runs"):
        results_file.require_sources()
    path.write_text('{"figure": 1}\n')
    with pytest.raises(
        SystemExit, match=r"some\.jsonl does not say its benchmark, commit, command"
    ):
        results_file.require_sources()


def test_the_charts_of_small_codes_are_those_of_the_results() -> None:
    page = small_codes_page.page()
    rows = results_file.read("small_codes")
    assert len(re.findall("<tr id=", page)) == len(rows) > 20
    for row in rows:
        assert f"{row['mean']:.2f}" in page, row["setting"]


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


def by_formula(eigenvalues, k, knee):
    noise = eigenvalues[int(0.9 * len(eigenvalues) + 1e-9) :].mean()
    snr = [max(0, value / noise - 1) for value in eigenvalues]
    at_knee = snr[(k // 2 if knee is None else knee) - 1]
    return min(1, snr[k - 1] / at_knee) if at_knee > 1e-6 else 0


@pytest.mark.parametrize("name", [*SPECTRA, *SHORT])
@pytest.mark.parametrize("zeros", [0, 10])
def test_the_exponent_is_that_of_the_formula(name, zeros):
    eigenvalues, knee = (SPECTRA | SHORT)[name]
    rank = len(eigenvalues)
    for k in (2, 4, *(k for k in (8, 20, 40) if k < rank), rank):
        found = spectral_tempering(np.r_[eigenvalues, np.zeros(zeros)], k)
        assert found == pytest.approx(by_formula(eigenvalues, k, knee), abs=1e-6)
