"""Sentences as averages of word vectors, plain or weighted as in SIF (Arora, Liang and Ma 2017)."""

from __future__ import annotations

import gzip
import lzma
import re
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.files import open_file, reading
from whiten_index.artifacts.limits import VECTOR_NUMBERS, LimitError, check_expanded, iterate_lines
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluation.metrics import pair_cosines
from whiten_index.evaluation.sts_sets import StsSet
from whiten_index.measure.evaluate_sts import scores_of

SIF_WEIGHT = 1e-3
# Errors of the content, as the readers of packed files raise them.
_UNREADABLE = (
    OSError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, LimitError,
)  # fmt: skip
Vectors = Mapping[str, NDArray[np.float32]]
Weigh = Callable[[str], float]
# Contractions are split as in the Penn Treebank (do n't, it 's), as in GloVe's vocabulary.
_TOKEN = re.compile(
    r"\w+?(?=n['’]t\b)|n['’]t\b|['’](?:s|re|ve|ll|d|m)\b|(?:[^\W\d_]\.){2,}"
    r"|\d+(?:[.,]\d+)*(?!\w)|\w+|[^\w\s]",
    re.IGNORECASE,
)


def tokenize(text: str) -> list[str]:
    """Return the words and punctuation of a text in lower case."""
    return [token.lower() for token in _TOKEN.findall(text.replace("’", "'"))]


def read_vectors(path: Path, words: Collection[str]) -> Vectors:
    """Read the vectors of some words from GloVe, word2vec or fastText text, or ``.gz`` or ``.zip``.

    Raises:
        CorpusError: the file cannot be read, a row is malformed, or it has none of the words.
    """
    found: dict[str, NDArray[np.float32]] = {}
    dim = 0
    for number, line in _numbered_lines(path):
        if number == 1:
            fields = len(line.split())
            if fields == 2:
                continue  # the header `words dims` of word2vec and fastText
        dim = dim or len(line.split()) - 1
        if not 0 < dim <= VECTOR_NUMBERS:
            most = f"{VECTOR_NUMBERS:,}"
            raise CorpusError(f"{path} has vectors of more than {most} numbers, or of none")
        # GloVe 840B has words with blanks.
        word, *numbers = line.rsplit(None, dim)
        name = word.decode("utf-8", "replace")
        if name not in words or name in found:
            continue
        try:
            vector = np.array(numbers, np.float32)
        except ValueError as error:
            raise CorpusError(f"{path}, line {number}: {error}; fetch the file again") from error
        if len(vector) != dim or not np.isfinite(vector).all():
            raise CorpusError(f"{path}, line {number}, is not a word and {dim} numbers")
        found[name] = vector
    if not found:
        raise CorpusError(f"{path} has none of the {len(words):,} words of the texts")
    return found


def read_sif_weights(path: Path, weight: float = SIF_WEIGHT) -> Weigh:
    """Return SIF's a/(a + p(word)), p from a text file with ``word count`` on each line.

    A word without a count is as rare as the rarest; punctuation without one weighs 0.

    Raises:
        CorpusError: the file cannot be read, or a line is not a word and its count.
    """
    counts: dict[str, float] = {}
    for number, line in _numbered_lines(path):
        fields = line.decode("utf-8", "replace").rsplit(None, 1)
        try:
            word, count = fields[0], float(fields[-1])
        except (IndexError, ValueError) as error:
            raise CorpusError(f"{path}, line {number}, is not a word and its count") from error
        counts[word] = counts.get(word, 0.0) + count
    total, least = sum(counts.values()), min(filter(None, counts.values()), default=0.0)
    if not (least > 0 and np.isfinite(total)):
        raise CorpusError(f"{path} counts no word, or one by a number that is no count")

    def weigh(token: str) -> float:
        if token in counts:
            return weight / (weight + counts[token] / total)
        rare = weight / (weight + least / total)
        return rare if any(sign.isalnum() for sign in token) else 0.0

    return weigh


class WordAverages:
    """Embeds texts as the weighted mean of the vectors of their known words; see ``TextEmbedder``.

    A text without a known word is a row of zeros.
    """

    def __init__(self, vectors: Vectors, weigh: Weigh = lambda _: 1.0) -> None:
        self._vectors, self._weigh = vectors, weigh
        self._dim = len(next(iter(vectors.values())))

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """Return the averages (n, d) of n texts."""
        rows = np.zeros((len(texts), self._dim), np.float32)
        for row, text in zip(rows, texts, strict=True):
            known = [token for token in tokenize(text) if token in self._vectors]
            weights = np.array([self._weigh(token) for token in known])
            if weights.any():
                used = np.array([self._vectors[token] for token in known], np.float64)
                row[:] = weights @ used / np.count_nonzero(weights)
        return rows

    def facts(self) -> dict[str, Any]:
        """Return what the embeddings are, as JSON values."""
        return {"kind": "word average", "dim": self._dim}


def word_scores(each: StsSet, words: WordAverages, *, remove_common: bool) -> dict[str, Any]:
    """Score a set by the cosines of averages, for SIF without their common component.

    The component is the first right singular vector of all texts of the set.
    """
    rows = words.embed(each.texts).astype(np.float64)
    if remove_common:
        if not rows.any():
            raise ConfigError(f"no text of {each.name} has a known word")
        common = np.linalg.eigh(rows.T @ rows).eigenvectors[:, -1]
        rows -= np.outer(rows @ common, common)
    return scores_of(each, pair_cosines(*np.split(rows, 2)))


def _numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    unpacked = 0
    try:
        with reading(path), open_file(path) as plain, _unpacked(path, plain) as file:
            size = path.stat().st_size
            for number, line in enumerate(iterate_lines(file), 1):
                unpacked += len(line)
                check_expanded(unpacked, size)
                if line.strip():
                    yield number, line
    except _UNREADABLE as error:
        raise CorpusError(f"{path} cannot be read ({error}); fetch the file again") from error


@contextmanager
def _unpacked(path: Path, plain: IO[bytes]) -> Iterator[IO[bytes]]:
    if path.suffix == ".zip":
        with zipfile.ZipFile(plain) as archive:
            names = [name for name in archive.namelist() if not name.startswith("__MACOSX/")]
            if len(names) != 1:
                raise CorpusError(f"{path} holds {len(names)} files; unpack the one to read")
            with archive.open(names[0]) as file:
                yield file
    elif path.suffix == ".gz":
        with gzip.open(plain) as packed:
            yield packed  # type: ignore[misc]
    else:
        yield plain
