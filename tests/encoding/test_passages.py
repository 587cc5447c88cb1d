"""Passages: where a text is cut, by properties; and that what is cut fits the encoder."""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from whiten_index.encoding.encoder_config import EncoderConfig
from whiten_index.encoding.load_encoder import resolve_encoder
from whiten_index.encoding.passages import PassageSplitter, passage_spans
from whiten_index.errors import ConfigError

Offsets = list[tuple[int, int]]
WORD = re.compile(r"[^\s。！？｡]*[。！？｡]+[。！？｡\"'”’»›)\]}」』）】》〉]*|[^\s。！？｡]+")
LETTERS = "aaabcde    .,!?\n\n。」\"'日é🎉\u200b"


def by_character(text: str) -> Offsets:
    return [(i, i + 1) for i, letter in enumerate(text) if not letter.isspace()]


def by_piece(text: str) -> Offsets:
    return [match.span() for match in re.finditer(r"\S{1,3}", text)]


def by_piece_with_its_blank(text: str) -> Offsets:
    return [match.span() for match in re.finditer(r"\s?\S{1,3}|\s+", text)]


def by_byte(text: str) -> Offsets:
    return [(i, i + 1) for i, letter in enumerate(text) for _ in letter.strip().encode()]


def by_word(text: str) -> Offsets:
    return [match.span() for match in re.finditer(r"\S+", text)]


STYLES = [by_character, by_piece, by_piece_with_its_blank, by_byte, by_word]


def touched(text: str, offsets: Offsets, start: int, end: int) -> list[int]:
    """Return which tokens have a character in the span, the blanks before a word not counted."""
    own = [(s + len(text[s:e]) - len(text[s:e].lstrip()), e) for s, e in offsets]
    return [i for i, (s, e) in enumerate(own) if s < end and e > start]


@settings(max_examples=400, deadline=None)
@given(
    st.text(LETTERS, min_size=1, max_size=150).filter(str.strip),
    st.sampled_from(STYLES),
    st.integers(1, 40),
    st.data(),
)
def test_passages_cover_the_text_fit_share_little_and_go_on(
    text: str, tokens: Callable[[str], Offsets], room: int, data: st.DataObject
) -> None:
    overlap = data.draw(st.integers(0, room - 1))
    offsets = tokens(text)
    spans = passage_spans(text, offsets, room=room, overlap=overlap)
    if len(offsets) <= room:
        assert spans == [(0, len(text))]
        return
    covered = {i for start, end in spans for i in range(start, end)}
    assert {i for i, letter in enumerate(text) if not letter.isspace()} <= covered
    words = [match.span() for match in WORD.finditer(text)]
    for start, end in spans:
        assert text[start:end] == text[start:end].strip() != ""
        assert len(touched(text, offsets, start, end)) <= room or end - start == 1
        for place in (start, end):
            inside = [(s, e) for s, e in words if s < place < e]
            assert all(len(touched(text, offsets, s, e)) > room for s, e in inside)
    for (start, end), (next_start, next_end) in itertools.pairwise(spans):
        assert start < next_start
        assert end < next_end
        assert next_start >= end or len(touched(text, offsets, next_start, end)) <= overlap


def cut(text: str, *, room: int, overlap: int = 0) -> list[str]:
    """Cut a text with a token a word."""
    spans = passage_spans(text, by_word(text), room=room, overlap=overlap)
    return [text[start:end] for start, end in spans]


def test_chinese_is_cut_at_its_sentences_and_else_where_the_room_ends() -> None:
    text = "今天天气很好。我们去公园！你呢？" * 2
    spans = passage_spans(text, by_character(text), room=12)
    pieces = [text[start:end] for start, end in spans]
    assert pieces == ["今天天气很好。", "我们去公园！你呢？"] * 2
    endless = "天" * 25
    spans = passage_spans(endless, by_character(endless), room=10, overlap=4)
    assert spans == [(0, 10), (6, 16), (12, 22), (18, 25)]


