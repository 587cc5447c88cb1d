"""Training: what comes out loads elsewhere, and an interruption changes nothing."""

import contextlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

import whiten_index
from tests.acceptance.commands import done, start
from tests.acceptance.truth import encode, unit

STEPS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("train")


@pytest.fixture(scope="module")
def sentences(folder: Path, tiny_words: tuple[str, ...]) -> Path:
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(tiny_words, size=rng.integers(4, 12))) for _ in range(256)]
    path = folder / "sentences.parquet"
    pq.write_table(pa.table({"text": texts}), path)
    return path


@pytest.fixture(scope="module")
def options(tiny_model: Path, sentences: Path) -> tuple[object, ...]:
    return (
        sentences, "--model", tiny_model, "--pooling", "mean", "--batch-size", 16, "--groups", 4,
        "--positives", 1, "--learning-rate", 0.001, "--max-steps", STEPS, "--epochs", 9,
        "--device", "cpu", "--save-steps", 5,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(folder: Path, options: tuple[object, ...]) -> Path:
    train(*options, "--out", folder / "trained")
    return folder / "trained"


def train(*arguments: object) -> dict[str, Any]:
    """Train in a process of its own: threads that other commands set here round in other ways."""
    process = start("train", *arguments, "--json")
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out)


def texts_of(path: Path, count: int) -> list[str]:
    return pq.read_table(path)["text"].to_pylist()[:count]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def require_same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_a_killed_training_goes_on_to_the_same_weights(
    trained: Path, options: tuple[object, ...], tmp_path: Path
) -> None:
    """It was killed; tests of training go on after Ctrl-C."""
    out = tmp_path / "model"
    process = start("train", *options, "--out", out)
    folder, seen, deadline = out.with_name("model.training"), set[Path](), time.monotonic() + 120
    while len(seen) < 2:
        # Once the second checkpoint begins, the first one is whole.
        assert process.poll() is None, "no checkpoint was written before the end"
        assert time.monotonic() < deadline
        seen |= checkpoints(folder)
        time.sleep(0.005)
    process.kill()
    process.communicate(timeout=60)
    assert not out.exists()
    report = train(*options, "--out", out)
    assert report["resumed_at"] >= 5
    require_same(weights(trained), weights(out))
    assert not (tmp_path / "model.training").exists()


def checkpoints(folder: Path) -> set[Path]:
    # Temporary folders go while the tree is listed.
    with contextlib.suppress(FileNotFoundError):
        return {path.parent for path in folder.rglob("*.safetensors")}
    return set()


def test_a_trained_model_loads_in_sentence_transformers(trained: Path, sentences: Path) -> None:
    from sentence_transformers import SentenceTransformer

    texts = texts_of(sentences, 20)
    theirs = SentenceTransformer(str(trained), device="cpu").encode(texts)
    exact = unit(encode(texts, trained, max_length=32))
    np.testing.assert_allclose(unit(theirs.astype(np.float64)), exact, atol=1e-5)


def test_a_trained_model_builds_an_index(trained: Path, sentences: Path, tmp_path: Path) -> None:
    index = tmp_path / "index"
    done(
        "build", sentences, "--text-column", "text", "--model", trained, "--whiten", "none",
        "--limit", 40, "--store-dtype", "float32", "--keep", "text", "--out", index,
    )  # fmt: skip
    texts = texts_of(sentences, 40)
    (hits,) = whiten_index.open_index(index).search([texts[7]], top_k=5)
    rows = unit(encode(texts, trained, max_length=32))
    assert hits[0].columns["text"] == texts[7]
    scores = np.sort(rows @ rows[7])[::-1][:5]
    assert [hit.score for hit in hits] == pytest.approx(scores.tolist(), abs=1e-4)
