"""Models and their folders: what is found, resolved, fingerprinted and refused."""

import errno
import hashlib
import json
import os
import resource
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import safetensors
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.helpers.code_models import edit_json
from tests.helpers.tiny_models import add_modules, bert, copied, dense, load, resolve
from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.load_encoder import resolve_encoder
from whiten_index.encoding.model_files import loading_model
from whiten_index.encoding.spec import EncoderSpec
from whiten_index.encoding.tokenization import load_tokenizer
from whiten_index.errors import ConfigError, EncoderError, StorageError


@pytest.fixture
def folder(tiny_model, tmp_path) -> Path:
    """A copy of the tiny model, to be written to."""
    return copied(tiny_model, tmp_path / "copy")


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_and_truncation_baked_into_a_tokenizer_change_nothing(
    folder, tiny_model, texts, side
):
    """As in all-MiniLM-L6-v2, whose tokenizer.json pads and cuts to 128."""
    edit_json(
        folder / "tokenizer.json",
        padding={
            "strategy": {"Fixed": 28}, "direction": side.title(), "pad_id": 0,
            "pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "[PAD]",
        },
        truncation={
            "max_length": 6, "strategy": "LongestFirst", "stride": 2, "direction": "Right",
        },
    )  # fmt: skip
    found, expected = (load(model).encode_window(texts) for model in (folder, tiny_model))
    np.testing.assert_allclose(found.embeddings, expected.embeddings, atol=5e-6)
    assert np.array_equal(found.truncated, expected.truncated)
    assert found.tokens == expected.tokens


def test_a_model_must_be_named_without_the_embedded_one(folder, monkeypatch):
    monkeypatch.setattr("whiten_index.encoding.load_encoder.embedded_path", lambda: None)
    with pytest.raises(EncoderError, match="no model was named and the default one is not"):
        resolve_encoder(EncoderConfig())
    assert resolve(folder).dim == 32


def test_a_prompt_of_bytes_that_are_no_text_is_refused():
    with pytest.raises(ConfigError, match="--query-prompt is no UTF-8"):
        EncoderConfig(query_prompt="query \udcff")


@pytest.mark.parametrize("error", [
    Exception("Too many open files (os error 24)"),  # as of tokenizers
    RuntimeError("unable to open file </m>: Input/output error (5)"),  # as of safetensors
    MemoryError(),
])  # fmt: skip
@pytest.mark.parametrize("what", [
    "encoding.transformer.load_file",
    "encoding.transformer.transformers.AutoModel.from_pretrained",
    "encoding.transformer.load_tokenizer",
])  # fmt: skip
def test_an_error_of_the_system_is_none_of_the_model(tmp_path, monkeypatch, error, what):
    folder = add_modules(bert(tmp_path / "model"), "mean", dense())

    def fail(*_: Any, **__: Any) -> None:
        with loading_model("it", folder) if what.endswith("tokenizer") else nullcontext():
            raise error

    monkeypatch.setattr(f"whiten_index.{what}", fail)
    with pytest.raises(StorageError, match=r"too many|input/output|out of memory"):
        load(folder)


@pytest.mark.parametrize("ends", ["2_Dense/model.safetensors", "model/model.safetensors"])
@pytest.mark.parametrize("lasts", [False, True])
def test_a_file_that_safetensors_cannot_open_is_not_taken_for_missing(
    tmp_path, monkeypatch, ends, lasts
):
    """It says so of any file that the system does not open."""
    folder = add_modules(bert(tmp_path / "model"), "mean", dense())
    opened, limits = safetensors.safe_open, resource.getrlimit(resource.RLIMIT_NOFILE)

    def full(path: Path, *arguments: Any, **options: Any) -> Any:
        if str(path).endswith(ends):
            with Path(os.devnull).open() as free:
                resource.setrlimit(resource.RLIMIT_NOFILE, (free.fileno(), limits[1]))
        try:
            return opened(path, *arguments, **options)
        finally:
            if not lasts:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)

    monkeypatch.setattr("safetensors.torch.safe_open", full)
    monkeypatch.setattr("transformers.modeling_utils.safe_open", full)
    reason = "this process has too many" if lasts else f"{ends} could not be opened, though it is"
    try:
        with pytest.raises(StorageError, match=reason):
            load(folder)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_damaged_file_is_not_blamed_on_another_one(folder, monkeypatch):
    (folder / "README.md").symlink_to(folder / "README.md")  # no system opens it
    load(folder)
    missing = FileNotFoundError(f"No such file or directory: {folder}/model.safetensors.index.json")
    with monkeypatch.context() as patched:
        patched.setattr("transformers.AutoModel.from_pretrained", Mock(side_effect=missing))
        with pytest.raises(EncoderError, match=r"cannot be loaded \(FileNotFoundError"):
            load(folder)
    (folder / "model.safetensors").write_text("cut")
    with pytest.raises(EncoderError, match="cannot be loaded"):
        load(folder)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("lasts", [False, True])
