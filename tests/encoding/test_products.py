"""Products of a model's linear layers on a CPU: torch's own, or oneDNN's."""

import json
import shutil

import numpy as np
import pytest

from tests.helpers.bad_input import run
from tests.helpers.tiny_models import FAMILIES, texts
from whiten_index.encoding import products
from whiten_index.encoding.encoder import Encoder


def load(folder, **options) -> Encoder:
    return Encoder.load(str(folder), device="cpu", threads=1, **options)


@pytest.fixture
def eager(monkeypatch):
    """Take oneDNN as on a processor where it is faster."""
    monkeypatch.setattr(products, "_is_amd_with_avx512", lambda: True)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_onednn_gives_what_torch_gives(family, tmp_path, monkeypatch, eager):
    folder, some = FAMILIES[family](tmp_path / family), texts(20)
    fast = load(folder)
    assert fast.runtime["products"] == "oneDNN float32"
    found = fast.encode(some)
    if fast.runtime["inputs"] == "packed":
        alone = np.concatenate([fast.encode([text]) for text in some])
        np.testing.assert_array_equal(found, alone)
    # States that differ by more than rounding leave the model as it was.
    monkeypatch.setitem(products._TRIAL_ERRORS, products.torch.float32, -1.0)
    monkeypatch.setattr(products, "_LAYERS", frozenset())
    plain = load(folder)
    assert plain.runtime["products"] == "torch"
    np.testing.assert_allclose(found, plain.encode(some), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_on_a_cpu_computes_in_float32_but_for_products(dtype, tmp_path, eager):
    folder, some = FAMILIES["bert"](tmp_path / "bert"), texts(20)
    half, whole = load(folder, dtype=dtype), load(folder)
    assert half.runtime["inputs"] == "packed"
    # Only some processors have products in bfloat16.
    names = {"oneDNN bfloat16", "oneDNN float32"} if dtype == "bfloat16" else {"oneDNN float32"}
    assert half.runtime["products"] in names
    found, expected = half.encode(some), whole.encode(some)
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    assert ((found * expected).sum(axis=1) / lengths).min() >= 0.999


def test_a_build_notes_another_similarity_and_a_faster_precision(
    tiny_model, write_parquet, tmp_path, monkeypatch
):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    settings = {"similarity_fn_name": "dot"}
    (model / "config_sentence_transformers.json").write_text(json.dumps(settings))
    monkeypatch.setattr("whiten_index.encoding.encoder.has_amx", lambda: True)
    corpus = write_parquet(tmp_path / "c.parquet", {"text": texts(60)})
    given = ("--text-column", "text", "--model", model, "--device", "cpu", "--out", tmp_path / "i")
    status, _, noted = run("build", corpus, *given, "--k", 4)
    assert status == 0, noted
    assert "trained for the similarity dot, and the index is searched by cosine" in noted
    assert "--dtype bfloat16 encodes 2 to 3 times as fast" in noted
