"""Tokenise a window of texts: each different text once, sorted by length."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.prefetch import ahead
from whiten_index.encoding.model_files import loading_model
from whiten_index.errors import ConfigError, EncoderError, RefusedTextError, first_line

if TYPE_CHECKING:
    from whiten_index.encoding.models import ModelFolder
    from whiten_index.encoding.spec import EncoderSpec

# Texts and characters tokenised at once: the tokenizer's result is a hundred times their size.
_CHUNK_TEXTS, _CHUNK_CHARACTERS = 1024, 1 << 20
# Of a text that will be cut, so many characters for each token that is kept are read. English prose
# has about 5 a token, so 64 nearly always hold enough; where they do not (long runs of blanks, or
# words too long for the model), all of the text is read.
_CHARACTERS_A_TOKEN = 64


@dataclass(frozen=True, slots=True)
class TokenWindow:
    """Tokens of n texts, of which m differ; longest first, so that neighbours pad little."""

    ids: NDArray[np.int32]  # (total,), text after text
    offsets: NDArray[np.int64]  # (m + 1,), beginnings of the texts
    places: NDArray[np.int64]  # (n,), the number among the m of each text
    truncated: NDArray[np.bool_]  # (n,), True for a text cut to the length limit

    @property
    def lengths(self) -> NDArray[np.int64]:
        """(m,) tokens of each different text, falling."""
        return np.diff(self.offsets)


def tokenize(tokenizer: Any, texts: Sequence[str], *, max_length: int) -> TokenWindow:
    """Tokenise texts, cutting each to ``max_length`` tokens."""
    first: dict[str, int] = {}
    seen = [first.setdefault(text, len(first)) for text in texts]
    ids, lengths, cut = _tokens(tokenizer, list(first), max_length)
    order = np.argsort(-lengths, kind="stable")
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths[order], out=offsets[1:])
    starts = np.cumsum(lengths) - lengths
    # Place of each token of the sorted texts before sorting.
    source = np.arange(len(ids)) + np.repeat(starts[order] - offsets[:-1], lengths[order])
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order))
    rows = np.asarray(seen, dtype=np.int64)
    return TokenWindow(ids[source], offsets, places[rows], cut[rows])


def read_part(text: str, *, max_length: int, side: str) -> str:
    """Return the part of a query that is tokenised: few tokens of a longer one would be kept.

    ``side`` is where the tokenizer cuts: ``right`` or ``left``.
    """
    most = max_length * _CHARACTERS_A_TOKEN
    return text[:most] if side == "right" else text[-most:]


@contextmanager
def tokenizing() -> Iterator[None]:
    """Turn the errors of a tokenizer that cannot take a text into an ``EncoderError``."""
    try:
        yield
    except BaseException as error:
        # A panic of Rust derives from ``BaseException``; a token beyond 2³¹ overflows.
        if type(error).__name__ not in ("Exception", "PanicException", "OverflowError"):
            raise
        raise RefusedTextError(
            f"the tokenizer cannot take a text ({first_line(error)}); use the tokenizer that the "
            "model was trained with"
        ) from error


@tokenizing()
def _tokens(
    tokenizer: Any, texts: list[str], max_length: int
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.bool_]]:
    """Return token ids end to end, tokens of each text, and which were cut."""
    ids: list[NDArray[np.int32]] = [np.empty(0, dtype=np.int32)]
    lengths, cut = list[int](), list[bool]()
    # A text without tokens, such as one of unknown characters, gets a token of padding.
    empty = [int(tokenizer.pad_token_id or 0)]
    parts, read = list(chunks(texts)), _tokenizing(tokenizer, max_length)
    # Unpacking a chunk holds Python's lock, which tokenising the next one does not need. To start a
    # thread takes longer than to tokenise a query.
    with closing(ahead(parts, read) if len(parts) > 1 else (read(p) for p in parts)) as tokenized:
        for chunk in tokenized:
            rows = [text.ids or empty for text in chunk]
            counts = [len(row) for row in rows]
            lengths += counts
            ids.append(np.fromiter(chain.from_iterable(rows), np.int32, sum(counts)))
            cut += [bool(text.overflowing) for text in chunk]
    return np.concatenate(ids), np.array(lengths, np.int64), np.array(cut, np.bool_)


def chunks(texts: Sequence[str]) -> Iterator[list[str]]:
    """Yield texts in lists of bounded size; a text beyond the bound is a list alone."""
    chunk, characters = list[str](), 0
    for text in texts:
        full = len(chunk) == _CHUNK_TEXTS or characters + len(text) > _CHUNK_CHARACTERS
        if chunk and full:
            yield chunk
            chunk, characters = [], 0
        chunk.append(text)
        characters += len(text)
    if chunk:
        yield chunk


def _tokenizing(tokenizer: Any, max_length: int) -> Callable[[list[str]], Sequence[Any]]:
    """Return a function that tokenises texts; each result has ``ids`` and ``overflowing``."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:

        def slowly(texts: list[str]) -> list[Any]:
            whole = tokenizer(texts, truncation=False, verbose=False)["input_ids"]
            kept = tokenizer(texts, truncation=True, max_length=max_length)["input_ids"]
            both = zip(kept, whole, strict=True)
            return [SimpleNamespace(ids=k, overflowing=len(w) > max_length) for k, w in both]

        return slowly
    backend.no_padding()
    backend.enable_truncation(max_length, direction=tokenizer.truncation_side)
    encode: Callable[[list[str]], list[Any]] = backend.encode_batch_fast
    if tokenizer.truncation_side != "right" or backend.pre_tokenizer is None:
        return encode

    def of_beginnings(texts: list[str]) -> list[Any]:
        most = max_length * _CHARACTERS_A_TOKEN
        # They end with a word.
        ends = [text.rfind(" ", 0, most) if len(text) > most else -1 for text in texts]
        found = encode(
            [text[:end] if end > 0 else text for text, end in zip(texts, ends, strict=True)]
        )
        # Words are tokenised alone, so tokens are those of the whole text if as many are left over.
        again = [i for i, end in enumerate(ends) if end > 0 and len(found[i].overflowing) < 2]
        for i, tokens in zip(again, encode([texts[i] for i in again]), strict=True):
            found[i] = tokens
        return found

    return of_beginnings


