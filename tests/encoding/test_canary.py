"""Embeddings of fixed texts, which show that a model is no longer the one that it was."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from tests.helpers import tiny_models
from tests.helpers.api_builds import build, texts_of, write
from tests.helpers.builds import build_texts
from tests.helpers.code_models import forged
from tests.helpers.embedding_server import EmbeddingServer
from whiten_index import (
    CertifyConfig,
    MigrateConfig,
    PushConfig,
    UpdateConfig,
    certify_index,
    load_encoder,
    migrate_index,
    open_index,
    push_index,
    update_index,
)
from whiten_index.errors import ArtifactError, EncoderError

Change = Callable[[float], None]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model, beside a corpus of sixty texts."""
    write(tmp_path, texts_of(60))
    return tiny_models.bert(tmp_path / "model")


def build_here(model: Path, **options: Any) -> Path:
    out, corpus = options.pop("out", model.parent / "index"), model.parent / "c.parquet"
    return build_texts(out, corpus, model, factory="Flat", threads=1, **options).out


def manifest_of(index: Path) -> dict[str, Any]:
    (path,) = (index / "versions").glob("*/manifest.json")
    return json.loads(path.read_text())


@pytest.fixture
def another_library(monkeypatch: pytest.MonkeyPatch) -> Change:
    """Return what makes torch normalise layers in another way, by a share."""
    own = torch.nn.LayerNorm.forward

    def change(share: float) -> None:
        def forward(self: torch.nn.LayerNorm, states: torch.Tensor) -> torch.Tensor:
            found = own(self, states)
            return found + share * found.roll(1, -1)

        monkeypatch.setattr(torch.nn.LayerNorm, "forward", forward)

    return change


def test_a_library_that_computes_other_embeddings_is_noticed(
    tmp_path: Path, model: Path, another_library: Change
) -> None:
    index = build_here(model)
    first = open_index(index).search(["w1 w2"])
    assert manifest_of(index)["encoder"]["canary"]
    another_library(0.2)
    match = "has changed: the cosine .*; install the versions of torch, transformers and tokenizers"
    with pytest.raises(EncoderError, match=match):
        open_index(index).search(["w1 w2"])
    # Nothing is encoded, so nothing is compared.
    build_here(model)
    write(tmp_path, [*texts_of(60), "w3 w4"])
    for attempt in (
        lambda: build_here(model),
        lambda: update_index(UpdateConfig(index=str(index))),
    ):
        with pytest.raises(EncoderError, match=match):
            attempt()
    another_library(0)
    assert open_index(index).search(["w1 w2"]) == first


def test_the_model_of_questions_is_compared_too(
    tmp_path: Path, model: Path, another_library: Change
) -> None:
    index = build_here(model)
    lines = [json.dumps({"id": f"q{n}", "text": text}) for n, text in enumerate(texts_of(60))]
    (tmp_path / "q.jsonl").write_text("\n".join(lines))
    (tmp_path / "q.qrels").write_text("".join(f"q{n} 0 c.parquet#0:{n} 1\n" for n in range(60)))
    judged = {"queries": str(tmp_path / "q.jsonl"), "qrels": str(tmp_path / "q.qrels")}
    to_new = {"model": str(model), "layers": (1,), "pooling": "mean", "max_loss": 100.0}
    another_library(0.2)
    # These embed questions only, or those of the old model.
    for attempt in (
        lambda: certify_index(CertifyConfig(index=str(index), **judged)),
        lambda: migrate_index(MigrateConfig(index=str(index), **judged, **to_new)),
    ):
        with pytest.raises(EncoderError, match="has changed: the cosine"):
            attempt()


def test_a_change_beside_a_large_mean_is_noticed(model: Path, another_library: Change) -> None:
    weights = load_file(model / "model.safetensors")
    (bias,) = (name for name in weights if name.endswith("layer.1.output.LayerNorm.bias"))
    weights[bias] += 300.0
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    index = build_here(model)
    rows = load_encoder(str(model)).encode(["w1 w2", "the cat"])
    assert rows[0] @ rows[1] / np.linalg.norm(rows[0]) / np.linalg.norm(rows[1]) > 0.999
    another_library(0.5)
    with pytest.raises(EncoderError, match="has changed"):
        open_index(index).search(["w1 w2"])


