"""Passages: a long text cut into pieces that an encoder takes whole."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.tokenization import chunks, load_tokenizer
from whiten_index.errors import ConfigError, EncoderError

if TYPE_CHECKING:
    from whiten_index.encoding.spec import EncoderSpec


@dataclass(frozen=True)
class PassageConfig:
    """How texts are cut into passages.

    Attributes:
        tokens: tokens a passage at most, all that the model sees: special ones and the document
            prompt included.
        overlap: tokens of text that neighbours share at most, no more than half of a passage's.
    """

    tokens: int
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"--passage-tokens takes a positive number; {self.tokens} was given")
        if not 0 <= self.overlap < self.tokens:
            raise ConfigError(
                f"--overlap {self.overlap} is not below --passage-tokens {self.tokens}; give fewer "
                "tokens to share, 0 or more"
            )


class PassageSplitter:
    """Cuts texts into passages at the offsets of an encoder's own tokens.

    Attributes:
        config: what was asked for.
        room: tokens of text that a passage holds at most, N less special ones and prompt.
    """

    def __init__(
        self, backend: Any, config: PassageConfig, *, prompt: str = "", lower_case: bool = False
    ) -> None:
        """Take over a tokenizer.

        Raises:
            ConfigError: a passage has no room for text, or the overlap takes more than half of it.
        """
        backend.no_padding()
        backend.no_truncation()
        self.config = config
        self._backend, self._prompt, self._lower_case = backend, prompt, lower_case
        self.room = self._room()

    @classmethod
    def load(cls, spec: EncoderSpec, folder: ModelFolder, config: PassageConfig) -> PassageSplitter:
        """Load the tokenizer of an encoder, and nothing else of it.

        Raises:
            ConfigError: passages longer than the encoder's limit, or too short for text or for
                the overlap.
            EncoderError: the tokenizer cannot be loaded, or gives no offsets.
        """
        if config.tokens > spec.max_length:
            raise ConfigError(_too_long(spec, folder, config))
        tokenizer = load_tokenizer(spec, folder)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise EncoderError(
                f"the tokenizer of {spec.model} ({type(tokenizer).__name__}) is not a fast one: it "
                "does not say where in the text its tokens are, so no passages can be cut; leave "
                "out --passage-tokens (long texts are then cut off and counted), or choose a model "
                "whose folder has a tokenizer.json"
            )
        return cls(backend, config, prompt=spec.document_prompt, lower_case=spec.lower_case)

    def split(self, texts: Sequence[str]) -> list[list[Span]]:
        """Return the passages of each text as spans of its characters; see ``passage_spans``.

        With the prompt, each has at most N tokens when it is tokenised alone, which may give more
        of them than inside the text. The exception is a character that has more by itself.
        """
        return [spans for chunk in chunks(texts) for spans in self._split(chunk)]

    def _split(self, texts: list[str]) -> list[list[Span]]:
        offsets = self._offsets(texts)
        rooms = [self.room] * len(texts)
        found: list[list[Span]] = [[] for _ in texts]
        pending = list(range(len(texts)))
        while pending:
            for row in pending:
                overlap = min(self.config.overlap, rooms[row] // 2)
                found[row] = passage_spans(
                    texts[row], offsets[row], room=rooms[row], overlap=overlap
                )
            too_many = self._too_many(texts, found, pending)
            pending = [row for row in pending if too_many[row] > 0 and rooms[row] > 1]
            for row in pending:
                rooms[row] = max(rooms[row] - too_many[row], 1)
        return found

    def _too_many(
        self, texts: list[str], found: list[list[Span]], rows: list[int]
    ) -> dict[int, int]:
        """Return for each row how many tokens its longest passage has beyond the limit."""
        # Without a prompt, a whole text has the tokens that were counted.
        cut = [row for row in rows if self._prompt or len(found[row]) > 1]
        pieces = [(row, texts[row][start:end]) for row in cut for start, end in found[row]]
        too_many = dict.fromkeys(rows, 0)
        counts = self._counts([self._prompt + piece for _, piece in pieces])
        for (row, _), count in zip(pieces, counts, strict=True):
            too_many[row] = max(too_many[row], count - self.config.tokens)
        return too_many

    def _counts(self, texts: list[str]) -> Iterator[int]:
        """Yield how many tokens the model sees of each text."""
        for chunk in chunks(texts):
            lowered = [self._lowered(text) for text in chunk]
            yield from map(len, self._backend.encode_batch(lowered))

    def _offsets(self, texts: list[str]) -> list[list[Span]]:
        """Return the (start, end) of each text's tokens in the text as it was given."""
        lowered = [self._lowered(text) for text in texts]
        encodings = self._backend.encode_batch(lowered, add_special_tokens=False)
        return [
            encoding.offsets if len(low) == len(text) else _before_lowering(encoding.offsets, text)
            for text, low, encoding in zip(texts, lowered, encodings, strict=True)
        ]

    def _lowered(self, text: str) -> str:
        return text.lower() if self._lower_case else text

    def _room(self) -> int:
        special = self._backend.num_special_tokens_to_add(is_pair=False)
        # A blank that ends the prompt becomes part of the first word's token.
        lowered = self._lowered(self._prompt.rstrip())
        prompt = len(self._backend.encode(lowered, add_special_tokens=False))
        tokens, overlap = self.config.tokens, self.config.overlap
        room: int = tokens - special - prompt
        taken = f"{special} special tokens" + (f" and {prompt} of the prompt" if prompt else "")
        if room < 1:
            raise ConfigError(
                f"--passage-tokens {tokens} leaves no room for text beside {taken}; give at least "
                f"{special + prompt + 1}"
            )
        # Beyond half, a token more multiplies text, embeddings and work: each passage adds
        # only what it does not share, and a room of 126 with 120 shared makes 21 times the text.
        if overlap > room // 2:
            raise ConfigError(
                f"--overlap {overlap} is more than half of the {room} tokens of text in a passage "
                f"(--passage-tokens {tokens} less {taken}); give at most {room // 2}"
            )
        return room


