"""A document against itself: a sentence and what is left of it, a few words and the whole."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from whiten_index.encoding.spans import Span, sentence_spans

# Changes whenever the pieces of the same text would differ.
RECIPE = 1
_LEAST_WORDS, _MANY_WORDS = 16, 64
_LEAST_SENTENCES = 3
_SENTENCE_WORDS = (5, 40)
_WINDOW_WORDS = (8, 20)
# Scripts without blanks have "words" of a whole clause: there a character stands for a word.
_LONGEST_WORD = 16
_WORD = re.compile(r"\S+")
_CHARACTER = re.compile(r"\S")


@dataclass(frozen=True, slots=True)
class Pieces:
    """What one document is cut into.

    Attributes:
        sentence: one of its sentences; the window where none is of 5 to 40 words.
        others: the document without it.
        window: 8 to 20 neighbouring words, as long as a question.
    """

    sentence: str
    others: str
    window: str


def cut_pieces(text: str, rng: np.random.Generator, *, most_words: int) -> Pieces | None:
    """Cut a text into pieces at random, or return None where it is too short for that.

    It must have 16 words and three sentences, or 64 words: the halves of one sentence say other
    things than it does, and finding one by the other chooses badly.

    Args:
        text: the document.
        rng: draws the sentence and the window.
        most_words: what comes after so many words is left out, as the encoder would not see it.
    """
    words = _words(text, most=most_words)
    if len(words) < _LEAST_WORDS:
        return None
    text = text[: words[-1][1]]
    window = _window(words, rng)
    sentences = sentence_spans(text)
    if len(sentences) < _LEAST_SENTENCES and len(words) < _MANY_WORDS:
        return None
    least, most = _SENTENCE_WORDS
    starts = [start for start, _ in words]
    fit = [
        (start, end)
        for start, end in sentences
        if least <= bisect_left(starts, end) - bisect_left(starts, start) <= most
    ]
    chosen = fit[rng.integers(len(fit))] if fit and len(sentences) > 1 else window
    others = f"{text[: chosen[0]].rstrip()} {text[chosen[1] :].lstrip()}".strip()
    return Pieces(_at(text, chosen), others, _at(text, window))


def _words(text: str, *, most: int) -> list[Span]:
    """Return the spans of words, or of characters where the text is hardly cut into words."""
    spans = [match.span() for match in islice(_WORD.finditer(text), most)]
    inside = sum(end - start for start, end in spans)
    if spans and inside / len(spans) > _LONGEST_WORD:
        return [match.span() for match in islice(_CHARACTER.finditer(text), most)]
    return spans


def _window(words: Sequence[Span], rng: np.random.Generator) -> Span:
    least, most = _WINDOW_WORDS
    length = min(int(rng.integers(least, most + 1)), len(words) // 2)
    start = int(rng.integers(len(words) - length + 1))
    return words[start][0], words[start + length - 1][1]


def _at(text: str, span: Span) -> str:
    return text[span[0] : span[1]]