def byte_level() -> tokenizers.Tokenizer:
    """Return a small byte-level BPE, to which a word is another token than the same after a blank.

    Its vocabulary knows words after a blank only, so a passage has more tokens than in the text.
    """
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([" the king reads a small book. the bird sang!"] * 9, trainer)
    tokenizer.post_processor = tokenizers.processors.RobertaProcessing(
        ("</s>", 1), ("<s>", 0), trim_offsets=True, add_prefix_space=False
    )
    return tokenizer


def backend_of(model: str | Path | None) -> tokenizers.Tokenizer:
    folder = resolve_encoder(EncoderConfig(model=None if model is None else str(model)))[1]
    return transformers.AutoTokenizer.from_pretrained(folder.path).backend_tokenizer


@pytest.fixture(scope="module", params=["tiny", "minilm", "byte-level"])
def backend(request: pytest.FixtureRequest, tiny_model: Path) -> tokenizers.Tokenizer:
    if request.param == "byte-level":
        return byte_level()
    return backend_of(tiny_model if request.param == "tiny" else None)


MIXED = st.lists(
    st.one_of(
        st.sampled_from(["the", "king", "reads", "a", "small", "book.", "sang!", "e.g.", "\n\n"]),
        st.text("abcxyzéß日本。İΣ🎉-'0123.", min_size=1, max_size=30),
    ),
    min_size=1,
    max_size=80,
).map(lambda words: " ".join(words).strip())


@settings(max_examples=100, deadline=None)
@given(MIXED.filter(bool), st.integers(8, 40), st.data())
def test_a_passage_has_the_tokens_asked_for_at_most_when_it_is_encoded(
    backend: tokenizers.Tokenizer, text: str, tokens: int, data: st.DataObject
) -> None:
    overlap = data.draw(st.integers(0, 3))
    prompt = data.draw(st.sampled_from(["", "a: "])) if tokens > 12 else ""
    splitter = PassageSplitter(backend, tokens, overlap, prompt=prompt)
    (spans,) = splitter.split([text])
    covered = {i for start, end in spans for i in range(start, end)}
    assert {i for i, letter in enumerate(text) if not letter.isspace()} <= covered
    for start, end in spans:
        seen = prompt + text[start:end]
        assert len(backend.encode(seen)) <= tokens
    whole = len(backend.encode(prompt + text))
    if not prompt:
        assert (len(spans) == 1) == (whole <= tokens)
        assert whole > tokens or spans == [(0, len(text))]


def test_a_letter_that_lowering_makes_longer_counts_as_it_is_encoded() -> None:
    backend, text = byte_level(), "ßİ🎉"
    backend.normalizer = tokenizers.normalizers.Lowercase()
    splitter = PassageSplitter(backend, 10, prompt="")
    (spans,) = splitter.split([text])
    assert len(spans) > 1
    assert all(len(backend.encode(text[start:end])) <= 10 for start, end in spans)


def load(model: Path, tokens: int, overlap: int = 0, **options: Any) -> PassageSplitter:
    spec, folder = resolve_encoder(EncoderConfig(model=str(model), **options))
    return PassageSplitter.load(spec, folder, tokens, overlap)


@pytest.mark.parametrize(
    ("tokens", "overlap", "options", "message"),
    [
        (33, 0, {}, r"--passage-tokens 33 is more than the limit of 32 tokens"),
        (17, 0, {"max_length": 16},
            r"more than the limit of 16 tokens .*at most 16, or raise --max-length \(up to 32\)"),
        (2, 0, {}, r"leaves no room for text beside 2 special tokens; give at least 3"),
        (6, 0, {"document_prompt": "the old book, "}, r"2 special tokens and 4 of the prompt.* 7"),
        (16, 8, {}, r"--overlap 8 is more than half of the 14 tokens of text.*give at most 7"),
        (17, 8, {}, r"--overlap 8 is more than half of the 15 tokens of text.*give at most 7"),
        (3, 1, {}, r"--overlap 1 is more than half of the 1 tokens of text.*give at most 0"),
        (16, 6, {"document_prompt": "the old book, "},
            r"the 10 tokens of .* and 4 of the prompt\); give at most 5"),
    ],
)  # fmt: skip
def test_lengths_that_cannot_work_are_refused_in_words(
    tiny_model: Path, tokens: int, overlap: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tiny_model, tokens, overlap, **options)