def _too_long(spec: EncoderSpec, folder: ModelFolder, config: PassageConfig) -> str:
    if config.tokens > folder.longest:
        return (
            f"--passage-tokens {config.tokens} is more than the {folder.longest} tokens that "
            f"{spec.model} can take; give at most {min(spec.max_length, folder.longest)}"
        )
    return (
        f"--passage-tokens {config.tokens} is more than the limit of {spec.max_length} tokens "
        f"that {spec.model} is used with; give at most {spec.max_length}, or raise --max-length "
        f"(up to {folder.longest})"
    )


def _before_lowering(offsets: Sequence[Span], text: str) -> list[Span]:
    """Return offsets into ``text.lower()`` as offsets into ``text``: a few letters grow."""
    origin = [i for i, letter in enumerate(text) for _ in letter.lower()]
    origin.append(len(text))
    return [
        (origin[start], origin[end - 1] + 1 if end > start else origin[end])
        for start, end in offsets
    ]


Span = tuple[int, int]

_CLOSING = "\"'”’»›)]}」』）】》〉"
_ENDING = ".!?…؟۔।॥"
# These end a sentence, and so a word, where no blank follows.
_CJK_ENDING = "。！？｡"
_BREAK = re.compile(rf"([{_CJK_ENDING}][{_CJK_ENDING}{re.escape(_CLOSING)}]*)\s*|\s+")
_MOST_CLOSING = 8
_BLANKS = re.compile(r"\s*")
_WORD, _LINE, _SENTENCE = 1, 2, 3


class _Break(NamedTuple):
    """A place between two words.

    Attributes:
        end: where the word before it ends.
        start: where the word after it starts.
        rank: how good a place to cut it is.
    """

    end: int
    start: int
    rank: int


def passage_spans(text: str, offsets: Sequence[Span], *, room: int, overlap: int = 0) -> list[Span]:
    """Return the character spans of a text's passages, in order.

    A text of at most ``room`` tokens is one passage, the whole of it. Of a longer one, each
    passage ends at the last sentence end in its second half (failing that a line's end), else
    between two words; inside a word only where that word alone is longer than ``room``. The next
    one starts so that it shares at most ``overlap`` tokens, at the start of a sentence where that
    shares at least half as many, else of a word. Every character that is not blank is inside a
    passage, no passage lies inside another, and none starts or ends with a blank.
    """
    if not 0 <= overlap < room:
        raise ValueError(f"overlap {overlap} is not between 0 and room {room}")
    if len(offsets) <= room or not text.strip():
        return [(0, len(text))]
    return list(_Cutter(text, _Tokens.of(offsets), room, overlap).spans())


