"""A document against itself: what is cut out of a text is in it, and what is left is the rest."""

from __future__ import annotations

import re
import time

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.whitening_helpers import quick, seeds
from whiten_index.encoding.spans import sentence_spans
from whiten_index.pieces import Pieces, cut_pieces

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
@given(prose(), seeds)
def test_windows_start_and_end_between_words(text, seed):
    found = cut(text, seed)
    assume(found is not None)
    padded = f" {' '.join(text.split())} "
    assert f" {' '.join(found.window.split())} " in padded


def test_a_sentence_is_one_of_the_text_and_each_that_fits_is_drawn():
    long, short = " ".join(["word"] * 41) + ".", "Two words."
    fit = [f"Here is sentence number {i}." for i in range(6)]
    text = " ".join([short, *fit[:3], long, *fit[3:], short])
    drawn = {pieces_of(text, seed).sentence for seed in range(100)}
    assert drawn == set(fit)


@pytest.mark.parametrize("lengths", [(65,), (90,), (41, 45), (4, 80)])
def test_of_one_sentence_or_those_that_do_not_fit_some_words_are_taken(lengths):
    text = " ".join(f"{'word ' * (n - 1)}end{i}." for i, n in enumerate(lengths))
    for seed in range(20):
        found = pieces_of(text, seed)
        assert found.sentence == found.window
        assert 8 <= len(found.sentence.split()) <= 20
        assert len(found.others.split()) >= len(text.split()) / 2


def test_a_sentence_is_drawn_of_a_long_text_of_two():
    first, second = f"{'first ' * 34}end.", f"{'second ' * 34}end."
    assert {pieces_of(f"{first} {second}", i).sentence for i in range(30)} == {first, second}


@pytest.mark.parametrize(
    ("lengths", "there"),
    [
        ((), False),
        ((1,), False),
        ((5, 5, 5), False),  # 15 words
        ((5, 5, 6), True),  # 16, in three sentences
        ((16,), False),
        ((8, 8), False),
        ((63,), False),
        ((31, 32), False),
        ((64,), True),
        ((32, 32), True),
        ((1,) * 16, True),
    ],
)
def test_a_text_has_16_words_in_three_sentences_or_64_to_be_cut(lengths, there):
    """The halves of one sentence say other things than it does."""
    text = " ".join(f"{'word ' * (n - 1)}end{i}." for i, n in enumerate(lengths))
    assert (cut(text) is not None) is there
    assert (cut(f"  \n{text}\t ") is not None) is there


@pytest.mark.parametrize("text", ["", " \n ", "。", "a" * 5000])
def test_what_has_no_words_is_not_cut_or_is_cut_by_characters(text):
    found = cut(text)
    assert found is None or is_rest(text, found.sentence, found.others)


@quick
@given(seeds, st.integers(24, 200))
def test_what_the_encoder_would_not_see_is_left_out(seed, most_words):
    found = pieces_of(PROSE, seed, most_words)
    assert is_rest(" ".join(PROSE.split()[:most_words]), found.sentence, found.others)
    assert pieces_of(f"{PROSE} And more of it, in the end.", seed, most_words) == found


def test_an_encoder_of_few_tokens_sees_too_little_to_cut():
    assert cut(PROSE, most_words=15) is None
    assert cut(PROSE, most_words=40) is not None


SCRIPTS = {
    "Chinese": "白日依山尽而黄河入海流。欲穷千里目更上一层楼！"
    "春眠不觉晓处处闻啼鸟。夜来风雨声花落知多少？",
    "Japanese": "これはとても長い文章です。猫が窓辺で静かに眠っています。"
    "明日は雨が降るでしょうか？はい、たぶん。",
    "Thai": "แม่น้ำไหลลงสู่ทะเลอย่างช้าๆในยามเย็นที่เงียบสงบของหมู่บ้านเล็กๆริมฝั่งน้ำอันห่างไกล",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_in_scripts_without_blanks_a_character_counts_as_a_word(name):
    text = SCRIPTS[name]
    for seed in range(30):
        found = pieces_of(text, seed)
        assert found.sentence in text
        assert found.window in text
        assert 8 <= len(found.window) <= 20
        assert 5 <= len(found.sentence) <= 40
        assert is_rest(text, found.sentence, found.others)
    assert cut(text[:15]) is None


def test_chinese_sentences_are_cut_where_they_end():
    text = SCRIPTS["Chinese"]
    sentences = set(re.findall(r"[^。！？]+[。！？]", text))
    assert {pieces_of(text, seed).sentence for seed in range(60)} == sentences


def test_the_same_draw_cuts_the_same_and_another_one_elsewhere():
    assert cut(PROSE, 3) == cut(PROSE, 3)
    assert len({cut(PROSE, seed) for seed in range(20)}) > 10


def test_a_book_is_cut_in_a_moment():
    """The work must grow as the text does, not as its square: encoders take 32,768 tokens."""
    book = " ".join(f"Here is sentence number {i} of a very long book." for i in range(2_500))
    started = time.process_time()
    assert cut(book, most_words=32_768) is not None
    assert time.process_time() - started < 0.5


# --------------------------------------------------------------------------- sentences


@pytest.mark.parametrize(
    "sentences",
    [
        ["One."],
        ["One is here.", "Two is there!", "Is three?"],
        ['He said: "No."', "(Then he left.)", "She stayed…"],
        ["Prices rose 3.5 per cent.", "See example.org for more."],
        ["No full stop here"],
        ["Ends with a dot.", "and one without"],
        ["Это первое.", "Второе!", "यह है।", "هل هذا؟"],
    ],
)
@pytest.mark.parametrize("between", [" ", "\n", "   ", "\n\n"])
def test_sentences_joined_by_blanks_are_found_again(sentences, between):
    text = between.join(sentences)
    assert [text[a:b] for a, b in sentence_spans(text)] == sentences


def test_a_full_stop_of_chinese_ends_a_sentence_where_no_blank_follows():
    text = "第一句。第二句！“第三句？”第四"
    sentences = [text[a:b] for a, b in sentence_spans(text)]
    assert sentences == ["第一句。", "第二句！", "“第三句？”", "第四"]


def test_an_empty_line_ends_a_sentence_and_a_line_end_does_not():
    text = "A title\n\nand a line\nthat goes on"
    assert [text[a:b] for a, b in sentence_spans(text)] == ["A title", "and a line\nthat goes on"]


@quick
@given(st.text(st.sampled_from('ab .!?\n\t。！”")…'), max_size=40))
def test_sentences_are_in_order_without_blank_ends_and_leave_nothing_out(text):
    spans = sentence_spans(text)
    assert without_blanks("".join(text[a:b] for a, b in spans)) == without_blanks(text)
    assert all(a < b for a, b in spans)
    assert all(spans[i][1] <= spans[i + 1][0] for i in range(len(spans) - 1))
    assert all(text[a:b] == text[a:b].strip() for a, b in spans)
