"""Models and their folders: what is found, resolved, fingerprinted and refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from whiten_index.encoding.encoder import Encoder
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.spec import EncoderSpec, resolve_encoder
from whiten_index.errors import ConfigError, EncoderError


def load(model: Path | str, **options) -> Encoder:
    # A tiny model is quickest on one thread, and does not disturb what runs beside the tests.
    return Encoder.load(str(model), **{"device": "cpu", "threads": 1, **options})


def resolve(model: Path | str, **options) -> EncoderSpec:
    return resolve_encoder(EncoderConfig(model=str(model), **options))[0]


@pytest.fixture(scope="module")
def encoder(tiny_model) -> Encoder:
    return load(tiny_model)


@pytest.fixture
def copy_of(tiny_model, tmp_path) -> Callable[..., Path]:
    """Return ``copy(name, files={...}) -> folder``: the tiny model, JSON files merged or added."""

    def copy(name: str = "copy", files: dict[str, object] | None = None) -> Path:
        folder = tmp_path / name
        shutil.copytree(tiny_model, folder)
        for path, value in (files or {}).items():
            write_json(folder / path, value)
        return folder

    return copy


def write_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and isinstance(value, dict):
        value = {**json.loads(path.read_text()), **value}
    path.write_text(json.dumps(value))


def sentence_files(pooling: dict | None = None, *, more: tuple[str, ...] = (), **settings) -> dict:
    """Return the files that make a transformer's folder one of sentence-transformers."""
    kinds = ["Transformer", "Pooling", *more]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "",
         "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]  # fmt: skip
    return {
        "modules.json": modules,
        "1_Pooling/config.json": {
            "word_embedding_dimension": 32,
            **(pooling or {"pooling_mode_mean_tokens": True}),
        },
        "sentence_bert_config.json": {"max_seq_length": 20, **settings},
    }


def edit_weights(folder: Path, edit: Callable[[dict], None]) -> None:
    file = folder / "model.safetensors"
    weights = load_file(file)
    edit(weights)
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_truncation_baked_into_a_tokenizer_change_nothing(
    copy_of, encoder, texts, side
):
    """As in all-MiniLM-L6-v2, whose tokenizer.json pads and cuts to 128."""
    folder = copy_of(
        files={
            "tokenizer.json": {
                "padding": {
                    "strategy": {"Fixed": 28}, "direction": side.title(), "pad_id": 0,
                    "pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "[PAD]",
                },
                "truncation": {
                    "max_length": 6, "strategy": "LongestFirst", "stride": 2,
                    "direction": "Right",
                },
            }
        }
    )  # fmt: skip
    baked = load(folder)
    found, expected = baked.encode_window(texts), encoder.encode_window(texts)
    np.testing.assert_allclose(found.embeddings, expected.embeddings, atol=5e-6)
    assert np.array_equal(found.truncated, expected.truncated)
    assert found.tokens == expected.tokens


def test_a_model_must_be_named_without_the_embedded_one(copy_of, monkeypatch):
    monkeypatch.setattr("whiten_index.encoding.spec.embedded_path", lambda: None)
    with pytest.raises(EncoderError, match="no model was named and the default one is not"):
        resolve_encoder(EncoderConfig())
    assert resolve(copy_of()).dim == 32


def test_a_prompt_of_bytes_that_are_no_text_is_refused():
    with pytest.raises(ConfigError, match="--query-prompt is no UTF-8"):
        EncoderConfig(query_prompt="query \udcff")


def test_a_model_that_gives_nan_is_an_error(copy_of):
    folder = copy_of()
    edit_weights(folder, lambda w: w["embeddings.LayerNorm.bias"].fill_(torch.nan))
    with pytest.raises(EncoderError, match=r"gives NaN or infinity for 'the cat'; use another"):
        load(folder).encode(["the cat"])


@pytest.mark.parametrize(
    "pooling",
    [
        {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"pooling_mode": ["mean", "max"]},
        {"pooling_mode": "median"},
        {"pooling_mode_mean_tokens": False},
    ],
)
def test_a_pooling_that_is_not_ours_is_refused_unless_another_is_chosen(copy_of, pooling):
    folder = copy_of(files=sentence_files(pooling))
    with pytest.raises(EncoderError, match=r"pools by .* not supported; choose --pooling mean"):
        resolve(folder)
    assert resolve(folder, pooling="mean").pooling == "mean"


@pytest.mark.parametrize(
    ("file", "text"),
    [("config.json", "{"), ("config.json", "[]"), ("modules.json", "[]"), ("modules.json", "[{}]"),
     ("1_Pooling/config.json", "{}"), ("1_Pooling/config.json", '{"pooling_mode": 7}'),
     ("sentence_bert_config.json", '{"max_seq_length": "x"}'),
     ("sentence_bert_config.json", '{"max_seq_length": 2}'),
     ("tokenizer_config.json", '{"model_max_length": "x"}'),
     ("tokenizer_config.json", '{"auto_map": [1]}'),
     ("tokenizer_config.json", '{"tokenizer_class": "RagTokenizer"}'),
     ("config_sentence_transformers.json", '{"prompts": ["a"]}'),
     ("config_sentence_transformers.json", '{"prompts": {"query": {"a": 1}}}'),
     ("config_sentence_transformers.json", '{"prompts": {"query": "\\ud800"}}'),
     ("config_sentence_transformers.json", '{"prompts": {}, "default_prompt_name": ["x"]}'),
     ("modules.json", "{"),
     ("modules.json", '[{"type": "sentence_transformers.models.Transformer", "path": "../copy"}]'),
     ("model.safetensors.index.json", '{"weight_map": {"a": "../copy/model.safetensors"}}'),
     ("1_Pooling/config.json", "]"), ("tokenizer_config.json", "x"), ("tokenizer.json", "{"),
     ("model.safetensors", "cut")],
)  # fmt: skip
def test_a_damaged_file_of_a_model_is_an_encoder_error(copy_of, file, text):
    folder = copy_of(files=sentence_files())
    (folder / file).write_text(text)
    with pytest.raises(EncoderError):
        load(folder)


@pytest.mark.parametrize("damage", ["no unknown token", "a frame of unknown names"])
def test_a_tokenizer_that_fails_on_a_text_is_an_encoder_error(copy_of, damage):
    folder = copy_of()
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    if damage == "no unknown token":
        content["model"]["vocab"] = {"a": 1}
    else:
        # The tokenizers library panics.
        frame = [
            {"SpecialToken": {"id": "[X]", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ]
        content["post_processor"] = {
            "type": "TemplateProcessing", "single": frame, "pair": frame, "special_tokens": {},
        }  # fmt: skip
    path.write_text(json.dumps(content))
    with pytest.raises(EncoderError, match="tokenizer cannot take a text"):
        load(folder).encode(["a cat"])
