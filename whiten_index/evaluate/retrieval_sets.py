"""The sets of an evaluation of retrieval: files found, queries and judgements read and checked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from whiten_index.artifacts.files import is_file
from whiten_index.corpus.parquet_corpus import ParquetCorpus
from whiten_index.errors import ConfigError, CorpusError
from whiten_index.evaluate.retrieval_config import RetrievalConfig
from whiten_index.labels.beir import (
    id_column,
    parquet_corpus,
    qrels_file,
    queries_file,
    set_files,
    text_columns,
)
from whiten_index.labels.judged import JudgedQueries, read_judged
from whiten_index.progress import Stages
from whiten_index.search.query_encoder import query_embeddings
from whiten_index.search.search_index import SearchIndex
from whiten_index.store.embedding_store import EmbeddingStore


@dataclass(eq=False)
class RetrievalSet:
    """A set whose queries and judgements were read.

    Attributes:
        name: of the set.
        judged: its queries and judgements.
        corpus: what is to be indexed, empty where an index is there.
        config: with the columns of this corpus.
        made_of: file of the corpus that was made for the search -> the user's own file.
    """

    name: str
    judged: JudgedQueries
    corpus: tuple[str, ...]
    config: RetrievalConfig
    made_of: Mapping[str, str] = field(default_factory=dict)
    _embeddings: NDArray[np.float32] | None = field(default=None, repr=False)

    def embeddings(
        self, opened: SearchIndex, store: EmbeddingStore | None, stages: Stages
    ) -> NDArray[np.float32]:
        """Return the embeddings (q, d) of the queries, encoded once for all transforms."""
        if self._embeddings is None:
            texts = list(self.judged.texts.values())
            self._embeddings = query_embeddings(store, texts, opened.encode, stages)
        return self._embeddings


def read_sets(config: RetrievalConfig, work: Path) -> list[RetrievalSet]:
    """Read queries and judgements of all sets, before the corpus of one is encoded.

    Args:
        config: names the sets.
        work: for corpora of JSON lines, as Parquet.

    Raises:
        ConfigError: a file is missing, or has an unknown ending.
        CorpusError: a file cannot be used, or corpus, queries and judgements do not fit together.
    """
    if not config.builds:
        qrels, split = judgements(config)
        queries = queries_file(Path(config.sets[0])) if config.sets else Path(str(config.queries))
        return [
            RetrievalSet(
                config.names[0],
                read_judged(queries, qrels, split=split),
                (),
                config,
            )
        ]
    if not config.sets:
        read = read_judged(str(config.queries), str(config.qrels), split=config.qrels_split)
        return [_with_corpus(config.names[0], read, config.corpus, config, work)]
    made = []
    for number, (name, folder) in enumerate(zip(config.names, config.sets, strict=True)):
        # A folder may be named by a link that is called as another one's.
        files = set_files(Path(folder), config.split, work=work / str(number))
        read = read_judged(files.queries, files.qrels, split=files.split)
        made_of = {str(files.corpus): str(files.source)}
        made.append(_with_corpus(name, read, tuple(made_of), config, work, made_of))
    return made


def judgements(config: RetrievalConfig) -> tuple[Path, str | None]:
    """Return the judgements of the one set, and which of their rows: None for all of them."""
    if config.sets:
        return qrels_file(Path(config.sets[0]), config.split)
    return Path(str(config.qrels)), config.qrels_split


def _with_corpus(
    name: str,
    judged: JudgedQueries,
    corpus: tuple[str, ...],
    config: RetrievalConfig,
    work: Path,
    made_of: Mapping[str, str] | None = None,
) -> RetrievalSet:
    files = {
        # Each in a folder of its own: files of one name must not replace each other.
        each: parquet_corpus(Path(each), work / str(number))
        for number, each in enumerate(corpus)
        if is_file(each)
    }
    made_of = made_of or {str(file): each for each, file in files.items()}
    if files.keys() == set(corpus):
        first = files[corpus[0]]
        # What was made of BEIR's JSON lines calls it id.
        of_lines = made_of[str(first)] != str(first)
        named = None if of_lines and config.id_column == "_id" else config.id_column
        config = replace(
            config,
            text_columns=config.text_columns or tuple(text_columns(first)),
            id_column=named or id_column(first),
        )
    # Folders, globs and URIs are a build's to open; their columns are named, or the usual ones.
    sources = tuple(str(files.get(each, each)) for each in corpus)
    build = config.build_config(None, corpus=sources, out="index", store="store")
    with naming(made_of):
        judged.require_any(map(str, ParquetCorpus.open(build.corpus_config()).ids()))
    return RetrievalSet(name, judged, sources, config, made_of)


@contextlib.contextmanager
def naming(made_of: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the user's own file, not the one made of it, which is gone afterwards.

    Args:
        made_of: file that was made -> the user's own.
    """
    try:
        yield
    except (ConfigError, CorpusError) as error:
        said = str(error)
        for made, own in made_of.items():
            said = said.replace(made, own)
        if said == str(error):
            raise
        raise type(error)(said) from error
