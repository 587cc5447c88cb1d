"""int8 and torch.compile: opt-ins that say what they cost or gain, and stay off where they fail."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from whiten_index import BuildConfig, Encoder, build_index, encode_corpus, open_index
from whiten_index.encoding import agreement, compiling
from whiten_index.encoding import encoder as encoder_module
from whiten_index.encoding.window import Batches
from whiten_index.errors import EncoderError


@pytest.fixture(scope="module")
def texts(tiny_words) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(tiny_words, size=n)) for n in rng.integers(2, 20, 120)]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory, texts, write_parquet) -> Path:
    table = {"id": list(range(120)), "text": texts}
    return write_parquet(tmp_path_factory.mktemp("corpus") / "c.parquet", table)


def config(corpus: Path, model: Path, out: Path, **options) -> BuildConfig:
    return BuildConfig(
        corpus=(str(corpus),), text_columns=("text",), model=str(model), k=8, out=str(out),
        **options,
    )  # fmt: skip


# --------------------------------------------------------------------------- agreement


def test_agreement_counts_what_both_have_in_common():
    rng = np.random.default_rng(0)
    exact = rng.normal(size=(50, 8))
    same = agreement(3 * exact, exact)
    assert (same.rows, same.neighbours, same.overlap) == (50, 10, 1.0)
    assert same.cosine_min == pytest.approx(1)
    turned = exact.copy()
    turned[7] = -exact[7]
    assert agreement(turned, exact).cosine_min == pytest.approx(-1)
    strangers = agreement(rng.normal(size=(50, 8)), exact)
    assert 0.05 < strangers.overlap < 0.4
    assert abs(strangers.cosine_mean) < 0.2


def test_agreement_agrees_with_a_plain_loop():
    rng = np.random.default_rng(1)
    exact = rng.normal(size=(9, 4))
    ours = exact + 0.5 * rng.normal(size=(9, 4))

    def nearest(x, i):
        cos = {j: x[i] @ x[j] / np.linalg.norm(x[j]) for j in range(9) if j != i}
        return set(sorted(cos, key=cos.get, reverse=True)[:8][:8])

    found = agreement(ours, exact)
    assert found.neighbours == 8
    shared = [len(nearest(ours, i) & nearest(exact, i)) / 8 for i in range(9)]
    assert found.overlap == pytest.approx(np.mean(shared))


# --------------------------------------------------------------------------- int8


def test_int8_is_close_and_not_the_same(tiny_model, texts):
    exact = Encoder.load(str(tiny_model), device="cpu").encode(texts)
    found = Encoder.load(str(tiny_model), dtype="int8").encode(texts)
    agreed = agreement(found, exact)
    assert 0.95 < agreed.cosine_mean < 1 - 1e-6
    assert found.dtype == np.float32


def test_an_int8_build_says_how_well_it_agrees_and_is_an_encoder_of_its_own(
    corpus, tiny_model, tmp_path
):
    report = build_index(config(corpus, tiny_model, tmp_path / "a", dtype="int8"))
    exact = build_index(config(corpus, tiny_model, tmp_path / "b", device="cpu"))
    assert report.encoded.store.fingerprint != exact.encoded.store.fingerprint
    told = report.to_json()["agreement"]
    assert told["rows"] == 120
    assert 0.9 < told["cosine_min"] <= told["cosine_mean"] < 1
    assert 0.3 < told["overlap"] <= 1
    assert report.manifest["agreement"] == told
    assert exact.to_json()["agreement"] is None
    again = build_index(config(corpus, tiny_model, tmp_path / "a", dtype="int8", whiten="pca"))
    assert again.encoded.counts.encoded == 0
    assert again.manifest["agreement"] == told
    assert len(open_index(tmp_path / "a").search(["the old king"])[0]) == 10


def test_int8_stays_on_the_cpu_where_auto_would_take_gpus(corpus, tiny_model, tmp_path):
    asked = config(corpus, tiny_model, tmp_path, dtype="int8").encoder_config()
    assert (asked.device, asked.dtype) == ("cpu", "int8")


def test_a_torch_without_int8_is_said(tiny_model, monkeypatch):
    monkeypatch.delattr(torch.ao.quantization, "quantize_dynamic")
    with pytest.raises(EncoderError, match=r"has no int8 for CPUs .* use --dtype float32"):
        Encoder.load(str(tiny_model), dtype="int8")


# --------------------------------------------------------------------------- torch.compile


@pytest.fixture
def pretend(monkeypatch):
    """Let compiling take no time, and batches the time given: first plain, then compiled."""

    def set_up(plain: float, compiled: float, error: Exception | None = None) -> list[str]:
        log: list[str] = []
        timings = iter([plain, compiled])

        def compile_(model, **options):
            log.append("compiled")
            return model

        def try_one(self, *, tokens):
            if error is not None and log:
                raise error
            return 1.0

        monkeypatch.setattr(encoder_module, "_SECONDS_BEFORE_COMPILING", 0)
        monkeypatch.setattr(torch, "compile", compile_)
        monkeypatch.setattr(compiling, "_seconds", lambda *_: next(timings))
        monkeypatch.setattr(Batches, "try_one", try_one)
        return log

    return set_up


@pytest.mark.parametrize(
    ("plain", "compiled", "told"),
    [(1.0, 0.5, "on: 2.00 times as fast"), (1.0, 0.99, "off: 1.01 times as fast")],
)
def test_compiling_stays_where_it_is_faster(tiny_model, texts, pretend, plain, compiled, told):
    log = pretend(plain, compiled)
    encoder = Encoder.load(str(tiny_model), device="cpu", compile=True)
    expected = Encoder.load(str(tiny_model), device="cpu").encode(texts)
    encoder.encode(texts)
    np.testing.assert_allclose(encoder.encode(texts), expected, atol=1e-5)
    assert log == ["compiled"]
    assert encoder.compiled.startswith(told)
    encoder.encode(texts)
    assert log == ["compiled"]


def test_compiling_that_fails_is_told_and_undone(tiny_model, texts, pretend):
    pretend(1.0, 0.5, RuntimeError("no C++ compiler\nmore"))
    encoder = Encoder.load(str(tiny_model), device="cpu", compile=True)
    assert [encoder.encode(texts).shape for _ in range(2)] == [(120, 32)] * 2
    assert encoder.compiled == "off: the trial failed here (no C++ compiler)"


def test_a_short_job_is_not_compiled(tiny_model, texts, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    encoder = Encoder.load(str(tiny_model), device="cpu", compile=True)
    for _ in range(3):
        encoder.encode(texts)
    assert encoder.compiled == "off: not tried in the first 60 s of encoding"


def test_layers_inside_are_not_compiled(tiny_model, texts, pretend):
    log = pretend(1.0, 0.5)
    encoder = Encoder.load(str(tiny_model), device="cpu", compile=True, layers=(1,))
    for _ in range(2):
        encoder.encode(texts)
    assert log == []
    assert encoder.compiled.startswith("off: layers other than the last")


def test_a_build_tells_what_came_of_compiling(corpus, tiny_model, tmp_path, pretend):
    pretend(1.0, 2.0)
    options = {"device": "cpu", "compile": True, "shard_rows": 60}
    report = encode_corpus(config(corpus, tiny_model, tmp_path / "out", **options))
    assert json.loads(json.dumps(report.to_json()))["compiled"].startswith("off: 0.50 times")


@pytest.mark.slow
def test_what_torch_really_compiles_gives_the_same(tiny_model, texts, monkeypatch):
    monkeypatch.setattr(compiling, "_WORTH_IT", 0.0)
    monkeypatch.setattr(encoder_module, "_SECONDS_BEFORE_COMPILING", 0)
    encoder = Encoder.load(str(tiny_model), device="cpu", compile=True)
    expected = Encoder.load(str(tiny_model), device="cpu").encode(texts)
    encoder.encode(texts)
    np.testing.assert_allclose(encoder.encode(texts), expected, atol=1e-4)
    assert encoder.compiled.startswith("on: ")
