"""LangChain: the whitened encoder as ``Embeddings``, a published index as a retriever.

With ``WhitenedEmbeddings`` any vector store of LangChain holds whitened vectors; with
``WhitenedRetriever`` the index itself is searched, and no store is needed.
"""

from __future__ import annotations

import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from whiten_index.errors import ConfigError
from whiten_index.integrations.index_reader import Found, IndexReader
from whiten_index.integrations.query_half import QueryHalf

try:
    from langchain_core.callbacks import (
        AsyncCallbackManagerForRetrieverRun,
        CallbackManagerForRetrieverRun,
    )
    from langchain_core.documents import Document
    from langchain_core.embeddings import Embeddings
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables.config import run_in_executor
    from pydantic import ConfigDict, Field, field_validator, model_validator
except ImportError as error:
    raise ConfigError(
        f"whiten_index's classes for LangChain need the package langchain-core ({error}); "
        "pip install 'whiten-index[langchain]'"
    ) from error

__all__ = ["WhitenedEmbeddings", "WhitenedRetriever"]

# Held while a retriever takes another index, so that threads that share it open that one once.
_TAKING = threading.Lock()


class WhitenedEmbeddings(Embeddings):
    """Texts to the vectors that an index holds: transformed, of unit length, k numbers each.

    Queries and documents get the prompts that the index knows for them. Threads may share it.

    It keeps the transform that it was made with: after a refit of the index make a new one, and
    embed with it all that a store holds. One that was pickled before refuses to go on after it.

    Each text is one document: those longer than the encoder's limit are cut to it, and a
    warning in the log tells how many. Where the index is one of passages, split the documents
    before, to have vectors such as it holds.

    Attributes:
        name: of the encoder and its transform, with the first digits of the query digest: another
            one after a refit or with another prompt of queries, so what to give as the
            ``namespace`` of a ``CacheBackedEmbeddings``.
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
        """Read the transform; the encoder is loaded on the first text.

        Args:
            source: the folder of an index, or one that ``QueryTransform.save`` wrote.
            k: keep the first k numbers of each vector; None for all.
            model: where the encoder is now, if no longer where it was; it must be the same one.
            trust_remote_code: let the encoder run Python code that comes with its model.
            device: of the encoder: ``auto``, ``cpu``, ``cuda``.
            threads: CPU threads of the encoder.

        Raises:
            ArtifactError: there is none, or it is damaged.
            ConfigError: an option cannot be used, or no encoder of texts is known.
        """
        self._half = QueryHalf(
            source,
            k=k,
            model=model,
            trust_remote_code=trust_remote_code,
            device=device,
            threads=threads,
        )
        self.name = self._half.name

    def __repr__(self) -> str:
        return f"WhitenedEmbeddings({self.name!r})"

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the vectors (n, k) of documents, each cut to what the encoder takes.

        Raises:
            ConfigError: a text is blank, or the transform is another one since this was pickled.
            EncoderError: the model is gone, or is not the one the index was built with.
        """
        return self._half.documents(texts)

    def embed_query(self, text: str) -> list[float]:
        """Return the vector (k,) of a query.

        Raises:
            ConfigError: it is blank, or the transform is another one since this was pickled.
            EncoderError: the model is gone, or is not the one the index was built with.
        """
        return self._half.query(text)


class WhitenedRetriever(BaseRetriever):
    """A published index as a retriever; ``top_k`` and ``row_filter`` may be given to ``invoke``.

    A document's ``page_content`` is its text column, and its metadata are ``id``, the score and
    the other kept columns. Copies, as by ``with_config``, share the opened index; what was pickled
    or written down opens the version that is published then.

    Attributes:
        index: folder of the index.
        top_k: documents at most.
        text_column: the kept column with the text; None for ``passage_text`` where the index holds
            passages, else ``text``.
        row_filter: condition on kept columns that documents must pass, such as ``lang == 'en'``.
        score_key: name of the score among the metadata.
        options: of ``open_index``, such as ``model``, ``device`` and ``rerank``.
        trust_remote_code: let the encoder run Python code that comes with its model; it is not
            written down.
        reader: the opened index, made from ``index`` and ``options``.
    """

    model_config = ConfigDict(extra="forbid")

    index: str
    top_k: int = 10
    text_column: str | None = None
    row_filter: str | None = None
    score_key: str = "score"
    options: dict[str, Any] = Field(default_factory=dict)
    trust_remote_code: bool = Field(default=False, exclude=True)
    reader: IndexReader | None = Field(default=None, exclude=True, repr=False)

    @classmethod
    def is_lc_serializable(cls) -> bool:
        """Tell that ``langchain_core.load.dumps`` writes it down."""
        return True

    @field_validator("index", mode="before")
    @classmethod
    def _as_text(cls, folder: Any) -> Any:
        return str(folder) if isinstance(folder, Path) else folder

    @model_validator(mode="after")
    def _checked(self) -> WhitenedRetriever:
        self._reader().check(
            top_k=self.top_k, text_column=self.text_column, row_filter=self.row_filter
        )
        self._require_free_key(self._reader().index.bundle.documents.columns)
        return self

    def _require_free_key(self, columns: Collection[str]) -> None:
        if self.score_key == "id" or self.score_key in columns:
            raise ConfigError(
                f"the index {self.index} has a column {self.score_key} of its own, so the score "
                "of a document cannot be called that; name it otherwise with score_key"
            )

    def reload(self) -> bool:
        """Open the version published since, and tell whether there is one; copies get it too.

        Raises:
            WhitenIndexError: the new version cannot be opened; the one before stays in use.
        """
        return self._reader().index.reload()

    def _reader(self) -> IndexReader:
        with _TAKING:
            how = (self.index, self.options, self.trust_remote_code)
            if self.reader is None or not self.reader.serves(*how):
                self.reader = IndexReader(*how)
            return self.reader

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,  # noqa: ARG002
        top_k: int | None = None,
        row_filter: str | None = None,
    ) -> list[Document]:
        found = self._reader().search(
            [query],
            top_k=self.top_k if top_k is None else top_k,
            text_column=self.text_column,
            row_filter=self.row_filter if row_filter is None else row_filter,
        )
        return [self._document(each) for each in found]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **asked: Any
    ) -> list[Document]:
        found: list[Document] = await run_in_executor(
            None,
            self._get_relevant_documents,
            query,
            run_manager=run_manager.get_sync(),
            **asked,
        )
        return found

    def _document(self, found: Found) -> Document:
        # A version published since may keep a column of that name.
        self._require_free_key(found.columns)
        metadata = {"id": found.id, self.score_key: found.score, **found.columns}
        return Document(id=str(found.id), page_content=found.text, metadata=metadata)
