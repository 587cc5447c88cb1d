"""Haystack: the whitened encoder as embedders, a published index as a retriever.

A pipeline that was written down is read with ``Pipeline.loads(text, allowed_modules=
["whiten_index.*"])``: Haystack 3 refuses components of packages that are not trusted.
"""

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tqdm import tqdm

from whiten_index.encoding.spec import EncoderOpening, require_options
from whiten_index.errors import ConfigError
from whiten_index.integrations.lazy import IndexRetriever, importing, noted, open_transform
from whiten_index.paths import absolute, require_no_secret, require_path
from whiten_index.search.query_transform import QueryTransform

with importing("haystack-ai", of="Haystack", extra="haystack"):
    from haystack import Document, component, default_to_dict


class _Written:
    """Dictionary from which a written pipeline is made again."""

    settings: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return dict(default_to_dict(self, **self.settings))

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Make a component of written settings, which give no consent to remote code."""
        return cls(**noted(data["init_parameters"]))


class _Embedder(_Written):
    """Settings of both embedders, and the encoder of queries that they open."""

    def __init__(
        self, source: str | Path, *, trust_remote_code: bool = False, **options: Any
    ) -> None:
        """Take the settings, which are those of ``open_transform``; ``warm_up`` reads files."""
        require_path(str(source), what="the index or query transform")
        require_options(options, ("k", *EncoderOpening.__annotations__))
        require_no_secret(options, what="the encoder")
        self.settings = {"source": str(source), **options}
        # Not written down: a file gives no permission.
        self._options = {**options, "trust_remote_code": trust_remote_code}
        self._source = absolute(source)

    @cached_property
    def _transform(self) -> QueryTransform:
        return open_transform(self._source, **self._options)

    def warm_up(self) -> None:
        """Read the transform, as ``open_transform`` does, and load the encoder, once."""
        _ = self._transform.encoder


@component
class WhitenedTextEmbedder(_Embedder):
    """A query to the vector that the index searches for, transformed; see ``open_transform``."""

    @component.output_types(embedding=list[float])
    def run(self, text: str) -> dict[str, list[float]]:
        """Return the vector (k,) of a query, which must not be blank, as ``embedding``."""
        return {"embedding": self._transform.encode_queries([text])[0].tolist()}


@component
class WhitenedDocumentEmbedder(_Embedder):
    """Documents to copies with the vectors that the index holds; see ``open_transform``."""

    def __init__(self, source: str | Path, *, progress_bar: bool = True, **options: Any) -> None:
        """Take the settings, and whether a bar is shown; ``warm_up`` reads files."""
        # Haystack makes the class again, so ``super()`` would not know it.
        _Embedder.__init__(self, source, **options)
        self.settings["progress_bar"] = progress_bar

    @component.output_types(documents=list[Document])
    def run(self, documents: list[Document]) -> dict[str, list[Document]]:
        """Return copies of documents with their vectors (k,) as ``embedding``.

        Raises:
            ConfigError: a document has no text.
        """
        texts = [each.content or "" for each in documents]
        if blank := [each.id for each in documents if not (each.content or "").strip()]:
            raise ConfigError(f"the document {blank[0]} has no text; leave it out")
        hidden = not self.settings["progress_bar"]
        with tqdm(total=len(texts), desc="embed documents", unit="doc", disable=hidden) as bar:
            vectors = self._transform.encode_documents(texts, advance=bar.update)
        pairs = zip(documents, vectors.tolist(), strict=True)
        return {"documents": [replace(document, embedding=vector) for document, vector in pairs]}


@component
class WhitenedIndexRetriever(_Written, IndexRetriever):
    """A published index as a retriever of documents by query, with no document store.

    A document's content is the text column, its id the index's as a text, and its meta are the
    other kept columns. Consent to remote code is not written down.
    """

    @component.output_types(documents=list[Document])
    def run(
        self, query: str, top_k: int | None = None, row_filter: str | None = None
    ) -> dict[str, list[Document]]:
        """Return the documents of a query, best first, as ``documents``.

        ``top_k`` and ``row_filter`` take the place of the component's.
        """
        found = self.search([query], top_k=top_k, row_filter=row_filter)
        return {
            "documents": [
                Document(id=str(hit.id), content=text, meta=hit.columns, score=hit.score)
                for text, hit in found
            ]
        }
