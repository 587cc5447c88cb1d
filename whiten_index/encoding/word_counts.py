"""How often words occur, read from a file, and the weights that SIF makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whiten_index.encoding.word_files import DAMAGE, text_lines
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.labels.table import PARQUET, LabelTable, check_readable, first_line, shown

SIF_WEIGHT = 1e-3
# More than any corpus has words; sums of such counts stay far from overflow.
_TOP_COUNT = 1e15

Weigh = Callable[[str], float]


@dataclass(frozen=True, eq=False)
class WordCounts:
    """How often words occur in some large corpus.

    Attributes:
        counts: word -> how often.
        total: of all words.
    """

    counts: Mapping[str, float]
    total: float

    def sif_weights(self, a: float = SIF_WEIGHT) -> Weigh:
        """Return the function w -> a/(a + p(w)) with p(w) = count/total (Arora et al. 2017).

        A token is looked up as it is, in lower case, then by what follows its apostrophe (``'s``
        as s, ``n't`` as t), as counts of plain words have them. A word without a count is as rare
        as the rarest that has one; the authors' code gives it the weight 1, which is the same but
        for counts of a small corpus. A sign without a letter or digit has no count in most lists
        though it is more common than any word: without one it weighs 0.

        Raises:
            ConfigError: a is not above 0.
        """
        if not a > 0 or not math.isfinite(a):
            raise ConfigError(f"the weight a of SIF is {a:g}; give a number above 0, such as 0.001")
        least = min(count for count in self.counts.values() if count > 0)

        def weigh(token: str) -> float:
            lowered = token.lower()
            names = (token, lowered, lowered.rpartition("'")[2])
            count = next((self.counts[name] for name in names if name in self.counts), None)
            if count is None:
                count = least if any(sign.isalnum() for sign in token) else math.inf
            return a / (a + count / self.total)

        return weigh


def read_counts(path: str | Path) -> WordCounts:
    """Read Parquet with word and count, or text with ``word count`` a line; ``.gz``, ``.zip`` too.

    Counts of a word that comes again are added up.

    Raises:
        CorpusError: the file or a row cannot be used, a count is above 1e15, or every one is 0.
    """
    path = Path(path)
    check_readable(path)
    counts: dict[str, float] = {}
    for word, count in _parquet_counts(path) if path.suffix == PARQUET else _text_counts(path):
        counts[word] = counts.get(word, 0.0) + count
    total = math.fsum(counts.values())
    if not total:
        raise CorpusError(f"{path} counts no word; name a file with a word and its count a row")
    return WordCounts(counts, total)


def _parquet_counts(path: Path) -> Iterable[tuple[str, float]]:
    table = LabelTable.read(path, (PARQUET,), ("word", "count"))
    word, count = table.need(("word",)), table.need(("count",))
    for row in range(len(table)):
        yield table.parse(word, row, _to_word), table.parse(count, row, _to_count)


def _text_counts(path: Path) -> Iterable[tuple[str, float]]:
    lines = text_lines(path)
    try:
        for number, line in lines:
            fields = line.rsplit(None, 1)
            try:
                word, count = fields[0].decode("utf-8").strip(), _to_count(fields[-1])
            except ValueError as error:
                raise _bad_count(path, number, line) from error
            if len(fields) != 2:
                raise _bad_count(path, number, line)
            yield word, count
    except DAMAGE as error:
        raise CorpusError(f"{path} is damaged ({first_line(error)}); fetch it again") from error


def _bad_count(path: Path, number: int, line: bytes) -> CorpusError:
    return CorpusError(
        f"{path}, line {number}, is {shown(line[:60])}, expected a word and its count, from 0 to "
        f"{_TOP_COUNT:g}; mend the line or take it out"
    )


def _to_word(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("text")  # noqa: TRY004 - what LabelTable.parse takes
    return value


def _to_count(value: Any) -> float:
    expected = f"a count: a number from 0 to {_TOP_COUNT:g}"
    try:
        count = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(expected) from error
    if not 0 <= count <= _TOP_COUNT:
        raise ValueError(expected)
    return count
