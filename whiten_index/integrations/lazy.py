"""Indexes and query encoders as frameworks hold them: opened on first use, copied and pickled.

What is pickled or written down is how to open them; the opened index or encoder stays behind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from whiten_index.artifacts.files import exists
from whiten_index.artifacts.manifest import MANIFEST
from whiten_index.corpus.batches import PASSAGE_TEXT
from whiten_index.errors import ConfigError
from whiten_index.paths import absolute, require_folder, require_path
from whiten_index.search.query_transform import QueryTransform
from whiten_index.search.search_index import Hit, SearchIndex, open_index
from whiten_index.versions.published import CURRENT


class QueryEmbedder:
    """A query transform as embedders of frameworks hold it; threads may share it.

    Once opened it keeps its transform, also after a refit of the index. One that was pickled
    after it was opened refuses to open another transform, whose vectors would not fit.
    """

    def __init__(
        self,
        source: Path | str,
        *,
        k: int | None = None,
        model: str | None = None,
        trust_remote_code: bool = False,
        device: str = "auto",
        threads: int | None = None,
    ) -> None:
        """Take what is needed to open it; no file is read yet.

        Args:
            source: the folder of an index, or one that ``QueryTransform.save`` wrote.
            k: keep the first k numbers of each vector; None for all.
            model: where the encoder is now, if it was moved; it must be the same one.
            trust_remote_code: let the encoder run Python code that comes with its model.
            device: of the encoder: ``auto``, ``cpu``, ``cuda``.
            threads: CPU threads of the encoder.

        Raises:
            ConfigError: the path can name nothing.
        """
        require_path(str(source), what="the index or query transform")
        require_folder(source, what="the query transform")
        self._source, self._k = Path(source).absolute(), k
        self._options: dict[str, Any] = {
            "model": model, "trust_remote_code": trust_remote_code, "device": device,
            "threads": threads,
        }  # fmt: skip
        self._expected: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Pickle how the transform is opened, and its digest if it was opened."""
        state = {**self.__dict__}
        opened = state.pop("transform", None)
        return {**state, "_expected": opened.query_digest if opened else self._expected}

    def __deepcopy__(self, memo: object) -> Self:
        """Share it within a process, so that the encoder is loaded once."""
        return self

    @cached_property
    def transform(self) -> QueryTransform:
        """The transform, opened on first use."""
        source = self._source
        saved = exists(source / MANIFEST) and not exists(source / CURRENT)
        made = (QueryTransform.load if saved else QueryTransform.of)(source, **self._options)
        if made.spec is None:
            raise _no_encoder(source, "an embedder")
        made = made if self._k is None else made.truncate(self._k)
        if self._expected not in (None, made.query_digest):
            raise ConfigError(
                f"{source} has another transform, encoder or prompt of queries since this embedder "
                "was pickled, so its vectors do not fit earlier ones; make a new embedder, and "
                "embed with it all that a store holds"
            )
        return made

    @property
    def name(self) -> str:
        """The encoder of queries, the width of the vectors and 8 digits of the query digest.

        It changes with each refit, encoder and prompt of queries, so caches may use it as a key.
        """
        transform = self.transform
        assert transform.spec is not None
        model = Path(transform.spec.model).name
        return f"{model}-whitened-{transform.k}-{transform.query_digest[:8]}"

    def query(self, text: str) -> list[float]:
        """Return the vector (k,) of a query."""
        return self.transform.encode_queries([text])[0].tolist()  # type: ignore[no-any-return]

    def documents(
        self, texts: Sequence[str], *, advance: Callable[[int], None] | None = None
    ) -> list[list[float]]:
        """Return the vectors (n, k) of documents; see ``QueryTransform.encode_documents``."""
        vectors = self.transform.encode_documents(texts, advance=advance)
        return vectors.tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Found:
    """A hit with its text apart from the other kept columns."""

    id: str | int
    score: float
    text: str
    columns: dict[str, Any]


class LazyIndex:
    """A published index as retrievers of frameworks hold it; threads may share it."""

    def __init__(
        self,
        folder: Path | str,
        options: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Take the arguments of ``open_index``; no file is read yet."""
        require_path(str(folder), what="the index")
        if "trust_remote_code" in (options or {}):
            raise ConfigError(
                "trust_remote_code is an argument, not one of the options, which frameworks write "
                "down; move it out of options"
            )
        self.folder = str(absolute(folder))
        # As JSON values, which frameworks write down.
        self.options: dict[str, Any] = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in (options or {}).items()
        }
        self._trusted = trust_remote_code

    def __getstate__(self) -> dict[str, Any]:
        """Pickle how the index is opened."""
        return {name: value for name, value in self.__dict__.items() if name != "index"}

    @cached_property
    def index(self) -> SearchIndex:
        """The opened index."""
        opened = open_index(self.folder, trust_remote_code=self._trusted, **self.options)
        if opened.encoder_config is None:
            raise _no_encoder(self.folder, "a retriever")
        return opened

    def check(self, *, text_column: str | None, row_filter: str | None) -> None:
        """Refuse what no search of this index can take; see ``search``."""
        self._column(text_column, self.index.bundle.documents.columns)
        if row_filter is not None:
            self.index.matches(row_filter)

    def search(
        self,
        queries: Sequence[str],
        *,
        top_k: int,
        text_column: str | None = None,
        row_filter: str | None = None,
    ) -> list[Found]:
        """Return hits, best first; several queries are searched for by their mean embedding."""
        index = self.index
        if len(queries) == 1:
            (hits,) = index.search(queries, top_k=top_k, row_filter=row_filter)
        else:
            mean = index.encode(queries).mean(axis=0, keepdims=True)
            (hits,) = index.search_embeddings(mean, top_k=top_k, row_filter=row_filter)
        return [self._found(hit, text_column) for hit in hits]

    def _found(self, hit: Hit, text_column: str | None) -> Found:
        columns = dict(hit.columns)
        text = columns.pop(self._column(text_column, columns))
        return Found(hit.id, hit.score, text or "", columns)

    def _column(self, name: str | None, kept: Sequence[str] | Mapping[str, Any]) -> str:
        asked = name or (PASSAGE_TEXT if self.index.grouped else "text")
        if asked not in kept:
            raise ConfigError(
                f"the index {self.folder} keeps no column {asked} ({', '.join(kept) or 'none'} "
                "kept), which would be the text of hits; name a kept one with text_column, or "
                f"build the index again with --keep {asked}"
            )
        return asked


def _no_encoder(source: Path | str, who: str) -> ConfigError:
    return ConfigError(
        f"{source} comes from an embedding column and names no encoder of texts, which {who} "
        "needs; build the index again with --model to name it"
    )
