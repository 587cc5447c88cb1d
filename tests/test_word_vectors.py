"""Word vectors: every format against files written by hand, averages and SIF against loops."""

from __future__ import annotations

import gzip
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from whiten_index.encoding.word_counts import WordCounts, read_counts
from whiten_index.encoding.words import WordEmbedder, WordVectors, tokenize
from whiten_index.errors import CorpusError
from whiten_index.evaluation import common_component, without_component

_VECTORS = {"cat": [1.0, -2.5, 3.0], "the": [0.5, 0.25, -1.0], "été": [1e-3, 7.0, 1e10]}
_TABLE = np.array(list(_VECTORS.values()), np.float32)


def _glove() -> bytes:
    return "".join(f"{w} {' '.join(map(repr, v))}\n" for w, v in _VECTORS.items()).encode()


def _fasttext() -> bytes:
    """As fastText writes it: a header, and a blank at the end of every line."""
    lines = [f"{w} {' '.join(map(repr, v))} \n" for w, v in _VECTORS.items()]
    return ("3 3\n" + "".join(lines)).encode()


def _word2vec(between: bytes = b"\n") -> bytes:
    entries = [w.encode() + b" " + struct.pack("<3f", *v) + between for w, v in _VECTORS.items()]
    return b"3 3\n" + b"".join(entries)


def _zip(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def _windows() -> bytes:
    return b"\xef\xbb\xbf" + _glove().replace(b"\n", b"\r\n")


def _lists(path: Path) -> None:
    vectors = [np.array(v, np.float32) for v in _VECTORS.values()]
    pq.write_table(pa.table({"word": list(_VECTORS), "vector": vectors}), path)


def _coordinates(path: Path) -> None:
    columns = {f"d{i}": _TABLE[:, i] for i in range(3)}
    pq.write_table(pa.table({"token": list(_VECTORS), **columns}), path)


_FORMATS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "glove": ("v.txt", lambda p: p.write_bytes(_glove())),
    "tabs": ("v.tsv", lambda p: p.write_bytes(_glove().replace(b" ", b"\t"))),
    "windows": (
        "v.txt",
        lambda p: p.write_bytes(_windows()),
    ),
    "no ending": ("vectors", lambda p: p.write_bytes(_glove())),
    "no last newline": ("v.txt", lambda p: p.write_bytes(_glove().rstrip(b"\n"))),
    "fasttext": ("v.vec", lambda p: p.write_bytes(_fasttext())),
    "word2vec": ("v.bin", lambda p: p.write_bytes(_word2vec())),
    "gensim": ("v.bin", lambda p: p.write_bytes(_word2vec(b""))),
    "glove.gz": ("v.txt.gz", lambda p: p.write_bytes(gzip.compress(_glove()))),
    "vec.gz": ("v.vec.gz", lambda p: p.write_bytes(gzip.compress(_fasttext()))),
    "bin.gz": ("v.bin.gz", lambda p: p.write_bytes(gzip.compress(_word2vec()))),
    "glove.zip": ("v.zip", lambda p: _zip(p, {"deep/glove.txt": _glove(), "__MACOSX/x": b"no"})),
    "bin.zip": ("v.zip", lambda p: _zip(p, {"v.bin": _word2vec()})),
    "parquet of lists": ("v.parquet", _lists),
    "parquet of coordinates": ("v.parquet", _coordinates),
}


