"""A document against itself: what is cut out of a text is in it, and what is left is the rest."""

import re

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.helpers.transforms import quick, seeds
from whiten_index.encoding.passages import sentence_spans
from whiten_index.pipeline.pseudo_queries import Pieces, cut_pieces

WORDS = ("river", "the", "König", "of", "东", "x", "3.14", "co-operate", "42", "🙂", "don't")
MANY = 10_000
PROSE = " ".join(f"Sentence number {i} is {'very ' * (i % 7)}short here." for i in range(40))


def cut(text: str, seed: int = 0, most_words: int = MANY) -> Pieces | None:
    return cut_pieces(text, np.random.default_rng(seed), most_words=most_words)


def pieces_of(text: str, seed: int = 0, most_words: int = MANY) -> Pieces:
    found = cut(text, seed, most_words)
    assert found is not None
    return found


def without_blanks(text: str) -> str:
    return re.sub(r"\s", "", text)


def is_rest(text: str, sentence: str, others: str) -> bool:
    """Whether the text is the others with the sentence put back somewhere, blanks aside."""
    whole, part, rest = map(without_blanks, (text, sentence, others))
    return len(whole) == len(part) + len(rest) and any(
        rest[:at] + part + rest[at:] == whole for at in range(len(rest) + 1)
    )


@st.composite
def prose(draw):
    """Sentences of 1 to 45 words; blanks and line ends between them as they come."""
    lengths = draw(st.lists(st.integers(1, 45), min_size=1, max_size=12))
    rng = np.random.default_rng(draw(seeds))
    blank = draw(st.sampled_from([" ", "  ", "\n", "\n\n", "\t"]))
    sentences = [" ".join(rng.choice(WORDS, size=n)) + rng.choice([".", "!", "?"]) for n in lengths]
    return draw(st.sampled_from(["", " ", "\n"])) + blank.join(sentences) + blank


@quick
@given(prose(), seeds)
def test_pieces_are_in_the_text_and_the_others_are_what_is_left(text, seed):
    found = cut(text, seed)
    assume(found is not None)
    for piece in (found.sentence, found.window):
        assert piece in text
        assert piece == piece.strip()
    assert found.others == found.others.strip()
    assert is_rest(text, found.sentence, found.others)
    assert found.others
    assert 8 <= len(found.window.split()) <= 20
    assert 5 <= len(found.sentence.split()) <= 40


@quick
@given(seeds, st.integers(24, 200))
def test_what_the_encoder_would_not_see_is_left_out(seed, most_words):
    found = pieces_of(PROSE, seed, most_words)
    assert is_rest(" ".join(PROSE.split()[:most_words]), found.sentence, found.others)
    assert pieces_of(f"{PROSE} And more of it, in the end.", seed, most_words) == found


@quick
@given(st.text(st.sampled_from('ab .!?\n\t。！”")…'), max_size=40))
def test_sentences_are_in_order_without_blank_ends_and_leave_nothing_out(text):
    spans = sentence_spans(text)
    assert without_blanks("".join(text[a:b] for a, b in spans)) == without_blanks(text)
    assert all(a < b for a, b in spans)
    assert all(spans[i][1] <= spans[i + 1][0] for i in range(len(spans) - 1))
    assert all(text[a:b] == text[a:b].strip() for a, b in spans)
