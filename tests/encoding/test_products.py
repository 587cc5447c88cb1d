"""Products of a model's linear layers on a CPU: torch's own, or oneDNN's."""

import json
import shutil

import numpy as np
import pytest

from tests.helpers.bad_input import run
from tests.helpers.tiny_models import FAMILIES, load, texts
from whiten_index.encoding import encoder, products


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
    alone = np.concatenate([fast.encode([text]) for text in some])
    np.testing.assert_array_equal(found, alone)
    asked = fast.encode_queries(some)
    np.testing.assert_allclose(asked, found, atol=1e-5, rtol=1e-4)
    # States that differ by more than rounding leave the model as it was.
    monkeypatch.setitem(products.TRIAL_ERRORS, products.torch.float32, -1.0)
    monkeypatch.setattr(products, "_LAYERS", frozenset())
    plain = load(folder)
    assert plain.runtime["products"] == "torch"
    np.testing.assert_allclose(found, plain.encode(some), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("dtype", "least"), [("bfloat16", 0.999), ("float16", 1 - 1e-6)])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_narrow_types_on_a_cpu_compute_in_float32_but_for_products(
    family, dtype, least, tmp_path, eager
):
    folder, some = FAMILIES[family](tmp_path / family), texts(20)
    narrow, whole = load(folder, dtype=dtype), load(folder)
    assert narrow.runtime["inputs"] == "of one length"
    # Only some processors have products in bfloat16.
    known = {"oneDNN float32"} if dtype == "float16" else {"oneDNN float32", f"oneDNN {dtype}"}
    assert narrow.runtime["products"] in known
    found, expected = narrow.encode(some), whole.encode(some)
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    assert ((found * expected).sum(axis=1) / lengths).min() >= least


def test_a_build_notes_a_type_that_is_not_used(tiny_model, write_parquet, tmp_path, monkeypatch):
    monkeypatch.setattr(products, "has_bfloat16", lambda: False)
    monkeypatch.setattr(encoder, "has_bfloat16", lambda: False)
    corpus = write_parquet(tmp_path / "c.parquet", {"text": texts(60)})
    given = ("--text-column", "text", "--model", tiny_model, "--device", "cpu", "--k", 4)
    status, _, noted = run("build", corpus, *given, "--out", tmp_path / "i", "--dtype", "bfloat16")
    assert status == 0, noted
    assert "encoded in float32 on this machine, not in bfloat16" in noted


def test_a_build_notes_another_similarity_and_a_faster_precision(
    tiny_model, write_parquet, tmp_path, monkeypatch
):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    settings = {"similarity_fn_name": "euclidean"}
    (model / "config_sentence_transformers.json").write_text(json.dumps(settings))
    monkeypatch.setattr("whiten_index.encoding.encoder.has_bfloat16", lambda: True)
    corpus = write_parquet(tmp_path / "c.parquet", {"text": texts(60)})
    given = ("--text-column", "text", "--model", model, "--device", "cpu", "--out", tmp_path / "i")
    status, _, noted = run("build", corpus, *given, "--k", 4)
    assert status == 0, noted
    assert "trained for the similarity euclidean, and an index is searched by cosine" in noted
    assert "--dtype bfloat16 encodes 1.5 to 3 times as fast" in noted
