"""Passages: a long text cut into pieces that an encoder takes whole."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
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
_INSIDE, _WORD, _LINE, _SENTENCE = range(4)
_MOST_CLOSING = 8


class PassageSplitter:
    """Cuts texts into passages at the offsets of an encoder's own tokens.

    The model sees at most ``tokens`` of a passage, special ones and the document prompt included.
    ``room`` are those of its text, of which neighbours share at most ``overlap``, up to half.
    """

    def __init__(self, backend: Any, tokens: int, overlap: int = 0, *, prompt: str) -> None:
        backend.no_padding()
        backend.no_truncation()
        self.tokens, self.overlap = tokens, overlap
        self._backend, self._prompt = backend, prompt
        self.room = self._room()

    @classmethod
    def load(
        cls, spec: EncoderSpec, folder: ModelFolder, tokens: int, overlap: int = 0
    ) -> PassageSplitter:
        """Load the tokenizer of an encoder, and nothing else of it."""
        if tokens > spec.max_length:
            raise ConfigError(
                f"--passage-tokens {tokens} is more than the limit of {spec.max_length} "
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
        return cls(backend, tokens, overlap, prompt=spec.document_prompt)

    @tokenizing()
    def split(self, texts: Sequence[str]) -> list[list[Span]]:
        """Return the passages of each text as spans of its characters; see ``passage_spans``.

        With the prompt, each has at most N tokens when it is tokenised alone, which may give more
        of them than inside the text. The exception is a character that has more by itself.
        """
        return [spans for chunk in chunks(texts) for spans in self._split(chunk)]

    def _split(self, texts: list[str]) -> list[list[Span]]:
        encode = self._backend.encode_batch
        offsets = [encoding.offsets for encoding in encode(texts, add_special_tokens=False)]
        rooms = [self.room] * len(texts)
        found: list[list[Span]] = [[] for _ in texts]
        pending = list(range(len(texts)))
        while pending:
            for row in pending:
                overlap = min(self.overlap, rooms[row] // 2)
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
        alone = [self._prompt + piece for _, piece in pieces]
        tokens = (each for chunk in chunks(alone) for each in self._backend.encode_batch(chunk))
        for (row, _), encoding in zip(pieces, tokens, strict=True):
            too_many[row] = max(too_many[row], len(encoding) - self.tokens)
        return too_many

    @tokenizing()
    def _room(self) -> int:
        special = self._backend.num_special_tokens_to_add(is_pair=False)
        # A blank that ends the prompt becomes part of the first word's token.
        prompt = len(self._backend.encode(self._prompt.rstrip(), add_special_tokens=False))
        tokens, overlap = self.tokens, self.overlap
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
    # Neither falls.
    starts = list(accumulate((start for start, _ in offsets), max))
    ends = list(accumulate((end for _, end in offsets), max))
    parts = [part for word in _words(text) for part in _fitting(word, starts, ends, room)]
    # Parts i to j have tokens first[i] to last[j], the last not included.
    first = [bisect_right(ends, part.start) for part in parts]
    last = [bisect_left(starts, part.end) for part in parts]

    def rank(part: int, *, counts: bool) -> int:
        return parts[part].rank if counts else min(parts[part].rank, _WORD)

    spans, begin, stop = list[Span](), 0, 0
    while True:
        # Each passage ends after the one before it.
        done, stop = stop, max(bisect_right(last, first[begin] + room), stop + 1)
        if stop < len(parts):
            middle = first[begin] + room // 2
            ranked = [(rank(part, counts=last[part] > middle), part) for part in range(done, stop)]
            stop = max(ranked)[1] + 1
        spans.append((parts[begin].start, parts[stop - 1].end))
        if stop == len(parts):
            return spans
        # What is shared leaves room for the part that follows.
        end, half = last[stop - 1], last[stop - 1] - overlap / 2
        least = max(end - overlap, last[stop] - room)
        shared = range(bisect_left(first, least, begin + 1, stop), stop if least < end else 0)
        begins = [(rank(part - 1, counts=first[part] <= half), -part) for part in shared]
        begin = -max(begins)[1] if begins else stop


def sentence_spans(text: str) -> list[Span]:
    """Return the character spans of a text's sentences, in order; none starts or ends blank.

    A sentence ends as in ``passage_spans``: after its full stop, at an empty line, or with the
    text.
    """
    spans, start = list[Span](), None
    for word in _words(text):
        start = word.start if start is None else start
        if word.rank == _SENTENCE:
            spans.append((start, word.end))
            start = None
    return spans


class _Part(NamedTuple):
    """A word or a part of one, and how good a place its end is to cut."""

    start: int
    end: int
    rank: int


def _words(text: str) -> Iterator[_Part]:
    """Yield the words of a text; the last one ends a sentence."""
    start, stop = 0, len(text.rstrip())
    for match in _BREAK.finditer(text, 0, stop):
        end, rank = match.end(1), _SENTENCE
        if not match[1]:
            end, lines = match.start(), match[0].count("\n")
            last = text[max(end - _MOST_CLOSING, 0) : end].rstrip(_CLOSING)[-1:]
            rank = _SENTENCE if lines > 1 or last in _ENDINGS else _LINE if lines else _WORD
        if end > start:
            yield _Part(start, end, rank)
        start = match.end()
    if stop > start:
        yield _Part(start, stop, _SENTENCE)


def _fitting(word: _Part, starts: list[int], ends: list[int], room: int) -> Iterator[_Part]:
    """Yield a word, or its tokens if it has more than ``room``."""
    first, last = bisect_right(ends, word.start), bisect_left(starts, word.end)
    start = word.start
    for place in starts[first:last] if last - first > room else ():
        if place > start:
            yield _Part(start, place, _INSIDE)
            start = place
    yield _Part(start, word.end, word.rank)