def sentence_spans(text: str) -> list[Span]:
    """Return the character spans of a text's sentences, in order; none starts or ends blank.

    A sentence ends where ``passage_spans`` sees one end: behind its full stop, at an empty line,
    or with the text.
    """
    spans, start = [], _blanks_end(text, 0)
    for match in _BREAK.finditer(text, start):
        end = match.start() if match[1] is None else match.end(1)
        if end > start and (match[1] is not None or _rank(text, match) == _SENTENCE):
            spans.append((start, end))
            start = match.end()
    end = len(text.rstrip())
    return [*spans, (start, end)] if end > start else spans


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a text, to be asked by character.

    Attributes:
        starts: where each begins, not falling.
        ends: where each ends, not falling.
    """

    starts: list[int]
    ends: list[int]

    @classmethod
    def of(cls, offsets: Sequence[Span]) -> _Tokens:
        starts, ends, start, end = [], [], 0, 0
        for token_start, token_end in offsets:
            start, end = max(start, token_start), max(end, token_end)
            starts.append(start)
            ends.append(end)
        return cls(starts, ends)

    def __len__(self) -> int:
        return len(self.starts)

    def first(self, start: int) -> int:
        """Return the first token of a passage that starts at character ``start``."""
        return bisect_right(self.ends, start)

    def stop(self, end: int) -> int:
        """Return the token after the last one of a passage that ends at character ``end``."""
        return bisect_left(self.starts, end)


@dataclass(frozen=True)
class _Cutter:
    text: str
    tokens: _Tokens
    room: int
    overlap: int

    def spans(self) -> Iterator[Span]:
        """Yield the passages; each ends behind the one before it, so there is an end to them."""
        length = len(self.text.rstrip())
        start = _blanks_end(self.text, 0)
        end = start
        while True:
            end = self._end(start, end, length)
            yield start, end
            if end >= length:
                return
            start = self._next_start(start, end)

    def _end(self, start: int, beyond: int, length: int) -> int:
        """Return where the passage from ``start`` ends, behind ``beyond``."""
        first, beyond = self.tokens.first(start), max(start, beyond)
        if first + self.room >= self.tokens.stop(length):
            return length
        limit = self.tokens.starts[first + self.room]
        if limit <= beyond:
            return self._character_after(_blanks_end(self.text, beyond))
        half = max(self.tokens.starts[first + self.room // 2], beyond)
        # All of the blanks at the limit, since a paragraph ends with two line ends.
        stop = _blanks_end(self.text, limit)
        found = [place for place in self._breaks(half, stop) if half < place.end <= limit]
        if not found:
            places = self._breaks(beyond, _blanks_end(self.text, half))
            found = [place._replace(rank=_WORD) for place in places if beyond < place.end <= half]
        if not found:
            return limit
        return max(found, key=lambda place: (place.rank, place.end)).end

    def _next_start(self, start: int, end: int) -> int:
        """Return where the passage after the one from ``start`` to ``end`` starts."""
        tokens, following = self.tokens, _blanks_end(self.text, end)
        last = tokens.stop(end)
        inside_a_word = following == end and not self._is_break(end)
        # What is shared must leave room for the word that follows, or for more of a long one.
        held = self._character_after(end) if inside_a_word else self._word_after(following)
        least = max(last - self.overlap, tokens.stop(held) - self.room)
        if least >= last:
            return following
        earliest = max(tokens.ends[least - 1] if least > 0 else 0, start + 1)
        found = [p for p in self._breaks(earliest, end) if earliest <= p.start < end]
        half = last - self.overlap / 2
        ranked = [p if tokens.first(p.start) <= half else p._replace(rank=_WORD) for p in found]
        if ranked:
            return max(ranked, key=lambda place: (place.rank, -place.start)).start
        return earliest if inside_a_word and earliest < end else following

    def _word_after(self, start: int) -> int:
        """Return the end of the word at ``start``, or of its first character if it is too long."""
        first = self.tokens.first(start)
        reach = first + self.room
        limit = self.tokens.starts[reach] if reach < len(self.tokens) else len(self.text)
        ends = (place.end for place in self._breaks(start, _blanks_end(self.text, limit)))
        end = next((end for end in ends if start < end <= limit), None)
        if end is None and limit == len(self.text):
            end = limit
        return self._character_after(start) if end is None else end

    def _character_after(self, start: int) -> int:
        """Return the end of the character at ``start``, with all of its tokens."""
        stop = bisect_right(self.tokens.starts, start)
        end = self.tokens.starts[stop] if stop < len(self.tokens) else len(self.text)
        while self.text[end - 1].isspace():
            end -= 1
        return end

    def _is_break(self, position: int) -> bool:
        return any(place.start == position for place in self._breaks(position, position))

    def _breaks(self, start: int, stop: int) -> Iterator[_Break]:
        """Yield the places between words, from the one that ``start`` is in or behind."""
        while start > 0 and self.text[start - 1].isspace():
            start -= 1
        # A full stop and the quotes that close behind it are seen as a whole.
        least, most = max(start - _MOST_CLOSING, 0), min(stop + _MOST_CLOSING, len(self.text))
        while start > least and self.text[start - 1] in _CJK_ENDING + _CLOSING:
            start -= 1
        while stop < most and self.text[stop] in _CJK_ENDING + _CLOSING:
            stop += 1
        for match in _BREAK.finditer(self.text, start, stop):
            end = match.start() if match[1] is None else match.end(1)
            yield _Break(end, match.end(), _SENTENCE if match[1] else _rank(self.text, match))


def _rank(text: str, match: re.Match[str]) -> int:
    """Tell what blanks between two words part: sentences, lines or words."""
    lines = match[0].count("\n")
    if lines > 1 or _ends_sentence(text, match.start()):
        return _SENTENCE
    return _LINE if lines else _WORD


def _ends_sentence(text: str, end: int) -> bool:
    """Tell whether the word that ends at ``end`` ends a sentence, closing quotes passed over."""
    while end > 0 and text[end - 1] in _CLOSING:
        end -= 1
    return end > 0 and text[end - 1] in _ENDING


def _blanks_end(text: str, position: int) -> int:
    """Return the first place from ``position`` on that is not blank."""
    match = _BLANKS.match(text, position)
    assert match is not None
    return match.end()
