"""LangChain: the whitened encoder as ``Embeddings``, a published index as a retriever.

With ``WhitenedEmbeddings`` any vector store of LangChain holds whitened vectors; with
``WhitenedRetriever`` the index itself is searched, and no store is needed.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from whiten_index.errors import ConfigError
from whiten_index.integrations.lazy import Found, LazyIndex, QueryEmbedder

try:
    from langchain_core.callbacks import CallbackManagerForRetrieverRun
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.retrievers import BaseRetriever
    from pydantic import ConfigDict, Field, PrivateAttr, field_validator, model_validator
except ImportError as error:
    raise ConfigError(
        f"whiten_index's classes for LangChain need the package langchain-core ({error}); "
        "pip install 'whiten-index[langchain]'"
    ) from error

__all__ = ["WhitenedEmbeddings", "WhitenedRetriever"]


class WhitenedEmbeddings(Embeddings):
    """Texts to the vectors that an index holds: transformed, of unit length, k numbers each.

    Queries and documents get the prompts that the index knows for them. Threads may share it.

    It keeps its transform: after a refit of the index make a new one, and embed with it all that a
    store holds. One that was pickled before a refit refuses to continue after it.

    Texts longer than the encoder's limit are cut to it, and a warning in the log counts them. If
    the index holds passages, split documents first, to get vectors such as it holds.

    Attributes:
        name: of the encoder and its transform. It changes with each refit, so use it as the
            ``namespace`` of a ``CacheBackedEmbeddings``.
    """

    def __init__(self, source: Path | str, **options: Any) -> None:
        """Read the transform; the encoder is loaded on the first text.

        Args:
            source: the folder of an index, or one that ``QueryTransform.save`` wrote.
            options: ``k``, ``model``, ``trust_remote_code``, ``device`` and ``threads``; see
                ``QueryEmbedder``.

        Raises:
            ArtifactError: there is no transform, or it is damaged.
            ConfigError: an option cannot be used, or no encoder of texts is known.
        """
        self._embedder = QueryEmbedder(source, **options)
        self.name = self._embedder.name

    def __repr__(self) -> str:
        return f"WhitenedEmbeddings({self.name!r})"

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the vectors (n, k) of documents.

        Raises:
            ConfigError: a text is blank, or the transform changed since this was pickled.
            EncoderError: the model is missing, or is not the one the index was built with.
        """
        return self._embedder.documents(texts)

    def embed_query(self, text: str) -> list[float]:
        """Return the vector (k,) of a query; see ``embed_documents``."""
        return self._embedder.query(text)


class WhitenedRetriever(BaseRetriever):
    """A published index as a retriever; ``top_k`` and ``row_filter`` may be given to ``invoke``.

    A document's ``page_content`` is its text column; its metadata are ``id``, the score and the
    other kept columns. Copies, as by ``with_config``, share the opened index. One that was pickled
    or written down opens the version that is published then.

    Attributes:
        index: folder of the index.
        top_k: documents at most.
        text_column: kept column with the text; None for ``passage_text`` if the index holds
            passages, else ``text``.
        row_filter: condition on kept columns that documents must pass, such as ``lang == 'en'``.
        score_key: name of the score in the metadata.
        options: of ``open_index``, such as ``model``, ``device`` and ``rerank``.
        trust_remote_code: let the encoder run Python code that comes with its model; not written
            down.
    """

    model_config = ConfigDict(extra="forbid")

    index: str
    top_k: int = Field(default=10, ge=1)
    text_column: str | None = None
    row_filter: str | None = None
    score_key: str = "score"
    options: dict[str, Any] = Field(default_factory=dict)
    trust_remote_code: bool = Field(default=False, exclude=True)
    _opened: tuple[Any, LazyIndex] | None = PrivateAttr(default=None)

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Let ``langchain_core.load.dumps`` write it down."""
        return True

    @field_validator("index", mode="before")
    @classmethod
    def _as_text(cls, folder: Any) -> Any:
        return str(folder) if isinstance(folder, Path) else folder

    @model_validator(mode="after")
    def _checked(self) -> WhitenedRetriever:
        self._lazy.check(text_column=self.text_column, row_filter=self.row_filter)
        self._require_free_key(self._lazy.index.bundle.documents.columns)
        return self

    def _require_free_key(self, columns: Collection[str]) -> None:
        if self.score_key == "id" or self.score_key in columns:
            raise ConfigError(
                f"the index {self.index} has a column {self.score_key}, so the score of a document "
                "cannot have that name; give it another one with score_key"
            )

    def reload(self) -> bool:
        """Open the version published since, and return whether there is one; copies get it too.

        Raises:
            WhitenIndexError: the new version cannot be opened; the one before stays in use.
        """
        return self._lazy.index.reload()

    @property
    def _lazy(self) -> LazyIndex:
        # A copy may have another index or other options than the original.
        given = (self.index, dict(self.options), self.trust_remote_code)
        if self._opened is None or self._opened[0] != given:
            self._opened = given, LazyIndex(*given)
        return self._opened[1]

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,  # noqa: ARG002
        top_k: int | None = None,
        row_filter: str | None = None,
    ) -> list[Document]:
        found = self._lazy.search(
            [query],
            top_k=self.top_k if top_k is None else top_k,
            text_column=self.text_column,
            row_filter=self.row_filter if row_filter is None else row_filter,
        )
        return [self._document(each) for each in found]

    def _document(self, found: Found) -> Document:
        # A version published since may keep a column of that name.
        self._require_free_key(found.columns)
        metadata = {"id": found.id, self.score_key: found.score, **found.columns}
        return Document(id=str(found.id), page_content=found.text, metadata=metadata)
