"""Haystack: the whitened encoder as embedders, a published index as a retriever.

A pipeline that was written down is read with ``Pipeline.loads(text, allowed_modules=
["whiten_index.*"])``: Haystack 3 refuses components of packages that are not trusted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from whiten_index.errors import ConfigError
from whiten_index.integrations.lazy import LazyIndex, QueryEmbedder

try:
    from haystack import Document, component, default_to_dict
except ImportError as error:
    raise ConfigError(
        f"whiten_index's classes for Haystack need the package haystack-ai ({error}); "
        "pip install 'whiten-index[haystack]'"
    ) from error

__all__ = ["WhitenedDocumentEmbedder", "WhitenedIndexRetriever", "WhitenedTextEmbedder"]


class _Settings:
    """Settings of a component as Haystack writes them down; it reads them as arguments."""

    _settings: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        written: dict[str, Any] = default_to_dict(self, **self._settings)
        return written


class _Embedder(_Settings):
    """Settings of both embedders, and the encoder of queries that they open."""

    def __init__(
        self, source: str | Path, *, trust_remote_code: bool = False, **options: Any
    ) -> None:
        """Take the settings; ``warm_up`` reads files.

        Args:
            source: the folder of an index, or one that ``QueryTransform.save`` wrote.
            trust_remote_code: let the encoder run Python code that comes with its model.
            options: ``k``, ``model``, ``device`` and ``threads``; see ``QueryEmbedder``.

        Raises:
            ConfigError: the path can name nothing.
        """
        self._settings = {"source": str(source), **options}
        # Not written down: a file gives no permission.
        self._embedder = QueryEmbedder(**self._settings, trust_remote_code=trust_remote_code)

    def warm_up(self) -> None:
        """Read the transform and load the encoder, once.

        Raises:
            ArtifactError: the transform is missing or damaged.
            ConfigError: an option cannot be used, no encoder of texts is known, or the transform
                changed since this was pickled.
            EncoderError: the model is missing, or is not the one the index was built with.
        """
        _ = self._embedder.transform.encoder


@component
class WhitenedTextEmbedder(_Embedder):
    """A query to the vector that the index searches for: transformed, of unit length.

    It keeps its transform, also after a refit of the index; see ``WhitenedDocumentEmbedder``.
    """

    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, list[float]]:
        """Return the vector (k,) of a query as ``embedding``.

        Raises:
            ConfigError: the text is blank.
        """
        return {"embedding": self._embedder.query(text)}


@component
class WhitenedDocumentEmbedder(_Embedder):
    """Documents to copies with the vectors that the index holds: transformed, of unit length.

    It keeps its transform: after a refit of the index make a new one, and embed with it all that a
    store holds. One that was pickled warm before a refit refuses to continue after it; a pipeline
    that was written down takes the transform that it finds.

    Documents longer than the encoder's limit are cut to it, and a warning in the log counts them.
    If the index holds passages, put a splitter before, to get vectors such as it holds.
    """

    def __init__(
        self,
        source: str | Path,
        *,
        meta_fields_to_embed: Sequence[str] = (),
        embedding_separator: str = " ",
        progress_bar: bool = True,
        **options: Any,
    ) -> None:
        """Take the settings; ``warm_up`` reads files.

        Args:
            source: the folder of an index, or one that ``QueryTransform.save`` wrote.
            meta_fields_to_embed: put before the content; empty ones are left out.
            embedding_separator: between them; a space joins the text columns of an index.
            progress_bar: show one.
            options: ``k``, ``model``, ``trust_remote_code``, ``device`` and ``threads``; see
                ``QueryEmbedder``.

        Raises:
            ConfigError: the path can name nothing.
        """
        # Haystack makes the class again, so ``super()`` would not know it.
        _Embedder.__init__(self, source, **options)
        self._settings |= {
            "meta_fields_to_embed": list(meta_fields_to_embed),
            "embedding_separator": embedding_separator,
            "progress_bar": progress_bar,
        }

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, list[Document]]:
        """Return copies of documents with their vectors (k,) as ``embedding``.

        Raises:
            ConfigError: a document has no text.
        """
        texts = [self._text(each) for each in documents]
        hidden = not self._settings["progress_bar"]
        with tqdm(total=len(texts), desc="embed documents", unit="doc", disable=hidden) as bar:
            vectors = self._embedder.documents(texts, advance=bar.update)
        pairs = zip(documents, vectors, strict=True)
        return {"documents": [replace(document, embedding=vector) for document, vector in pairs]}

    def _text(self, document: Document) -> str:
        fields = (document.meta.get(name) for name in self._settings["meta_fields_to_embed"])
        parts = [str(each) for each in (*fields, document.content) if each not in (None, "")]
        text: str = self._settings["embedding_separator"].join(parts)
        if not text.strip():
            raise ConfigError(
                f"the document {document.id} has no text; leave it out, or name parts of its meta "
                "that have some with meta_fields_to_embed"
            )
        return text


@component
class WhitenedIndexRetriever(_Settings):
    """A published index as a retriever of documents by query, with no document store.

    A document's content is the text column, its id the index's as a text, and its meta are the
    other kept columns.
    """

    def __init__(
        self,
        index: str | Path,
        *,
        top_k: int = 10,
        text_column: str | None = None,
        row_filter: str | None = None,
        options: dict[str, Any] | None = None,
        trust_remote_code: bool = False,
    ) -> None:
        """Take the settings; ``warm_up`` opens the index.

        Args:
            index: its folder.
            top_k: documents at most.
            text_column: kept column with the text; None for ``passage_text`` if the index holds
                passages, else ``text``.
            row_filter: condition on kept columns that documents must pass, as ``lang == 'en'``.
            options: of ``open_index``, such as ``model``, ``device`` and ``rerank``.
            trust_remote_code: let the encoder run Python code that comes with its model; it is
                not written down.

        Raises:
            ConfigError: the path can name nothing, or an option is a permission.
        """
        self._lazy = LazyIndex(index, options, trust_remote_code)
        self._settings = {
            "index": str(index), "top_k": top_k, "text_column": text_column,
            "row_filter": row_filter, "options": self._lazy.options,
        }  # fmt: skip

    def warm_up(self) -> None:
        """Open the index and load the encoder of queries, once.

        Raises:
            ArtifactError: nothing is published there, or it is damaged.
            ConfigError: an option cannot be used, the text column is not kept, or the index knows
                no encoder of queries.
            EncoderError: the model is missing, or is not the one the index was built with.
        """
        settings = self._settings
        self._lazy.check(text_column=settings["text_column"], row_filter=settings["row_filter"])
        _ = self._lazy.index.encoder

    def reload(self) -> bool:
        """Open the version published since, and return whether there is one.

        Raises:
            WhitenIndexError: the new version cannot be opened; the one before stays in use.
        """
        return self._lazy.index.reload()

    @component.output_types(documents=list[Document])
    def run(
        self, query: str, top_k: int | None = None, row_filter: str | None = None
    ) -> dict[str, list[Document]]:
        """Return the documents of a query, best first, as ``documents``.

        Args:
            query: the text.
            top_k: in place of the component's.
            row_filter: in place of the component's.

        Raises:
            ConfigError: the query is blank, or an option cannot be used.
        """
        found = self._lazy.search(
            [query],
            top_k=self._settings["top_k"] if top_k is None else top_k,
            text_column=self._settings["text_column"],
            row_filter=self._settings["row_filter"] if row_filter is None else row_filter,
        )
        return {
            "documents": [
                Document(id=str(e.id), content=e.text, meta=e.columns, score=e.score) for e in found
            ]
        }
