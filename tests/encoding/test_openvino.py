"""Embeddings by OpenVINO: those of torch but for rounding, for whoever asks for them."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tests.helpers.bad_input import OPTIONS, run, succeed
from tests.helpers.tiny_models import FAMILIES, bert, load, texts
from whiten_index.encoding import encoder, openvino
from whiten_index.errors import ConfigError, EncoderError
from whiten_index.search.search_index import open_index

ODD = ["", "x", "the cat " * 300, "東京"]


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-4)


# The graphs of roberta and xlm-roberta are BERT's.
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"roberta", "xlm-roberta"}))
def test_openvino_gives_what_torch_gives(family, tmp_path):
    folder, some = FAMILIES[family](tmp_path / family), [*texts(), *ODD]
    ours = load(folder, backend="openvino")
    assert ours.runtime["products"] == "OpenVINO float32"
    assert ours.runtime["openvino"]
    plain = load(folder)
    assert "OpenVINO" not in plain.runtime["products"]
    assert_close(ours.encode(some), plain.encode(some))


@pytest.mark.parametrize(
    "options",
    [
        {"pooling": "first-last-avg"},
        {"layers": (1,), "pooling": "max"},
        {"layers": (0, 2), "pooling": "cls", "document_prompt": "passage: "},
    ],
)
def test_layers_and_poolings_are_those_of_torch(options, tmp_path):
    folder, some = bert(tmp_path / "bert"), [*texts(), *ODD]
    ours, plain = (load(folder, backend=each, **options) for each in ("openvino", "torch"))
    assert_close(ours.encode(some), plain.encode(some))


def test_minilm_in_float32_and_bfloat16():
    some = [f"{text} {i}" for i, text in enumerate(texts(40))] + ODD
    plain = load("all-MiniLM-L6-v2").encode(some)
    ours = load("all-MiniLM-L6-v2", backend="openvino")
    assert_close(ours.encode(some), plain)
    narrow = load("all-MiniLM-L6-v2", backend="openvino", dtype="bfloat16")
    # Only some processors have products in bfloat16.
    assert narrow.runtime["products"] in ("OpenVINO bfloat16", "OpenVINO float32")
    found = narrow.encode(some)
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(plain, axis=1)
    assert ((found * plain).sum(axis=1) / lengths).min() >= 0.999


def test_threads_share_an_encoder(tmp_path):
    ours, some = load(bert(tmp_path / "bert"), backend="openvino", threads=2), texts(40)
    expected = ours.encode_queries(some)
    with ThreadPoolExecutor(4) as pool:
        found = np.concatenate(list(pool.map(lambda text: ours.encode_queries([text]), some)))
    assert_close(found, expected)


def test_an_index_of_torch_is_searched_and_updated_with_openvino(
    tiny_model, write_parquet, tmp_path
):
    some = list(dict.fromkeys(texts(80)))
    corpus = write_parquet(tmp_path / "c.parquet", {"id": list(map(str, range(len(some)))),
                                                    "text": some})  # fmt: skip
    given = ("--text-column", "text", "--id-column", "id", "--model", tiny_model, "--k", 8)
    succeed("build", corpus, *given, "--device", "cpu", "--out", tmp_path / "i")

    def hits(*how):
        asked = ("search", tmp_path / "i", "--json", "--device", "cpu", *how, "cold river", "x")
        return [
            [(hit["id"], pytest.approx(hit["score"], abs=1e-5)) for hit in each["hits"]]
            for each in json.loads(succeed(*asked))["results"]
        ]

    assert hits() == hits("--backend", "openvino")
    opened = open_index(tmp_path / "i", backend="openvino", device="cpu")
    assert opened.encoder.runtime["products"] == "OpenVINO float32"
    write_parquet(tmp_path / "c.parquet", {"id": ["new", *map(str, range(len(some)))],
                                           "text": ["a king sang", *some]})  # fmt: skip
    with_openvino = ("--backend", "openvino", "--device", "cpu")
    succeed("update", tmp_path / "i", *with_openvino)
    runtimes = json.loads(succeed("inspect", tmp_path / "i", "--json"))["runtimes"]
    assert {each["products"].split()[0] for each in runtimes} >= {"OpenVINO"}
    assert len(runtimes) == 2


def test_float16_is_refused_before_the_corpus_is_read(tiny_model, tmp_path):
    given = ("--text-column", "t", "--model", tiny_model, "--out", tmp_path / "i")
    backend = ("--backend", "openvino", "--dtype", "float16")
    status, _, message = run("build", tmp_path / "none", *given, *backend)
    assert status == OPTIONS, message
    assert "computes in float32 or bfloat16, not in float16; use --backend torch" in message


def test_other_devices_are_refused(tiny_model, monkeypatch):
    monkeypatch.setattr(encoder, "_device", lambda name: torch.device("cuda"))
    with pytest.raises(ConfigError, match="is for CPUs, and the device is cuda; add --device cpu"):
        load(tiny_model, backend="openvino")


def test_a_missing_package_is_named_with_its_extra(tiny_model, monkeypatch):
    monkeypatch.setattr("whiten_index.errors.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"--backend openvino needs openvino.*index\[openvino\]'"):
        load(tiny_model, backend="openvino")


def test_a_model_that_openvino_cannot_run_is_refused(tiny_model, monkeypatch):
    monkeypatch.setitem(openvino.TRIAL_ERRORS, torch.float32, -1.0)
    with pytest.raises(EncoderError, match=r"other states than torch's.*; use --backend torch"):
        load(tiny_model, backend="openvino")

    def branch(self, ids, *_):
        return [ids.float() if ids.sum() else -ids.float()]

    monkeypatch.setattr("whiten_index.encoding.transformer.LayerStates.forward", branch)
    with pytest.raises(EncoderError, match=r"cannot run this model .*; use --backend torch"):
        load(tiny_model, backend="openvino")
