"""Static models: what model2vec and sentence-transformers compute, and what is refused."""

import importlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from model2vec import StaticModel
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from tests.helpers.builds import build_texts
from whiten_index import QueryTransform, load_encoder, open_index
from whiten_index.errors import ConfigError, EncoderError, StorageError

WORDS = [f"w{n}" for n in range(60)]
DIM = 12
TEXTS = ["w1 w2 w2", "w3", "unheard w4 of", "nothing known", "w5 " * 700, "w7 w8 w9 w10"]


def tokenizer() -> Tokenizer:
    made = Tokenizer(WordLevel({word: n for n, word in enumerate(["[UNK]", *WORDS])}, "[UNK]"))
    made.pre_tokenizer = Whitespace()
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    rows = np.random.default_rng(0).standard_normal((len(WORDS) + 1, DIM)).astype(np.float32)
    StaticModel(rows, tokenizer(), {"model_type": "model2vec"}).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def in_the_format_of_sentence_transformers(folder: Path) -> Path:
    table = load_file(folder / "model.safetensors")["embeddings"]
    for file in folder.iterdir():
        if file.name != "tokenizer.json":
            file.unlink()
    save_file({"embedding.weight": table}, folder / "model.safetensors")
    kind = "sentence_transformers.models.StaticEmbedding"
    modules = [{"idx": 0, "name": "0", "path": "", "type": kind}]
    (folder / "modules.json").write_text(json.dumps(modules))
    return folder


@pytest.mark.parametrize("config", [{"model_type": "model2vec"}, {"normalize": False}])
def test_embeddings_are_those_of_model2vec(model: Path, config: dict[str, Any]) -> None:
    (model / "config.json").write_text(json.dumps(config))
    encoder = load_encoder(str(model))
    expected = StaticModel.from_pretrained(model).encode(TEXTS, normalize=False)
    np.testing.assert_allclose(encoder.encode(TEXTS), expected, atol=1e-5)
    np.testing.assert_allclose(encoder.encode_queries(TEXTS), expected, atol=1e-5)
    # The fifth text is cut after 512 tokens.
    assert encoder.encode_window(TEXTS).truncated.tolist() == [n == 4 for n in range(len(TEXTS))]


def test_a_table_that_safetensors_cannot_open_is_not_taken_for_missing(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def closed(path: Path, *_: Any) -> None:
        raise FileNotFoundError(f"No such file or directory: {path}")

    monkeypatch.setattr("whiten_index.encoding.models.safe_open", closed)
    (model / "config.json").write_text('{"model_type": "model2vec"}')
    with pytest.raises(StorageError, match="could not be opened, though it is there; run"):
        load_encoder(str(model))
    (model / "model.safetensors").unlink()
    with pytest.raises(EncoderError, match=r"complete the folder|restore the model folder"):
        load_encoder(str(model))


def test_tables_with_fewer_rows_than_tokens_are_read(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    mapping = np.arange(len(WORDS) + 1, dtype=np.int64) % 20
    weights = np.linspace(1, 2, len(mapping)).astype(np.float32)
    tensors = {"embeddings": tensors["embeddings"][:20], "mapping": mapping, "weights": weights}
    save_file(tensors, model / "model.safetensors")
    expected = StaticModel.from_pretrained(model).encode(TEXTS, normalize=False)
    np.testing.assert_allclose(load_encoder(str(model)).encode(TEXTS), expected, atol=1e-5)


def test_the_format_of_sentence_transformers_is_read(model: Path) -> None:
    table = load_file(model / "model.safetensors")["embeddings"]
    found = load_encoder(str(in_the_format_of_sentence_transformers(model))).encode(TEXTS)
    # It has a row for unknown words, where model2vec leaves them out.
    np.testing.assert_allclose(found[2], (2 * table[0] + table[5]) / 3, atol=1e-5)
    np.testing.assert_allclose(found[3], table[0], atol=1e-5)


@pytest.mark.parametrize("longest", [None, 3])
def test_texts_are_cut_as_by_sentence_transformers(model: Path, longest: int | None) -> None:
    """By its tokenizer alone: a configuration may be left from the model it was made of."""
    cut = Tokenizer.from_file(str(model / "tokenizer.json"))
    if longest is not None:
        cut.enable_truncation(longest)
    in_the_format_of_sentence_transformers(model)
    cut.save(str(model / "tokenizer.json"))
    (model / "config.json").write_text('{"model_type": "bert", "max_length": 4}')
    truth = importlib.import_module("sentence_transformers").SentenceTransformer(str(model))
    found = load_encoder(str(model)).encode(TEXTS)
    np.testing.assert_allclose(found, truth.encode(TEXTS), atol=1e-5)


def test_an_index_is_built_and_searched(model: Path, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    texts = [f"w{n % 60} {' '.join(random.choice(WORDS, 6))}" for n in range(300)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "c.parquet")
    options = {"whiten": "auto", "exponent": 0.25}
    out = build_texts(tmp_path / "index", tmp_path / "c.parquet", model, **options).out
    found = [hits[0].id for hits in open_index(out).search(texts[:20], top_k=1)]
    assert found == [f"c.parquet#0:{row}" for row in range(20)]
    with pytest.raises(ConfigError, match="this export needs a Transformer"):
        QueryTransform.of(out).model_folder()


@pytest.mark.parametrize(
    "option", [{"pooling": "max"}, {"dtype": "bfloat16"}, {"backend": "openvino"}]
)
def test_options_of_transformers_are_refused(model: Path, option: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="is a static model, which adds rows of a table"):
        load_encoder(str(model), **option)


@pytest.mark.parametrize(
    "tensors",
    [
        {"other": np.zeros((61, DIM), np.float32)},
        {"embeddings": np.zeros(61, np.float32)},
        {"embeddings": np.zeros((60, DIM), np.float32)},
        {"embeddings": np.zeros((5, DIM), np.float32), "mapping": np.full(61, 7)},
    ],
)
def test_a_table_that_does_not_fit_is_refused(model: Path, tensors: dict[str, Any]) -> None:
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(EncoderError, match="model"):
        load_encoder(str(model)).encode(TEXTS)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors"])
def test_a_pipe_in_the_folder_is_refused(model: Path, name: str) -> None:
    (model / name).unlink()
    os.mkfifo(model / name)
    # Opening it to write as well keeps a reader from waiting for ever.
    writer = os.open(model / name, os.O_RDWR)
    with pytest.raises(EncoderError, match="is a pipe, a socket or a device"):
        load_encoder(str(model))
    os.close(writer)


def test_tokens_with_huge_numbers_take_no_memory(model: Path) -> None:
    content = json.loads((model / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    content["model"]["vocab"] = {word: 2**27 + n for word, n in vocabulary.items()}
    (model / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(EncoderError, match="number that is not below 61"):
        load_encoder(str(model))
