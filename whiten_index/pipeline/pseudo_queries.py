"""Pseudo-queries: pieces of documents that a transform is chosen by if there are no labels."""

import math
import re
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from whiten_index.corpus.batches import ID, TextBatch
from whiten_index.encoding.passages import Span, sentence_spans
from whiten_index.encoding.spec import RemoteSpec, recorded_spec
from whiten_index.errors import CorpusError
from whiten_index.store.dtypes import StoreDtype, as_kept
from whiten_index.store.sampling import drawn_parts, drawn_rows, ids_of, row_starts
from whiten_index.store.segments import digests_name
from whiten_index.whitening.selection import LEAST_SAMPLE

if TYPE_CHECKING:
    from whiten_index.pipeline.encode import EncodeReport
    from whiten_index.pipeline.shard_encoding import ShardWork
    from whiten_index.progress import Progress

_MOST_CANDIDATES = 5_000
# Texts looked at for one that is long enough.
_TRIES = 20
# Below this share of texts long enough, the corpus is one of short texts.
_LEAST_SHARE = 0.2
_CHUNK_CHARACTERS = 100_000
# The sample must not depend on how fast or busy the machine is, so tokens bound it, not seconds.
_MOST_TOKENS = 250_000
# This share of the corpus is encoded whatever its tokens: it adds as little to the whole build.
_SHARE_OF_CORPUS = 0.04
# The first number changes whenever the pieces of the same text would differ.
RECIPE = (1, _MOST_TOKENS, _SHARE_OF_CORPUS)
_LEAST_WORDS, _MANY_WORDS = 16, 64
_LEAST_SENTENCES = 3
_SENTENCE_WORDS = (5, 40)
_WINDOW_WORDS = (8, 20)
# Scripts without blanks have "words" of a whole clause: there a character stands for a word.
_LONGEST_WORD = 16
_WORD = re.compile(r"\S+")
_CHARACTER = re.compile(r"\S")


@dataclass(frozen=True, eq=False)
class Sample:
    """Embeddings (m, d) of the pieces of m documents, sentences and windows as queries.

    ``rows`` (m,) are the documents' row numbers, ``candidates`` (n,) these and others at random.
    """

    rows: NDArray[np.int64]
    candidates: NDArray[np.int64]
    sentences: NDArray[np.floating]
    others: NDArray[np.floating]
    windows: NDArray[np.floating]

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of one document: a sentence, the document without it, and a window of words.

    The sentence is the window if none is of 5 to 40 words. The window has 8 to 20 words, as long as
    a question.
    """

    sentence: str
    others: str
    window: str


def sample_pieces(encoded: "EncodeReport", size: int, seed: int) -> Sample | str:
    """Return a sample of up to ``size`` documents, or the reason why none can be drawn.

    No more than half of the corpus is drawn. A sample that was drawn before is in the store.
    """
    store, record, work = encoded.store, encoded.record, encoded.work
    spec = recorded_spec(store.encoder)
    key = {
        "corpus": record.fingerprint,
        "recipe": list(RECIPE),
        "size": size,
        "seed": seed,
        # Sentences and windows are encoded as queries, and the store is named by its documents.
        "query_encoder": spec and spec.query_fingerprint,
    }
    shapes = {"rows": "m", "candidates": "n", "sentences": "md", "others": "md", "windows": "md"}
    if (kept := store.results.sample(key, shapes)) is not None:
        return Sample(**kept)
    if work is None or work.corpus.dim is not None:
        return "there are no texts to cut into pieces, only embeddings"
    if record.rows < 2 * LEAST_SAMPLE:
        return f"{record.rows} documents are too few to choose from"
    rng, size = np.random.default_rng(seed), min(size, record.rows // 2)
    with encoded.stages.stage("draw pieces", size):
        cut = draw_pieces(encoded, work, size, rng)
    if isinstance(cut, str):
        return cut
    with encoded.stages.stage("encode pieces", len(cut)) as watcher:
        always = max(LEAST_SAMPLE, math.ceil(_SHARE_OF_CORPUS * record.rows))
        parts = list(_encoded(work, [pieces for _, pieces in cut], always, watcher))
    # As the store keeps them, so that a sample found again chooses the same.
    embeddings = [
        as_kept(np.concatenate(part), StoreDtype.FLOAT16) for part in zip(*parts, strict=True)
    ]
    rows = np.array([row for row, _ in cut[: len(embeddings[0])]], dtype=np.int64)
    sample = Sample(rows, _candidates(encoded, work, rows, rng), *embeddings)
    store.results.save_sample(key, vars(sample))
    return sample


def draw_pieces(
    encoded: "EncodeReport", work: "ShardWork", size: int, rng: np.random.Generator
) -> list[tuple[int, Pieces]] | str:
    """Return up to ``size`` documents long enough, by row number, with their pieces."""
    most_words = int(work.store.encoder.get("max_length", RemoteSpec.max_length))
    found, seen, tried = list[tuple[int, Pieces]](), set[object](), 0
    for row, document, text in _drawn_texts(encoded, work, rng):
        if len(found) >= size or tried >= _TRIES * size:
            break
        if document in seen:
            # Passages of one document are no wrong answers to each other.
            continue
        tried += 1
        if (pieces := cut_pieces(text, rng, most_words=most_words)) is not None:
            found.append((row, pieces))
            seen.add(document)
    if len(found) < _LEAST_SHARE * tried:
        return f"{tried - len(found):,} of {tried:,} texts are too short to cut in pieces"
    if len(found) < LEAST_SAMPLE:
        return f"{len(found)} documents are too few to choose from"
    return found


def _drawn_texts(
    encoded: "EncodeReport", work: "ShardWork", rng: np.random.Generator
) -> Iterator[tuple[int, object, str]]:
    """Yield row numbers, ids and texts of a few shards, in an order drawn at random."""
    record, starts = encoded.record, row_starts(encoded.record)
    texts: list[tuple[int, object, str]] = []
    for position in drawn_parts(record, rng):
        batch = work.batch_of(work.corpus.shards[position])
        if digests_name(work.digests_of(batch)) != record.parts[position].digests:
            raise CorpusError("the corpus changed after it was encoded; run the same command again")
        assert isinstance(batch, TextBatch)
        rows = range(starts[position], starts[position + 1])
        texts += zip(rows, batch.documents[ID].to_pylist(), batch.texts, strict=True)
    return (texts[place] for place in rng.permutation(len(texts)))


def _candidates(
    encoded: "EncodeReport", work: "ShardWork", rows: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return ``rows`` and after them rows of other documents, without repeats."""
    more = drawn_rows(encoded.record, _MOST_CANDIDATES, rng)
    more = more[~np.isin(more, rows)]
    if work.splitter is not None:
        own = set(ids_of(encoded.store, encoded.record, rows))
        names = ids_of(encoded.store, encoded.record, more)
        more = more[[name not in own for name in names]]
    return np.concatenate([rows, more[: max(_MOST_CANDIDATES - len(rows), 0)]])


