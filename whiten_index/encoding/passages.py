"""Passages: a long text cut into pieces that an encoder takes whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from whiten_index.encoding.batching import chunks
from whiten_index.encoding.loading import load_tokenizer
from whiten_index.encoding.models import ModelFolder
from whiten_index.encoding.spans import Span, passage_spans
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

        Args:
            backend: a ``tokenizers.Tokenizer`` that nothing else uses: its settings change here.
            config: how to cut.
            prompt: put before every passage when it is encoded.
            lower_case: whether prompt and passage are lowered before the tokenizer.

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