def test_an_error_of_the_system_makes_no_other_tokenizer(folder, name, lasts):
    """transformers takes what it cannot look at for absent, and makes one of the other files."""
    spec, found = resolve_encoder(EncoderConfig(model=str(folder)))
    stat, asked, failing = os.stat, 0, 0

    def failed(path: Any, *arguments: Any, **options: Any) -> Any:
        nonlocal asked
        if str(path).endswith(f"copy/{name}"):
            asked += 1
            if failing and (asked == failing or (lasts and asked > failing)):
                raise OSError(errno.EIO, "Input/output error", path)
        return stat(path, *arguments, **options)

    def tokens() -> list[int]:
        assert isinstance(spec, EncoderSpec)
        assert found is not None
        with patch("os.stat", failed):
            tokenizer = load_tokenizer(spec, found)
        return list(tokenizer("The cat, running: Zürich")["input_ids"])

    before, last = tokens(), asked
    assert last > 1
    for each in range(1, last + 1):
        failing, asked = each, 0
        if lasts:
            with pytest.raises(StorageError, match=rf"{name}: the disk reports"):
                tokens()
        else:
            assert tokens() == before


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json", "put back"])
def test_a_model_that_changes_while_it_is_loaded_is_refused(folder, tmp_path, monkeypatch, name):
    """Its embeddings would be kept as those of the files that were hashed."""
    path = folder / name.replace("put back", "model.safetensors")
    real = transformers.AutoModel.from_pretrained

    def swapped(*arguments: Any, **options: Any) -> Any:
        path.rename(tmp_path / "kept")
        data = (tmp_path / "kept").read_bytes()
        path.write_bytes(data + b" " * (name == "tokenizer.json"))
        try:
            return real(*arguments, **options)
        finally:
            if name == "put back":
                (tmp_path / "kept").rename(path)

    monkeypatch.setattr("transformers.AutoModel.from_pretrained", swapped)
    with pytest.raises(EncoderError, match=r"changed while it was used.*; run the same"):
        load(folder)
    monkeypatch.undo()
    load(folder)


def test_a_model_that_is_written_over_later_still_encodes_as_before(tmp_path):
    folder = add_modules(bert(tmp_path / "model"), "mean", dense())
    encoder = load(folder)
    before = encoder.encode_window(["a cat", "dogs run"]).embeddings
    for path in folder.rglob("*.safetensors"):
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 2)
            file.write(bytes(path.stat().st_size // 2))
    np.testing.assert_array_equal(encoder.encode_window(["a cat", "dogs run"]).embeddings, before)


@pytest.mark.parametrize("name", ["runs/events", "checkpoint-5/weights", ".git/index", "a.md"])
def test_a_file_that_no_loader_reads_may_change(folder, monkeypatch, name):
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    real = transformers.AutoModel.from_pretrained

    def written(*arguments: Any, **options: Any) -> Any:
        path.write_text("more")
        return real(*arguments, **options)

    monkeypatch.setattr("transformers.AutoModel.from_pretrained", written)
    load(folder)


@pytest.mark.parametrize("name", ["vocab_size", "out_features"])
def test_sizes_that_a_configuration_claims_are_not_allocated(tmp_path, name):
    folder = add_modules(bert(tmp_path / "model"), "mean", dense())
    of_dense = name == "out_features"
    path = folder / ("2_Dense" if of_dense else ".") / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, name: 65_536 if of_dense else 10**9}))
    match = r"Dense in .* cannot be loaded" if of_dense else "far more than its weights"
    for quantized in ({}, {"quantization_config": None}):
        path.write_text(json.dumps({**json.loads(path.read_text()), **quantized}))
        with pytest.raises(EncoderError, match=match):
            load(folder)


