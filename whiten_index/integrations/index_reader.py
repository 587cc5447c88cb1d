"""A published index as the retrievers of frameworks hold it, with its hits as texts.

Frameworks copy, pickle and write it down, which takes along how the index is opened. What is read
again opens what is published then, which is right: queries and documents are of one version.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from whiten_index.artifacts.paths import absolute, require_path, shown
from whiten_index.corpus.batches import PASSAGE_TEXT
from whiten_index.errors import ConfigError
from whiten_index.search.query_encoder import require_texts
from whiten_index.search.search_index import Hit, SearchIndex, open_index

TEXT = "text"


@dataclass(frozen=True, slots=True)
class Found:
    """A hit as frameworks take it.

    Attributes:
        id: the document's id.
        score: see ``Hit``.
        text: of the document, or of its best passage where the index holds passages.
        columns: the other kept columns.
    """

    id: str | int
    score: float
    text: str
    columns: dict[str, Any]


class IndexReader:
    """A published index as retrievers hold it, opened on first use; threads may share it.

    Attributes:
        given: the folder of the index, as it was given.
        folder: the same as an absolute path, by which it is opened wherever the process is then.
        options: of ``open_index``.
    """

    def __init__(
        self,
        folder: Path | str,
        options: Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Take what ``open_index`` needs; no file is read yet.

        Raises:
            ConfigError: the path can name nothing, or an option is unknown.
        """
        require_path(str(folder), what="the index")
        self.given, self.folder = str(folder), str(absolute(folder))
        self.options = plain_options(options or {})
        self._trusted = trust_remote_code
        self._opened: SearchIndex | None = None
        self._opening = threading.Lock()

    def __reduce__(self) -> tuple[Callable[..., IndexReader], tuple[Any, ...]]:
        """Copy and pickle how the index is opened."""
        return self._again, (self.given, self.folder, self.options, self._trusted)

    @classmethod
    def _again(cls, given: str, folder: str, options: dict[str, Any], trusted: bool) -> IndexReader:
        """Return what was pickled, perhaps in another folder or process."""
        made = cls(given, options, trusted)
        made.folder = folder
        return made

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, IndexReader)
            and other.folder == self.folder
            and other.serves(self.given, self.options, self._trusted)
        )

    def __hash__(self) -> int:
        return hash(self.folder)

    def serves(self, folder: Path | str, options: Mapping[str, Any], trusted: bool) -> bool:
        """Tell whether this is what was made of these, wherever the process was then."""
        asked = (str(folder), plain_options(options), trusted)
        return (self.given, self.options, self._trusted) == asked

    @property
    def index(self) -> SearchIndex:
        """The opened index.

        Raises:
            ArtifactError: nothing is published there, or it is damaged.
            ConfigError: an option cannot be used, or the index knows no encoder of queries.
        """
        with self._opening:
            if self._opened is None:
                opened = open_index(self.folder, trust_remote_code=self._trusted, **self.options)
                if opened.encoder_config is None:
                    raise no_encoder(self.folder, "a retriever")
                self._opened = opened
            return self._opened

    def check(self, *, top_k: int, text_column: str | None, row_filter: str | None) -> None:
        """Refuse what no search of this index can take; see ``search``."""
        require_top_k(top_k)
        self.column(text_column)
        if row_filter is not None:
            self.index.matches(row_filter)

    def column(self, name: str | None) -> str:
        """Return the kept column that holds the text of hits.

        Args:
            name: None for ``passage_text`` where the index holds passages, else ``text``.

        Raises:
            ConfigError: it is not kept, or holds no text.
        """
        index = self.index
        asked = name or (PASSAGE_TEXT if index.grouped else TEXT)
        documents = index.bundle.documents
        if asked not in documents.columns:
            raise self._not_kept(asked, documents.columns)
        kind = documents.schema.field(asked).type
        if not _is_text(kind):
            raise ConfigError(
                f"the column {asked} of the index {self.folder} holds {kind}, not text; name a "
                "kept column of texts with text_column"
            )
        return asked

    def search(
        self,
        queries: Sequence[str],
        *,
        top_k: int,
        text_column: str | None = None,
        row_filter: str | None = None,
    ) -> list[Found]:
        """Return what is found, best first.

        Args:
            queries: one; several are searched for by the mean of their embeddings.
            top_k: hits at most.
            text_column: see ``column``.
            row_filter: condition on kept columns that hits must pass.

        Raises:
            ConfigError: a query is blank, or an option cannot be used.
            EncoderError: the model is not the one the index was built with.
        """
        require_top_k(top_k)
        require_texts(queries)
        index, column = self.index, self.column(text_column)
        if len(queries) == 1:
            (hits,) = index.search(queries, top_k=top_k, row_filter=row_filter)
        else:
            mean = index.encode(queries).mean(axis=0, keepdims=True)
            (hits,) = index.search_embeddings(mean, top_k=top_k, row_filter=row_filter)
        return [self._found(hit, column) for hit in hits]

    def _found(self, hit: Hit, column: str) -> Found:
        columns = dict(hit.columns)
        # Another thread may have reloaded the index since the column was looked for.
        if column not in columns:
            raise self._not_kept(column, tuple(columns))
        return Found(hit.id, hit.score, columns.pop(column) or "", columns)

    def _not_kept(self, column: str, kept: Sequence[str]) -> ConfigError:
        return ConfigError(
            f"the index {self.folder} keeps no column {column} ({', '.join(kept) or 'none'} kept), "
            "which would be the text of hits; name a kept one with text_column, or build the index "
            f"again with --keep {column}"
        )


def plain_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of ``open_index`` as JSON values, which frameworks write down.

    Raises:
        ConfigError: one is unknown, or a permission, which is never written down.
    """
    if "trust_remote_code" in options:
        raise ConfigError(
            "trust_remote_code is an argument beside options, which frameworks write down; move it "
            "out of options"
        )
    apart = ("path", "trust_remote_code")
    known = [name for name in inspect.signature(open_index).parameters if name not in apart]
    if unknown := [name for name in options if name not in known]:
        raise ConfigError(
            f"{', '.join(unknown)} is no option of open_index; it takes {', '.join(known)}"
        )
    return {
        name: str(value) if isinstance(value, Path) else value for name, value in options.items()
    }


def require_top_k(top_k: int) -> None:
    """Refuse a number of hits below one.

    Raises:
        ConfigError: it is.
    """
    if isinstance(top_k, bool) or not isinstance(top_k, int) or top_k < 1:
        raise ConfigError(f"top_k is how many hits are wanted, at least 1; not {shown(top_k)}")


def no_encoder(folder: str, who: str) -> ConfigError:
    """Return the error of an index that names no encoder of texts, which ``who`` needs."""
    return ConfigError(
        f"{folder} comes from an embedding column and names no encoder of texts, which {who} "
        "needs; build the index again with --model to name it"
    )


def _is_text(kind: pa.DataType) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
