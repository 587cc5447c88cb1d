"""Embeddings without a Transformer: averages of word vectors, plain or weighted as SIF's."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.encoding.word_counts import SIF_WEIGHT, Weigh, WordCounts, read_counts
from whiten_index.encoding.word_files import open_word_file, spelled
from whiten_index.errors import CorpusError
from whiten_index.labels.table import shown

# Parts of contractions as in the Penn Treebank (do n't, it 's), abbreviations with their dots,
# numbers with their commas, words, and every other sign by itself.
_TOKEN = re.compile(
    r"\w+?(?=n['’]t\b)|n['’]t\b|['’](?:s|re|ve|ll|d|m)\b|(?:[^\W\d_]\.){2,}"
    r"|\d+(?:[.,]\d+)*(?!\w)|\w+|[^\w\s]",
    re.IGNORECASE,
)


def tokenize(text: str, *, keep_case: bool = False) -> list[str]:
    """Return the words and the punctuation of a text, in lower case.

    Contractions are parted as in the Penn Treebank (``don't``: do, n't), as the words of GloVe
    and of SentEval's files are; words with hyphens fall into their parts.

    Args:
        text: any text, tokenised already or not.
        keep_case: leave the letters as they are.
    """
    tokens = _TOKEN.findall(text.replace("’", "'"))
    return tokens if keep_case else [token.lower() for token in tokens]


@dataclass(frozen=True, eq=False)
class WordVectors:
    """Words and their vectors.

    Attributes:
        rows: word -> its row.
        vectors: (n, d) float32.
        duplicates: words met again in the file; the first vector is kept.
        undecodable: words that are not UTF-8, which no text can hold.
    """

    rows: dict[str, int]
    vectors: NDArray[np.float32]
    duplicates: int = 0
    undecodable: int = 0

    @classmethod
    def read(cls, path: str | Path, *, words: Collection[str] | None = None) -> WordVectors:
        """Read a file of word vectors; the formats are those of ``open_word_file``.

        Args:
            path: the file; read once, word by word.
            words: keep only these, so that memory is theirs and not the file's; the numbers of
                the others are not parsed.

        Raises:
            CorpusError: the file or one of its rows cannot be used; the message names the line.
        """
        rows: dict[str, int] = {}
        # Grows in place: a list of vectors joined at the end would hold all of them twice.
        data = bytearray()
        wanted = None if words is None else frozenset(words)
        again = undecodable = 0
        with open_word_file(path) as file:
            for row in file.rows:
                try:
                    word = row.word.decode("utf-8")
                except UnicodeDecodeError:
                    undecodable += 1
                    continue
                if wanted is not None and word not in wanted:
                    continue
                vector = file.vector(row)
                if word in rows:
                    again += 1
                    continue
                rows[word] = len(rows)
                data += vector.tobytes()
            vectors = np.frombuffer(data, np.float32).reshape(len(rows), file.dim)
        return cls(rows, vectors, again, undecodable)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def dim(self) -> int:
        """Numbers a word, d."""
        return int(self.vectors.shape[1])

    def row_of(self, token: str) -> int | None:
        """Return the row of a token as it is, else in lower case, else None."""
        row = self.rows.get(token)
        return self.rows.get(token.lower()) if row is None else row

    def average(self, texts: Sequence[str], *, keep_case: bool = False) -> Averages:
        """Return the mean of the vectors of a text's known tokens."""
        return _averages(self, texts, lambda _: 1.0, keep_case=keep_case)

    def sif(
        self,
        texts: Sequence[str],
        counts: WordCounts,
        *,
        a: float = SIF_WEIGHT,
        keep_case: bool = False,
    ) -> Averages:
        """Return (1/|s|) Σ a/(a + p(w)) v_w over a text's known tokens.

        The first half of SIF (Arora, Liang and Ma 2017); the second takes the common component of
        all texts off (``evaluation.common_component``).
        """
        return _averages(self, texts, counts.sif_weights(a), keep_case=keep_case)


@dataclass(frozen=True, eq=False)
class Averages:
    """Texts as averages of their words.

    Attributes:
        embeddings: (n, d) float32; zeros for a text without a known token.
        tokens: of all texts.
        unknown: of these, how many have no vector.
        without_words: texts without a known token of a weight above 0.
    """

    embeddings: NDArray[np.float32]
    tokens: int
    unknown: int
    without_words: int


def _averages(
    vectors: WordVectors, texts: Sequence[str], weigh: Weigh, *, keep_case: bool
) -> Averages:
    embeddings = np.zeros((len(texts), vectors.dim), np.float32)
    tokens = unknown = without = 0
    for i, text in enumerate(texts):
        found = tokenize(text, keep_case=keep_case)
        known = [(t, row) for t in found if (row := vectors.row_of(t)) is not None]
        tokens, unknown = tokens + len(found), unknown + len(found) - len(known)
        weights = np.array([weigh(token) for token, _ in known])
        if not weights.any():
            without += 1
            continue
        used = vectors.vectors[[row for _, row in known]].astype(np.float64)
        embeddings[i] = weights @ used / np.count_nonzero(weights)
    return Averages(embeddings, tokens, unknown, without)