def _encoded(
    work: "ShardWork", pieces: list[Pieces], always: int, watcher: "Progress"
) -> Iterator[list[NDArray[np.float32]]]:
    """Yield embeddings of ``_MOST_TOKENS`` tokens, and of the first ``always`` documents anyway."""
    tokens = start = 0
    while start < len(pieces) and (start < always or tokens < _MOST_TOKENS):
        sizes = np.cumsum([len(each.others) for each in pieces[start:]])
        stop = start + 1 + int(np.searchsorted(sizes, _CHUNK_CHARACTERS))
        chunk = pieces[start:stop]
        queries = work.encoder().encode_queries(
            [piece.sentence for piece in chunk] + [piece.window for piece in chunk]
        )
        others = work.encoder().encode_window([piece.others for piece in chunk])
        yield [queries[: len(chunk)], others.embeddings, queries[len(chunk) :]]
        watcher.advance(len(chunk))
        tokens, start = tokens + others.tokens, stop


def cut_pieces(text: str, rng: np.random.Generator, *, most_words: int) -> Pieces | None:
    """Cut a text into pieces at random, or return None where it is too short for that.

    It must have 16 words and three sentences, or 64 words: the halves of one sentence say other
    things than it does. Words after ``most_words``, which no encoder sees, are left out.
    """
    words = _words(text, most=most_words)
    if len(words) < _LEAST_WORDS:
        return None
    text = text[: words[-1][1]]
    least, most = _WINDOW_WORDS
    length = min(int(rng.integers(least, most + 1)), len(words) // 2)
    first = int(rng.integers(len(words) - length + 1))
    window = words[first][0], words[first + length - 1][1]
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
    return Pieces(text[slice(*chosen)], others, text[slice(*window)])


def _words(text: str, *, most: int) -> list[Span]:
    """Return the spans of words, or of characters where the text is hardly cut into words."""
    spans = [match.span() for match in islice(_WORD.finditer(text), most)]
    inside = sum(end - start for start, end in spans)
    if spans and inside / len(spans) > _LONGEST_WORD:
        return [match.span() for match in islice(_CHARACTER.finditer(text), most)]
    return spans