@pytest.mark.parametrize(("kind", "name"), [
    ("bart", "decoder_layers"), ("bart", "encoder_layers"), ("t5", "num_layers"),
])  # fmt: skip
def test_layers_that_the_weights_do_not_have_are_not_made(folder, kind, name):
    config = {"model_type": kind, "num_layers": 1, "d_model": 32, "num_heads": 1, name: 400}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(EncoderError, match="describes far more tensors than its weights have"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "value"),
    [("key.weight", float("nan")), ("key.weight", float("inf")),
     ("rotary_embeddings.inv_freq", float("nan"))],
)  # fmt: skip
def test_weights_that_attention_would_hide_are_refused(folder, name, value):
    path = folder / "model.safetensors"
    if "rotary" in name:  # is a buffer
        config = transformers.EsmConfig.from_pretrained(folder, position_embedding_type="rotary")
        transformers.EsmModel(config).save_pretrained(folder)
    weights = load_file(path)
    hidden = next(each for each in weights if each.endswith(name))
    weights[hidden].view(-1)[0] = value
    save_file({name: each.clone() for name, each in weights.items()}, path, {"format": "pt"})
    with pytest.raises(EncoderError, match="has weights that are not finite"):
        load(folder)


def test_a_head_whose_weights_are_not_finite_is_refused(tmp_path):
    """Its activation would make a number of each infinity."""
    kind, config, weights = dense()
    weights["linear.weight"][3, 7] = float("inf")
    folder = add_modules(bert(tmp_path / "model"), "mean", (kind, config, weights))
    with pytest.raises(EncoderError, match="has weights that are not finite"):
        load(folder)


def test_weights_of_one_byte_are_not_asked_whether_they_are_finite(folder, monkeypatch):
    """Of such a type, as quantized models with consent have it, torch does not know."""
    real = transformers.AutoModel.from_pretrained

    def packed(*arguments: Any, **options: Any) -> Any:
        model, loading = real(*arguments, **options)
        scaled = torch.nn.Parameter(torch.zeros(2, dtype=torch.float8_e4m3fn), requires_grad=False)
        model.encoder.layer[0].register_parameter("packed", scaled)
        return model, loading

    monkeypatch.setattr("transformers.AutoModel.from_pretrained", packed)
    assert load(folder).encode(["a cat"]).shape == (1, 32)


def test_weights_that_are_links_count_as_the_hubs_cache_has_them(folder, tmp_path, monkeypatch):
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to(tmp_path / "blob")
    # As for a model of more than a gigabyte.
    monkeypatch.setattr("whiten_index.encoding.transformer._MOST_UNPACKED", 0)
    load(folder)


@pytest.mark.parametrize("name", [
    "modules.json", "config_sentence_transformers.json", "sentence_bert_config.json",
    "tokenizer_config.json", "special_tokens_map.json", "1_Pooling/config.json",
])  # fmt: skip
def test_a_link_to_nothing_is_no_file_that_the_model_never_had(tmp_path, name):
    """Else the model would pool otherwise, say, or lose its prompts."""
    folder = add_modules(bert(tmp_path / "model"), "cls")
    path = folder / name
    path.unlink(missing_ok=True)
    path.symlink_to(tmp_path / "unmounted")
    with pytest.raises(StorageError, match=rf"{name} is a link to .*unmounted, which is not there"):
        load(folder)


@pytest.mark.parametrize("name", ["1_Pooling", "2_Dense", "parts"])
def test_a_part_behind_a_link_to_a_folder_is_refused(tmp_path, name):
    """Its files could be others when they are loaded than when they were hashed."""
    folder = add_modules(bert(tmp_path / "model"), "mean", dense())
    (folder / "parts").mkdir()
    (folder / "model.safetensors").rename(folder / "parts" / "one.safetensors")
    weights = load_file(folder / "parts" / "one.safetensors")
    index = {"weight_map": dict.fromkeys(weights, "parts/one.safetensors"), "metadata": {}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    load(folder)
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EncoderError, match=rf"{name} links to a folder.*; copy it into the model"):
        load(folder)


def test_a_layer_where_trainings_leave_files_may_not_change(tmp_path, monkeypatch):
    folder = add_modules(bert(tmp_path / "model"), "mean", dense())
    (folder / "runs").mkdir()
    (folder / "2_Dense").rename(folder / "runs" / "2_Dense")
    listed = (folder / "modules.json").read_text()
    (folder / "modules.json").write_text(listed.replace("2_Dense", "runs/2_Dense"))
    real = transformers.AutoModel.from_pretrained

    def touched(*arguments: Any, **options: Any) -> Any:
        (folder / "runs" / "2_Dense" / "model.safetensors").touch()
        return real(*arguments, **options)

    load(folder)
    monkeypatch.setattr("transformers.AutoModel.from_pretrained", touched)
    with pytest.raises(EncoderError, match="changed while it was used"):
        load(folder)


def test_weights_in_the_cache_of_the_hub_are_those_of_the_hub(folder, tmp_path):
    """A large file is kept there under its digest, and a snapshot links to it."""
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    path.symlink_to(path.rename(tmp_path / hashlib.sha256(data).hexdigest()))
    load(folder)
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(EncoderError, match=r"is damaged: the hub has other content; remove .* run"):
        load(folder)