def test_an_encoder_that_is_compared_with_nothing_is_not_shared(
    tmp_path: Path, model: Path, another_library: Change
) -> None:
    index = build_here(model)
    old = open_index(forged(index, tmp_path / "old", canary=""))
    another_library(0.2)
    assert old.search(["w1 w2"])
    one = open_index(index)
    one.share_encoder(old)
    with pytest.raises(EncoderError, match="has changed"):
        one.search(["w1 w2"])


def test_texts_that_a_model_cannot_take_are_left_out(tmp_path: Path, model: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"[PAD]": 0, **{f"w{n}": n + 1 for n in range(60)}}))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save(str(model / "tokenizer.json"))
    write(tmp_path, [f"w{n} w{n + 1}" for n in range(50)])
    index = build_here(model)
    assert len(open_index(index).search(["w1 w2"])[0]) == 10


def test_equal_builds_have_one_identity_whatever_the_canary(
    tmp_path: Path, model: Path, another_library: Change
) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for share, folder in zip((0, 1e-4), folders, strict=True):
        another_library(share)
        build_here(model, out=str(folder), store=f"{folder}.store")
    one, other = map(manifest_of, folders)
    assert one["encoder"]["canary"] != other["encoder"]["canary"]
    assert one["identity"] == other["identity"]


def test_a_model_that_has_changed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    texts = texts_of(200)
    write(tmp_path, texts)
    with EmbeddingServer() as server:
        index = build(tmp_path, server.url)
    match = "has changed: the cosine of one of twelve fixed texts with its recorded embedding is 0."
    (stored,) = (index / "store").glob("*/manifest.json")
    sound = stored.read_bytes()
    with EmbeddingServer(turn=0.2) as other:
        stored.write_bytes(sound.replace(b'"canary"', b'"canarx"'))
        with pytest.raises(ArtifactError, match="damaged"):
            build(tmp_path, other.url)
        stored.write_bytes(sound)
        monkeypatch.setenv("OPENAI_BASE_URL", other.url)
        tries = (
            lambda: build(tmp_path, other.url),
            lambda: update_index(UpdateConfig(index=str(index))),
            lambda: open_index(index).search(["a"]),
            lambda: push_index(PushConfig(index=str(index), to=str(tmp_path / "p.parquet"))),
        )
        for attempt in tries:
            with pytest.raises(EncoderError, match=match):
                attempt()
        assert set(other.answered.values()) == {1}
    # A small change is logged; later ones are still compared with the first canary.
    with EmbeddingServer(turn=0.03) as drifted, caplog.at_level(logging.WARNING):
        monkeypatch.setenv("OPENAI_BASE_URL", drifted.url)
        build(tmp_path, drifted.url)
        assert "has changed a little" in caplog.text
    with EmbeddingServer(turn=0.05) as further:
        monkeypatch.setenv("OPENAI_BASE_URL", further.url)
        with pytest.raises(EncoderError, match="has changed: the cosine"):
            open_index(index).search(["a"])


@pytest.mark.parametrize("canary", ["", "AAAA", "no base64", "A" * 1020])
def test_a_forged_canary_is_damage(tmp_path: Path, server: EmbeddingServer, canary: str) -> None:
    write(tmp_path, texts_of(100))
    index = forged(build(tmp_path, server.url), tmp_path / "forged", canary=canary)
    with pytest.raises(ArtifactError, match="embeddings of openai:words are damaged"):
        open_index(index, base_url=server.url).search(["a"])


def test_another_canary_is_another_encoder(tmp_path: Path) -> None:
    write(tmp_path, texts_of(100))
    with EmbeddingServer() as server, EmbeddingServer(turn=0.5) as changed:
        one = open_index(build(tmp_path, server.url), base_url=server.url)
        options = {"store": str(tmp_path / "other"), "out": str(tmp_path / "o")}
        other = open_index(build(tmp_path, changed.url, **options), base_url=changed.url)
        other.share_encoder(one)
        assert other.encoder is not one.encoder
