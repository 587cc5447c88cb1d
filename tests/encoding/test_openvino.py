"""Embeddings by OpenVINO: those of torch but for rounding, for whoever asks for them."""

import json
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from tests.helpers.bad_input import OPTIONS, run, succeed
from tests.helpers.tiny_models import FAMILIES, bert, load, texts
from whiten_index.encoding import encoder, openvino
from whiten_index.errors import ConfigError, EncoderError, StorageError
from whiten_index.search.search_index import open_index

ODD = ["", "x", "the cat " * 300, "東京"]


def assert_close(found, expected):
    np.testing.assert_allclose(found, expected, atol=1e-5, rtol=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A BERT. Do not write to it."""
    return bert(tmp_path_factory.mktemp("model") / "bert")


# The graphs of roberta and xlm-roberta are BERT's, which threads share below.
@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"bert", "roberta", "xlm-roberta"}))
def test_openvino_gives_what_torch_gives(family, tmp_path):
    folder, some = FAMILIES[family](tmp_path / family), [*texts(), *ODD]
    ours = load(folder, backend="openvino")
    assert ours.runtime["products"] == "OpenVINO float32"
    assert ours.runtime["openvino"]
    plain = load(folder)
    assert "OpenVINO" not in plain.runtime["products"]
    assert_close(ours.encode(some), plain.encode(some))


def test_layers_and_a_prompt_are_those_of_torch(folder):
    options, some = {"layers": (0, 1), "document_prompt": "passage: "}, [*texts(), *ODD]
    ours, plain = (load(folder, backend=each, **options) for each in ("openvino", "torch"))
    assert_close(ours.encode(some), plain.encode(some))


def test_minilm_in_bfloat16():
    some = [f"{text} {i}" for i, text in enumerate(texts(40))] + ODD
    plain = load("all-MiniLM-L6-v2").encode(some)
    narrow = load("all-MiniLM-L6-v2", backend="openvino", dtype="bfloat16")
    # Only some processors have products in bfloat16.
    assert narrow.runtime["products"] in ("OpenVINO bfloat16", "OpenVINO float32")
    found = narrow.encode(some)
    if narrow.runtime["products"] == "OpenVINO float32":
        assert_close(found, plain)
    lengths = np.linalg.norm(found, axis=1) * np.linalg.norm(plain, axis=1)
    assert ((found * plain).sum(axis=1) / lengths).min() >= 0.999


def test_threads_share_an_encoder(folder):
    some = [*texts(40), *ODD]
    ours, plain = (load(folder, backend=each, threads=2) for each in ("openvino", "torch"))
    with ThreadPoolExecutor(4) as pool:
        found = np.concatenate(list(pool.map(lambda text: ours.encode_queries([text]), some)))
    assert_close(found, plain.encode_queries(some))


def test_an_index_of_torch_is_searched_and_updated_with_openvino(
    tiny_model, write_parquet, tmp_path
):
    some = list(dict.fromkeys(texts(80)))
    corpus = write_parquet(tmp_path / "c.parquet", {"id": list(map(str, range(len(some)))),
                                                    "text": some})  # fmt: skip
    given = ("--text-column", "text", "--id-column", "id", "--model", tiny_model, "--k", 8)
    succeed("build", corpus, *given, "--device", "cpu", "--out", tmp_path / "i")

    def hits(backend):
        opened = open_index(tmp_path / "i", backend=backend, device="cpu")
        found = opened.search(["cold river", "x"])
        assert opened.encoder.runtime["products"].startswith("OpenVINO") == (backend == "openvino")
        return [[(hit.id, pytest.approx(hit.score, abs=1e-5)) for hit in each] for each in found]

    assert hits("torch") == hits("openvino")
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


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("std::bad_alloc")])
def test_memory_that_runs_out_is_no_fault_of_the_model(tiny_model, monkeypatch, error):
    monkeypatch.setattr("openvino.Core", Mock(side_effect=error))
    with pytest.raises(StorageError, match="the compilation by OpenVINO: out of memory"):
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
