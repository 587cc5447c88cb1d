"""What cannot be trained is told, and nothing is lost by it."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.helpers.code_models import edit_json
from tests.helpers.tiny_models import bert, t5
from whiten_index.errors import (
    ArtifactError,
    ConfigError,
    CorpusError,
    EncoderError,
    WhiteningError,
)
from whiten_index.training.train import train_encoder


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"groups": 5}, ConfigError, "5 groups do not divide 32 channels; give one of 1, 2, 4, 8"),
        ({"groups": 1}, WhiteningError, "a batch of 16 cannot whiten groups of 32 channels"),
        ({"batch_size": 512}, CorpusError, "200 sentences, fewer than a batch of 512"),
        ({"learning_rate": float("nan")}, ConfigError, "--learning-rate takes a finite number"),
        ({"group_map": "qr"}, ConfigError, "--group-map 'qr' is unknown; use zca"),
        ({"learning_rate": 1e30}, WhiteningError, "are not finite; take a smaller learning rate"),
        ({"learning_rate": 1e30, "whiten": False}, EncoderError,
            "the training diverged: its numbers are not finite"),
        ({"corpus": ()}, ConfigError, "no sentences are named"),
        ({"precision": "fp16"}, ConfigError, "fp16 is for GPUs"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_cannot_be_trained_is_told(
    config: Any, tmp_path: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        train_encoder(config(**options))
    assert not (tmp_path / "model").exists()
    assert not (tmp_path / "model.training").exists()


def test_an_encoder_of_t5_is_refused(config: Any, tmp_path: Path) -> None:
    """sentence-transformers saves it so; what training wrote of it, nothing could load."""
    folder = t5(tmp_path / "t5")
    edit_json(folder / "config.json", is_encoder_decoder=False)
    with pytest.raises(ConfigError, match="is an encoder-decoder; train an encoder such as BERT"):
        train_encoder(config(model=str(folder), pooling="mean"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"unk_token": "[NONE]", "max_input_chars_per_word": 1}, "cannot take a text"),
        ({"vocab": {"cat": 4000}}, "gives token 4000"),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_told(
    config: Any, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = bert(tmp_path / "bert")
    content = json.loads((path := folder / "tokenizer.json").read_text())
    words = {**content["model"]["vocab"], **change.get("vocab", {})}
    content["model"] |= {**change, "vocab": words}
    path.write_text(json.dumps(content))
    with pytest.raises(EncoderError, match=message):
        train_encoder(config(model=str(folder)))


@pytest.mark.parametrize("same", [True, False])
def test_sentences_that_memory_may_not_hold(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    """Each file is within the limit of readers; a sentence that comes often counts once."""
    monkeypatch.setattr("whiten_index.artifacts.limits._EXPANDED_BYTES", 60_000)
    monkeypatch.setattr("whiten_index.artifacts.limits._EXPANSION", 0)
    for number in range(4):
        texts = [f"{0 if same else (number, row)} {'word ' * 400}" for row in range(16)]
        pq.write_table(pa.table({"text": texts}), tmp_path / f"{number}.parquet")
    given = config(corpus=tuple(str(tmp_path / f"{n}.parquet") for n in range(4)), max_steps=1)
    if same:
        assert train_encoder(given).facts["sentences"] == 64
    else:
        with pytest.raises(CorpusError, match="too many or too long: it unpacks to more than"):
            train_encoder(given)


def test_short_sentences_count_as_python_holds_them(
    config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number of four digits takes a hundred bytes."""
    monkeypatch.setattr("whiten_index.artifacts.limits._EXPANDED_BYTES", 100_000)
    monkeypatch.setattr("whiten_index.artifacts.limits._EXPANSION", 0)
    pq.write_table(pa.table({"text": [f"{row}" for row in range(2000)]}), tmp_path / "n.parquet")
    with pytest.raises(CorpusError, match="too many or too long: it unpacks to more than"):
        train_encoder(config(corpus=(str(tmp_path / "n.parquet"),), max_steps=1))


@pytest.mark.parametrize("name", ["thesis.txt", "training.json", ".env", "checkpoints/notes.txt"])
def test_a_users_own_folder_beside_is_left_alone(config: Any, tmp_path: Path, name: str) -> None:
    own = tmp_path / "model.training" / name
    own.parent.mkdir(parents=True)
    own.write_text('{"years": "of work"}')
    for options in ({}, {"groups": 5}):
        with pytest.raises(ConfigError):
            train_encoder(config(**options))
    assert own.read_text() == '{"years": "of work"}'
    assert [p.name for p in (tmp_path / "model.training").rglob("*") if p.is_file()] == [own.name]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "curves.csv"])
def test_a_model_that_was_damaged_since_is_told(config: Any, name: str) -> None:
    out = train_encoder(config()).out
    (out / name).write_bytes(b"x")
    with pytest.raises(ArtifactError, match="remove it to train from the start"):
        train_encoder(config())
    (out / name).unlink()
    with pytest.raises(ArtifactError, match="is missing"):
        train_encoder(config())
    (out / "manifest.json").write_bytes(b"x")
    with pytest.raises(ConfigError, match="a trained model, or a damaged one, and is left"):
        train_encoder(config())