def load_tokenizer(spec: "EncoderSpec", folder: "ModelFolder") -> Any:
    """Return a model's transformers tokenizer, fast where it has one."""
    import transformers
    from tokenizers import normalizers

    # Loading prints reports that no caller of this library wants.
    transformers.utils.logging.set_verbosity_error()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    with loading_model(f"the tokenizer of {spec.model}", folder.path):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder.path, **folder.loading)
        # Some classes hold two tokenizers and are none.
        _ = tokenizer.pad_token_id
        if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
            raise ValueError("it has no words; is a file missing, such as tokenizer.json?")
        backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        if spec.lower_case and backend is None:
            tokenizer.do_lower_case = True
        elif spec.lower_case:
            # Special tokens stay as they are, as in sentence-transformers.
            own, lowers = backend.normalizer, [normalizers.Lowercase()]
            backend.normalizer = normalizers.Sequence([*lowers, own] if own else lowers)
    return tokenizer


@tokenizing()
def require_room(tokenizer: Any, spec: "EncoderSpec", prompt: str) -> None:
    """Refuse a prompt that leaves no room for a text."""
    tokens = len(tokenizer(prompt, truncation=False, verbose=False)["input_ids"]) if prompt else 0
    if tokens >= spec.max_length:
        raise ConfigError(
            f"the prompt {prompt[:40]!r} has {tokens} tokens and leaves no room in the "
            f"{spec.max_length} of a text; use a shorter prompt or a greater --max-length"
        )


def require_known_tokens(
    ids: NDArray[np.integer], longest: int, spec: "EncoderSpec", vocabulary: int | None
) -> None:
    """Refuse tokens that the model has no embedding for, which would end a GPU's process.

    ``longest`` is how many the longest text has.
    """
    most = int(ids.max(initial=0))
    if vocabulary is not None and not 0 <= ids.min(initial=0) <= most < vocabulary:
        found = f"token {most}, and the model knows {vocabulary} tokens"
    elif longest > spec.max_length:
        found = f"{longest} tokens for a text cut to {spec.max_length}"
    else:
        return
    raise EncoderError(
        f"the tokenizer of {spec.model} gives {found}; use the tokenizer that the model was "
        "trained with"
    )