@pytest.mark.parametrize("name", _FORMATS)
def test_every_format_gives_the_words_and_numbers_written(tmp_path: Path, name: str) -> None:
    ending, write = _FORMATS[name]
    write(path := tmp_path / ending)
    vectors = WordVectors.read(path)
    assert list(vectors.rows) == list(_VECTORS)
    np.testing.assert_array_equal(vectors.vectors, _TABLE)
    assert (vectors.vectors.dtype, vectors.dim, len(vectors)) == (np.float32, 3, 3)
    chosen = WordVectors.read(path, words={"été", "absent"})
    assert chosen.rows == {"été": 0}
    np.testing.assert_array_equal(chosen.vectors, _TABLE[2:])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("v.txt", b"", "is empty; name a file of word vectors"),
        ("v.txt", b"a 1 2\nb 3\n", "line 2, has 2 fields, expected a word and 2 numbers"),
        ("v.txt", b"a 1 2\n\nb 3 x\n", "line 3, the word 'b': expected 2 finite numbers"),
        ("v.txt", b"a 1 2\nb 3 nan\n", "line 2, the word 'b'.*NaN, infinite"),
        ("v.txt", b"a 1 2\nb -inf 3\n", "line 2.*NaN, infinite"),
        ("v.txt", b"a 1 2\nb 1e39 3\n", "line 2.*beyond float32"),
        ("v.txt", b"a 1 2\nb 3 4 c 5 6\n", "line 2, has 6 fields"),
        ("v.txt", b"a 1 2\nb 3 4c 5 6\n", "line 2, has 5 fields"),
        ("v.txt", b"alone\n", "neither a word with its numbers nor the header"),
        ("v.vec", b"3 2\na 1 2\nb 3 4\n", "holds 2 words and its header says 3"),
        ("v.vec", b"1 2\na 1 2\nb 3 4\n", "holds 2 words and its header says 1"),
        ("v.vec", b"2 3\na 1 2\nb 3 4\n", "line 2, has 3 fields, expected a word and 3 numbers"),
        ("v.bin", b"a 1 2\n", "does not begin with the header"),
        ("v.bin", b"1 9999999999\n", "does not begin with the header"),
        ("v.bin", struct.pack("<i", 793712314) + b"\x0c\n", r"fastText model.*name its \.vec"),
        ("v.bin", _word2vec()[:-3], "holds 2 words and its header says 3"),
        ("v.bin", _word2vec() + b"more", "goes on after the 3 words of 3 dims"),
        ("v.bin", b"1 2\n" + b"x" * 9000, "word 1, has no end"),
        ("v.bin", b"1 1\na " + struct.pack("<f", np.nan), "word 1, the word 'a'.*NaN"),
        ("v.txt.gz", gzip.compress(_glove() * 99)[:-20], "is damaged or cut short"),
        ("v.txt.gz", _glove(), "is damaged or cut short"),
        ("v.zip", _glove(), "is damaged or cut short"),
        ("v.parquet", _glove(), "is damaged or cut short"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused_with_its_place(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (path := tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError, match=f"{re.escape(str(path))}.*{message}"):
        WordVectors.read(path)


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("The dog's bone, isn't it?", ["the", "dog", "'s", "bone", ",", "is", "n't", "it", "?"]),
        ("You can’t; WE'RE", ["you", "ca", "n't", ";", "we", "'re"]),
        ("did n't it 's", ["did", "n't", "it", "'s"]),
        ("pro-life costs $1,000.50.", ["pro", "-", "life", "costs", "$", "1,000.50", "."]),
        ("the U.S. in the 1990s", ["the", "u.s.", "in", "the", "1990s"]),
        ("Ünïted été", ["ünïted", "été"]),
        (" \n", []),
    ],
)
def test_tokens_are_words_and_signs(text: str, tokens: list[str]) -> None:
    assert tokenize(text) == tokens
    assert [t.lower() for t in tokenize(text, keep_case=True)] == tokens


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=60))
def test_no_letter_is_lost_and_tokens_tokenise_to_themselves(text: str) -> None:
    """What is left out are blanks, and nothing else."""
    tokens = tokenize(text, keep_case=True)
    assert "".join(tokens) == "".join(text.replace("’", "'").split())


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(["aa", "bb", "cc", "Dd", "zz"]), max_size=8), max_size=6),
    st.integers(0, 2**16),
)
def test_averages_equal_a_loop_over_a_dictionary(lists: list[list[str]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    table = {w: rng.standard_normal(5).astype(np.float32) for w in ("aa", "bb", "cc", "dd")}
    vectors = WordVectors({w: i for i, w in enumerate(table)}, np.array(list(table.values())))
    count = {"aa": 50.0, "bb": 30.0, "dd": 20.0}
    weight = {w: 0.1 / (0.1 + count.get(w, 20.0) / 100) for w in table}
    texts = [" ".join(words) for words in lists]
    plain = vectors.average(texts).embeddings
    sif = vectors.sif(texts, WordCounts(count, 100.0), a=0.1).embeddings
    assert plain.shape == sif.shape == (len(texts), 5)
    for words, average, weighted in zip(lists, plain, sif, strict=True):
        known = [w.lower() for w in words if w != "zz"]
        total = sum((table[w] for w in known), np.zeros(5))
        heavy = sum((weight[w] * table[w] for w in known), np.zeros(5))
        np.testing.assert_allclose(average, total / max(len(known), 1), atol=1e-6)
        np.testing.assert_allclose(weighted, heavy / max(len(known), 1), atol=1e-6)


@pytest.mark.parametrize("name", ["c.txt", "c.tsv", "c.txt.gz", "c.zip", "c.parquet"])
def test_counts_are_read_from_every_format_and_added_up(tmp_path: Path, name: str) -> None:
    path, lines = tmp_path / name, b"the 7\ncat 2\n\nthe 1\n"
    if name.endswith(".parquet"):
        pq.write_table(pa.table({"word": ["the", "cat", "the"], "count": [7, 2, 1]}), path)
    elif name.endswith(".zip"):
        _zip(path, {"c.txt": lines})
    elif name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines))
    else:
        path.write_bytes(lines.replace(b" ", b"\t") if name.endswith(".tsv") else lines)
    counts = read_counts(path)
    assert (dict(counts.counts), counts.total) == ({"the": 8, "cat": 2}, 10)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"the 7\ncat\n", "line 2, is b'cat.*expected a word and its count"),
        (b"the 7\ncat x\n", "line 2, .*expected a word and its count"),
        (b"5\n", "line 1, .*expected a word and its count"),
        (b"the -7\n", "line 1, "),
        (b"the nan\n", "line 1, "),
        (b"\xff 7\n", "line 1, "),
        (b"the 1e308\ncat 1e308\n", r"line 1, .*a word and its count, from 0 to 1e\+15; mend"),
        (b"the 0\n", "counts no word"),
        (b"", "counts no word"),
    ],
)
def test_counts_that_cannot_be_used_are_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "c.txt").write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        read_counts(tmp_path / "c.txt")


def test_sif_without_the_common_component_equals_a_singular_value_decomposition(
    tmp_path: Path,
) -> None:
    (tmp_path / "v.txt").write_bytes(_glove().replace(b"10000000000.0", b"1.5"))
    (tmp_path / "c.txt").write_bytes(b"the 90\ncat 9\n")
    texts = ["the cat", "cat été", "the été the", "cat"]
    made = WordEmbedder.open(tmp_path / "v.txt", counts=tmp_path / "c.txt").embed(texts)
    u = np.linalg.svd(made.astype(np.float64))[2][0]
    expected = made - np.outer(made @ u, u)
    mine = without_component(made, common_component(made))
    np.testing.assert_allclose(mine, expected, atol=1e-9)
    np.testing.assert_allclose(mine @ u, 0, atol=1e-9)
