"""Passages: a long text cut into pieces that an encoder takes whole."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.tokenization import chunks, load_tokenizer, tokenizing
from whiten_index.errors import ConfigError, EncoderError

if TYPE_CHECKING:
    from whiten_index.encoding.spec import EncoderSpec

Span = tuple[int, int]

_CLOSING = "\"'”’»›)]}」』）】》〉"
_ENDINGS = frozenset(".!?…؟۔।॥")
# These end a sentence, and so a word, where no blank follows.
_CJK_ENDING = "。！？｡"
_BREAK = re.compile(rf"([{_CJK_ENDING}][{_CJK_ENDING}{re.escape(_CLOSING)}]*)\s*|\s+")
_BLANKS = re.compile(r"\s*")
_WORD, _LINE, _SENTENCE = 1, 2, 3
_MOST_CLOSING = 8


@dataclass(frozen=True)
class PassageConfig:
    """Size and overlap of the passages of a text."""

    # Most tokens of a passage that the model sees: special ones and the document prompt included.
    tokens: int
    overlap: int = 0  # most tokens of text that neighbours share, up to half of a passage's

    def __post_init__(self) -> None:
        if self.overlap >= self.tokens:
            raise ConfigError(
                f"--overlap {self.overlap} is not below --passage-tokens {self.tokens}; give fewer "
                "tokens to share"
            )


class PassageSplitter:
    """Cuts texts into passages at the offsets of an encoder's own tokens.

    ``room`` is the most tokens of text in a passage: its tokens less special ones and prompt.
    """

    def __init__(
        self, backend: Any, config: PassageConfig, *, prompt: str, lower_case: bool
    ) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.config = config
        self._backend, self._prompt, self._lower_case = backend, prompt, lower_case
        self.room = self._room()

    @classmethod
    def load(cls, spec: EncoderSpec, folder: ModelFolder, config: PassageConfig) -> PassageSplitter:
        """Load the tokenizer of an encoder, and nothing else of it."""
        if config.tokens > spec.max_length:
            raise ConfigError(
                f"--passage-tokens {config.tokens} is more than the limit of {spec.max_length} "
                f"tokens that {spec.model} is used with; give at most {spec.max_length}, or raise "
                f"--max-length (up to {folder.longest})"
            )
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

    @tokenizing()
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
        """Return for each row the tokens of its longest passage beyond the limit."""
        # Without a prompt, a whole text has the tokens that were counted.
        cut = [row for row in rows if self._prompt or len(found[row]) > 1]
        pieces = [(row, texts[row][start:end]) for row in cut for start, end in found[row]]
        too_many = dict.fromkeys(rows, 0)
        alone = [self._lowered(self._prompt + piece) for _, piece in pieces]
        tokens = (each for chunk in chunks(alone) for each in self._backend.encode_batch(chunk))
        for (row, _), encoding in zip(pieces, tokens, strict=True):
            too_many[row] = max(too_many[row], len(encoding) - self.config.tokens)
        return too_many

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


def _before_lowering(offsets: Sequence[Span], text: str) -> list[Span]:
    """Return offsets into ``text.lower()`` as offsets into ``text``: a few letters grow."""
    origin = [i for i, letter in enumerate(text) for _ in letter.lower()]
    origin.append(len(text))
    return [
        (origin[start], origin[end - 1] + 1 if end > start else origin[end])
        for start, end in offsets
    ]


def passage_spans(text: str, offsets: Sequence[Span], *, room: int, overlap: int = 0) -> list[Span]:
    """Return the character spans of a text's passages, in order.

    A text of at most ``room`` tokens is one passage, the whole of it. Of a longer one, each
    passage ends at the last sentence end in its second half (failing that a line's end), else
    between two words; inside a word only where that word alone is longer than ``room``. The next
    one starts so that it shares at most ``overlap`` tokens, at the start of a sentence where that
    shares at least half as many, else of a word. Every character that is not blank is inside a
    passage, no passage is inside another, and none starts or ends with a blank.
    """
    if len(offsets) <= room or not text.strip():
        return [(0, len(text))]
    return list(_Cutter(text, offsets, room, overlap).spans())


def sentence_spans(text: str) -> list[Span]:
    """Return the character spans of a text's sentences, in order; none starts or ends blank.

    A sentence ends as in ``passage_spans``: after its full stop, at an empty line, or with the
    text.
    """
    stop = len(text.rstrip())
    spans, start = [], len(text) - len(text.lstrip())
    for place in _breaks(text):
        if place.rank == _SENTENCE and start < place.end <= stop:
            spans.append((start, place.end))
            start = place.start
    return [*spans, (start, stop)] if stop > start else spans


class _Break(NamedTuple):
    """A place between two words: the end of one, the start of the next, and how good it is."""

    end: int
    start: int
    rank: int


def _breaks(text: str) -> Iterator[_Break]:
    for match in _BREAK.finditer(text):
        if match[1]:
            yield _Break(match.end(1), match.end(), _SENTENCE)
            continue
        end, start = match.span()
        lines = text.count("\n", end, start)
        last = text[end - 1 : end]
        if last and last in _CLOSING:
            last = text[max(end - _MOST_CLOSING, 0) : end].rstrip(_CLOSING)[-1:]
        rank = _SENTENCE if lines > 1 or last in _ENDINGS else _LINE if lines else _WORD
        yield _Break(end, start, rank)


class _Cutter:
    """Cuts one text; ``starts`` and ``ends`` of its tokens never fall."""

    def __init__(self, text: str, offsets: Sequence[Span], room: int, overlap: int) -> None:
        self.text, self.room, self.overlap = text, room, overlap
        self.starts = list(accumulate((start for start, _ in offsets), max))
        self.ends = list(accumulate((end for _, end in offsets), max))
        self.breaks = list(_breaks(text))
        self.length = len(text.rstrip())

    def spans(self) -> Iterator[Span]:
        """Yield the passages; each ends after the one before it, so there is an end to them."""
        start = end = self._blanks_end(0)
        while True:
            end = self._end(start, end)
            yield start, end
            if end >= self.length:
                return
            start = self._next_start(start, end)

    def _end(self, start: int, beyond: int) -> int:
        """Return the end of the passage from ``start``, after ``beyond``."""
        first, beyond = bisect_right(self.ends, start), max(start, beyond)
        if first + self.room >= bisect_left(self.starts, self.length):
            return self.length
        limit = self.starts[first + self.room]
        if limit <= beyond:
            return self._character_after(self._blanks_end(beyond))
        half = max(self.starts[first + self.room // 2], beyond)
        if found := self._ending(half, limit):
            return max(found, key=lambda place: (place.rank, place.end)).end
        found = self._ending(beyond, half)
        return found[-1].end if found else limit

    def _next_start(self, start: int, end: int) -> int:
        """Return the start of the passage after the one from ``start`` to ``end``."""
        following = self._blanks_end(end)
        last = bisect_left(self.starts, end)
        inside_a_word = following == end and not self._starting(end, end + 1)
        # What is shared must leave room for the word that follows, or for more of a long one.
        held = self._character_after(end) if inside_a_word else self._word_after(following)
        least = max(last - self.overlap, bisect_left(self.starts, held) - self.room)
        if least >= last:
            return following
        earliest = max(self.ends[least - 1] if least > 0 else 0, start + 1)
        half = last - self.overlap / 2
        ranked = [
            (place.rank if bisect_right(self.ends, place.start) <= half else _WORD, -place.start)
            for place in self._starting(earliest, end)
        ]
        if ranked:
            return -max(ranked)[1]
        return earliest if inside_a_word and earliest < end else following

    def _word_after(self, start: int) -> int:
        """Return the end of the word at ``start``, or of its first character if it is too long."""
        reach = bisect_right(self.ends, start) + self.room
        limit = self.starts[reach] if reach < len(self.starts) else len(self.text)
        if found := self._ending(start, limit):
            return found[0].end
        return limit if limit == len(self.text) else self._character_after(start)

    def _character_after(self, start: int) -> int:
        """Return the end of the character at ``start``, with all of its tokens."""
        stop = bisect_right(self.starts, start)
        end = self.starts[stop] if stop < len(self.starts) else len(self.text)
        while self.text[end - 1].isspace():
            end -= 1
        return end

    def _ending(self, after: int, until: int) -> list[_Break]:
        """Return the breaks whose word ends after ``after``, ``until`` at the latest."""
        low = bisect_right(self.breaks, after, key=lambda place: place.end)
        high = bisect_right(self.breaks, until, key=lambda place: place.end)
        return self.breaks[low:high]

    def _starting(self, begin: int, stop: int) -> list[_Break]:
        """Return the breaks whose next word starts from ``begin`` on, before ``stop``."""
        low = bisect_left(self.breaks, begin, key=lambda place: place.start)
        high = bisect_left(self.breaks, stop, key=lambda place: place.start)
        return self.breaks[low:high]

    def _blanks_end(self, position: int) -> int:
        """Return the first place from ``position`` on that is not blank."""
        match = _BLANKS.match(self.text, position)
        assert match is not None
        return match.end()
