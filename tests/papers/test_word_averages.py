"""Averages of word vectors for the papers' baselines, against numpy."""

import gzip
import math
import zipfile
from pathlib import Path

import numpy as np
import pytest

from pipelines.papers.words import (
    SIF_WEIGHT,
    WordAverages,
    read_sif_weights,
    read_vectors,
    tokenize,
    word_scores,
)
from whiten_index.errors import CorpusError
from whiten_index.evaluation.metrics import correlate
from whiten_index.evaluation.sts_sets import StsSet

GLOVE = "the 0.5 0.25 -1\ncat 1 -2.5 3\nat name 7 8 9\nnever x y z\n"
WORDS = {"the", "cat"}


def write(path: Path, text: str = GLOVE) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    elif path.suffix == ".zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("glove.txt", text)
    else:
        path.write_text(text)
    return path


@pytest.mark.parametrize("name", ["v.txt", "v.txt.gz", "v.zip"])
@pytest.mark.parametrize("header", ["", "4 3\n"])
def test_vectors_of_the_words_of_the_texts_are_read(tmp_path: Path, name: str, header: str) -> None:
    found = read_vectors(write(tmp_path / name, header + GLOVE), WORDS)
    assert {word: vector.tolist() for word, vector in found.items()} == {
        "the": [0.5, 0.25, -1.0],
        "cat": [1.0, -2.5, 3.0],
    }


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("v.txt", "the 1 2 3\ncat 1 2 x\n", "line 2"),
        ("v.txt", "the 1 2 3\ncat 1 2 nan\n", "line 2, is not a word and 3 numbers"),
        ("v.txt", "der 1 2 3\n", "none of the 2 words"),
        ("v.txt", "the" + " 1" * 65_537, "more than 65,536 numbers"),
        ("v.txt", "the\ncat 1 2 3\n", "numbers, or of none"),
        *((name, "a" * (17 << 20), "more than 16,777,216 bytes") for name in ("v.gz", "v.zip")),
    ],
)
def test_vectors_that_cannot_be_used_are_refused(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    with pytest.raises(CorpusError, match=message):
        read_vectors(write(tmp_path / name, text), WORDS)


@pytest.mark.parametrize("text", ["the nan\ncat 1\n", "cat 1\nthe nan\n", "the inf\ncat 1\n"])
def test_counts_that_are_no_numbers_are_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(CorpusError, match="counts no word, or one by a number that is no count"):
        read_sif_weights(write(tmp_path / "c.txt", text))


def test_a_damaged_lzma_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "v.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("v.txt", GLOVE * 9)
    packed = bytearray(path.read_bytes())
    packed[len("v.txt") + 30 + 13] ^= 0xFF  # in the packed bytes, after the file's header
    path.write_bytes(packed)
    with pytest.raises(CorpusError, match="fetch the file again"):
        read_vectors(path, WORDS)


def test_tokens_are_words_and_signs() -> None:
    assert tokenize("Don't stop, it’s U.S. 1,000!") == [
        "do", "n't", "stop", ",", "it", "'s", "u.s.", "1,000", "!",
    ]  # fmt: skip


def test_plain_and_weighted_averages_are_those_of_numpy(tmp_path: Path) -> None:
    vectors = read_vectors(write(tmp_path / "v.txt"), WORDS)
    counts = write(tmp_path / "c.txt", "the 90\ncat 9\nrare 1\n")
    texts = ["The cat unknown", "unknown"]
    plain = WordAverages(vectors).embed(texts)
    np.testing.assert_allclose(plain, [(vectors["the"] + vectors["cat"]) / 2, [0, 0, 0]])
    weights = [SIF_WEIGHT / (SIF_WEIGHT + share) for share in (0.9, 0.09)]
    weigh = read_sif_weights(counts)
    expected = (weights[0] * vectors["the"] + weights[1] * vectors["cat"]) / 2
    np.testing.assert_allclose(WordAverages(vectors, weigh).embed(texts)[0], expected, rtol=1e-6)
    assert weigh("absent") == weigh("rare")
    assert weigh(",") == 0


@pytest.mark.parametrize("remove_common", [False, True])
def test_scores_are_correlations_of_cosines(remove_common: bool) -> None:
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(30)]
    vectors = {word: rng.standard_normal(8).astype(np.float32) + 1 for word in words}
    first, second = ([" ".join(rng.choice(words, 4)) for _ in range(20)] for _ in range(2))
    gold = rng.random(20)
    none = np.full(20, "", dtype=object)
    pairs = StsSet("mine", first, second, gold, none, np.ones(20, bool), averaged=False)
    averages = WordAverages(vectors)
    rows = averages.embed([*first, *second]).astype(float)
    if remove_common:
        top = np.linalg.svd(rows)[2][0]
        rows -= np.outer(rows @ top, top)
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    expected, _ = correlate(gold, (rows[:20] * rows[20:]).sum(axis=1), none, name="mine")
    found = word_scores(pairs, averages, remove_common=remove_common)
    assert math.isclose(found["spearman"]["all"], expected["all"])