class WordEmbedder:
    """Embeds texts as averages of word vectors, of which only those it needs are kept.

    The first call of ``embed`` reads the file once and keeps the words of its texts and of those
    that ``prepare`` was told of. Should a later one bring new words, the file is read a second
    and last time, and all of it kept: tell ``prepare`` of all texts first where the file is large.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        counts: WordCounts | None = None,
        weight: float = SIF_WEIGHT,
        cased: bool = False,
        counts_name: str | None = None,
    ) -> None:
        self._path, self._cased = Path(path), cased
        self._counts, self._weight, self._counts_name = counts, weight, counts_name
        self._weigh: Weigh = (lambda _: 1.0) if counts is None else counts.sif_weights(weight)
        with open_word_file(path) as file:
            self._dim = file.dim
        self._asked: set[str] = set()
        self._told: list[set[str]] = []
        self._vectors: WordVectors | None = None
        self._whole = False
        self._seen: set[str] = set()
        self._tokens = self._unknown = self._without = 0

    @classmethod
    def open(
        cls,
        path: str | Path,
        *,
        counts: str | Path | None = None,
        weight: float = SIF_WEIGHT,
        cased: bool = False,
    ) -> WordEmbedder:
        """Open files of vectors and, for SIF's weights, of counts.

        Args:
            path: word vectors; see ``open_word_file``.
            counts: words and their counts; see ``read_counts``. None for the plain average.
            weight: a of a/(a + p(w)).
            cased: look a word up as it is written, then in lower case; else in lower case only.

        Raises:
            CorpusError: a file that cannot be read.
            ConfigError: the weight is not above 0.
        """
        read = None if counts is None else read_counts(counts)
        name = None if counts is None else Path(counts).name
        return cls(path, counts=read, weight=weight, cased=cased, counts_name=name)

    def prepare(self, texts: Iterable[str]) -> None:
        """Take note of the words of texts to be embedded later; the texts are not kept.

        Nothing is read until the next ``embed``, which refuses texts of which the file has no
        word. Call it once for each group of texts, such as those to fit on.
        """
        if words := self._words_of(texts):
            self._told.append(words)

    def embed(self, texts: Sequence[str], *, counted: bool = True) -> NDArray[np.float32]:
        """Return the averages (n, d) of n texts; zeros for a text without a known word.

        Args:
            texts: any.
            counted: whether they count in the shares of ``facts``; those to fit on should not.

        Raises:
            CorpusError: a row of the file of vectors cannot be used, or it has no word of the
                texts told of, nor of the counted ones so far.
        """
        if not texts:
            return np.zeros((0, self._dim), np.float32)
        distinct = list(dict.fromkeys(texts))
        vectors = self._reading(distinct)
        made = _averages(vectors, distinct, self._weigh, keep_case=self._cased)
        if counted:
            self._count(vectors, distinct, made)
            if self._tokens and self._unknown == self._tokens:
                raise self._knows_none(self._words_of(distinct))
        place = {text: i for i, text in enumerate(distinct)}
        return made.embeddings[[place[text] for text in texts]]

    def facts(self) -> dict[str, Any]:
        """Return the file, the weights, and how much of the counted texts so far was unknown."""
        kind = "word average" if self._counts is None else "word average, SIF weights"
        facts: dict[str, Any] = {"kind": kind, "vectors": self._path.name, "dim": self._dim}
        facts["cased"] = self._cased
        if self._counts is not None:
            facts |= {"counts": self._counts_name, "sif_weight": self._weight}
        if self._vectors is not None and self._seen:
            facts |= {"texts": len(self._seen), "tokens": self._tokens}
            facts["unknown_share"] = self._unknown / max(self._tokens, 1)
            facts["texts_without_words"] = self._without
            facts["duplicate_words"] = self._vectors.duplicates
        return facts

    def _reading(self, texts: list[str]) -> WordVectors:
        """Return vectors that hold every word of these texts that the file has."""
        words = self._words_of(texts)
        groups, self._told = self._told, []
        told = set().union(*groups)
        vectors = self._vectors
        # What was told of is worth a pass of its own, unless the whole file is kept already.
        if vectors is None or not (self._whole or told <= self._asked):
            self._asked |= words | told
            vectors = WordVectors.read(self._path, words=self._asked)
        elif not (self._whole or words <= self._asked):
            vectors, self._whole = WordVectors.read(self._path), True
        self._vectors = vectors
        for group in groups:
            if group.isdisjoint(vectors.rows):
                raise self._knows_none(group)
        return vectors

    def _words_of(self, texts: Iterable[str]) -> set[str]:
        """Return the words of texts as they are looked up: as they are, and in lower case."""
        words = {w for text in texts for w in tokenize(text, keep_case=self._cased)}
        return words | {word.lower() for word in words}

    def _knows_none(self, words: set[str]) -> CorpusError:
        with open_word_file(self._path) as file:
            first = next(file.rows, None)
        longest = shown(max(words, key=lambda word: (len(word), word)))
        asked = f"the {len(words):,} words of the texts, such as {longest}"
        if first is None:
            return CorpusError(f"{self._path} holds no word, so none of {asked}; name another file")
        cased = "" if self._cased else ", or try --cased where the words of the file have capitals"
        return CorpusError(
            f"{self._path}, whose first word is {spelled(first.word)}, has none of {asked}; name "
            f"vectors of the texts' language{cased}"
        )

    def _count(self, vectors: WordVectors, texts: list[str], made: Averages) -> None:
        """Add what is new to the counts of ``facts``."""
        new = [text for text in texts if text not in self._seen]
        if len(new) < len(texts):
            made = _averages(vectors, new, self._weigh, keep_case=self._cased)
        self._seen.update(new)
        self._tokens, self._unknown = self._tokens + made.tokens, self._unknown + made.unknown
        self._without += made.without_words