def test_a_model_that_gives_nan_is_an_error(folder):
    weights = load_file(folder / "model.safetensors")
    weights["embeddings.LayerNorm.bias"].fill_(3e38)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
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
def test_a_pooling_that_is_not_ours_is_refused_unless_another_is_chosen(folder, pooling):
    add_modules(folder, pooling)
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
     ("tokenizer_config.json", '{"fast_tokenizer_files": ["../copy/tokenizer.4.json"]}'),
     ("config_sentence_transformers.json", '{"truncate_dim": 8}'),
     ("config_sentence_transformers.json", '{"prompts": ["a"]}'),
     ("config_sentence_transformers.json", '{"prompts": {"query": {"a": 1}}}'),
     ("config_sentence_transformers.json", '{"prompts": {"query": "\\ud800"}}'),
     ("config_sentence_transformers.json", '{"prompts": {}, "default_prompt_name": ["x"]}'),
     ("config_sentence_transformers.json", '{"prompts": {}, "default_prompt_name": "x"}'),
     ("modules.json", "{"),
     ("modules.json", '[{"type": "sentence_transformers.models.Transformer", "path": "../copy"}]'),
     ("model.safetensors.index.json", '{"weight_map": {"a": "../copy/model.safetensors"}}'),
     ("1_Pooling/config.json", "]"), ("tokenizer_config.json", "x"), ("tokenizer.json", "{"),
     ("model.safetensors", "cut")],
)  # fmt: skip
def test_a_damaged_file_of_a_model_is_an_encoder_error(folder, file, text):
    add_modules(folder)
    (folder / file).write_text(text)
    with pytest.raises(EncoderError):
        load(folder)


@pytest.mark.parametrize("name", ["special_tokens_map.json", "added_tokens.json"])
def test_files_of_words_that_have_no_end_are_not_read(folder, name):
    path = folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with pytest.raises(EncoderError, match=rf"{name} cannot be read \(is a pipe"):
        resolve(folder)
    path.unlink()
    path.write_text('{"a": "' + "a" * (16 << 20) + '"}')
    with pytest.raises(EncoderError, match=rf"{name} cannot be read .*16,777,216"):
        resolve(folder)


def test_a_model_without_the_words_of_its_tokenizer_is_refused(folder):
    for name in ("tokenizer.json", "vocab.txt"):
        (folder / name).unlink(missing_ok=True)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    with pytest.raises(EncoderError, match=r"it has no words; is a file missing"):
        load(folder)


@pytest.mark.parametrize("damage", ["no unknown token", "a frame of unknown names"])
def test_a_tokenizer_that_fails_on_a_text_is_an_encoder_error(folder, damage):
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
    with pytest.raises(EncoderError, match="tokenizer cannot take a text"):
        load(folder, document_prompt="b cat ")


def test_a_damaged_normalizer_is_an_encoder_error(folder):
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    # The tokenizers library panics.
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    path.write_text(json.dumps(content))
    with pytest.raises(EncoderError, match=r"cannot be loaded \(PanicException"):
        load(folder)


def test_an_error_without_words_is_an_encoder_error(folder, monkeypatch):
    monkeypatch.setattr("transformers.AutoModel.from_pretrained", Mock(side_effect=RuntimeError))
    with pytest.raises(EncoderError, match=r"cannot be loaded \(RuntimeError"):
        load(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_file_that_was_hardly_written_is_not_read_to_its_end(tmp_path: Path, name: str) -> None:
    """As of a copy that was cut off: a file of a terabyte takes hours, and some bytes on a disk."""
    bert(tmp_path)
    os.truncate(tmp_path / name, 1 << 40)
    with pytest.raises(EncoderError, match=f"{name} has 1,099,511,627,776 bytes, of which"):
        resolve(tmp_path)


def test_special_tokens_are_not_lowered(folder):
    """As by sentence-transformers."""
    expected = load(add_modules(folder, "mean")).encode(["[MASK] the cat"])
    edit_json(folder / "sentence_bert_config.json", do_lower_case=True)
    np.testing.assert_array_equal(load(folder).encode(["[MASK] THE cat"]), expected)


def test_a_tokenizer_in_python_may_lower_too(tmp_path):
    config = transformers.T5Config(vocab_size=384, d_model=32, d_kv=8, d_ff=32, num_layers=1)
    transformers.T5EncoderModel(config).save_pretrained(tmp_path)
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)
    add_modules(tmp_path, "mean")
    edit_json(tmp_path / "sentence_bert_config.json", do_lower_case=True)
    assert load(tmp_path).encode(["a"]).shape == (1, 32)
